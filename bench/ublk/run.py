#!/usr/bin/python3
"""What a request of a block device by ublk costs, for each way that data goes, in a guest.

The guest's clock counts instructions (tests/guest/guest.py), 2 ns each, so that the figures are the
same on any machine, and say nothing of how fast one is: a copy is an instruction for each byte
there, or for each eight. Reads and writes of several lengths tell the two parts of the cost apart.

Usage: bench/ublk/run.py WAYS [--weir WEIR] [--libublk DIR] [--kernel PACKAGE[/RELEASE]] [--json FILE]

WAYS is the program beside this. --libublk adds the crate's examples `null` and `loop`, as `cargo
build --release --example null --example loop` leaves them in DIR where libclang is. Prints a table;
leaves nothing behind but the file.
"""

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "guest"))

from guest import Guest, GuestFailed  # noqa: E402  (found only after the line above)

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute()
CACHE = Path(os.environ.get("WEIR_GUEST_DIR", TARGET / "guest"))
LENGTHS = {"4 KiB": 4096, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
# 1 ns of the guest's clock is half an instruction.
NANOS = 2
# Memory that is lent, `pread` and `pwrite`, and buffers that register themselves.
WAYS = ("lent", "user-copy", "zero-copy")
# Nothing at all, and a device of the kernel's that does nothing with data (null_blk).
DISKS = ("null", "/dev/nullb0")


def asked(device):
    """A script that prints a line for each length and direction."""
    return "\n".join(
        f"echo {length} {operation} $(ublk-ways ask {device} {operation} {length} {max(32, min(512, (16 << 20) // length))})"
        for length in LENGTHS.values()
        for operation in ("read", "write")
    )


def figures(text):
    """Instructions a request, by length and direction."""
    # The shell, too, says that it has killed something.
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    if any(len(row) != 3 for row in rows):
        raise GuestFailed(f"a request failed:\n{text}")
    return {f"{length} {operation}": int(nanos) // NANOS for length, operation, nanos in rows}


def served(guest, command, ready, end):
    """What a server costs that says such a word in the background. It makes /dev/ublkb0. `None`
    where the kernel does not have its way.
    """
    script = f"""
        [ -e /dev/ublk-control ] || load ublk_drv
        : >/tmp/said
        {command} >/tmp/said 2>&1 &
        server=$!
        until grep -q '{ready}' /tmp/said; do
            pause 0.02
            kill -0 $server 2>/dev/null || {{ cat /tmp/said; exit 3; }}
        done
        {asked("/dev/ublkb0")}
        {end}
        wait $server || :
    """
    output, status = guest.run_status(script)
    if status == 3 and "does not have that way" in output:
        return None
    if status:
        raise GuestFailed(f"{command}: ended with status {status}:\n{output}")
    return figures(output)


def servers(options, disk):
    """By its name, how each is started and ended over a disk."""
    killed = "kill -KILL $server; wait $server; ublk-ways remove /dev/ublkb0"
    for way in WAYS:
        yield way, (f"ublk-ways serve {way} {disk}", "ready", killed)
    if options.libublk:
        # Each says what its device is once that has begun.
        example = "null add" if disk == "null" else f"loop add -f {disk}"
        yield "libublk", (f"{example} -q 1 -d 128 --foreground", "state LIVE", killed)
    image = "null:64M" if disk == "null" else disk
    weir = f"weir serve {image} -f raw --cache none --prefetch off --ublk"
    yield "weir", (weir, " ready", "kill -TERM $server")
    # Where the kernel could do without; what is null has no file.
    if disk != "null":
        yield "weir, zero-copy=off", (f"{weir}=0,zero-copy=off", " ready", "kill -TERM $server")


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", help="the program ublk-ways")
    parser.add_argument("--weir", default=TARGET / "debug" / "weir", help="also measured (target/debug/weir)")
    parser.add_argument("--libublk", type=Path, metavar="DIR", help="its examples null and loop, also measured")
    parser.add_argument("--kernel", metavar="PACKAGE[/RELEASE]", help="as tests/guest/build takes it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    result = {}
    more = {"ublk-ways": options.ways}
    if options.libublk:
        more |= {example: options.libublk / example for example in ("null", "loop")}
    with Guest(CACHE, options.weir, [], more=more, kernel=options.kernel) as guest:
        kernel = guest.run("uname -r").strip()
        for disk in DISKS:
            for name, server in servers(options, disk):
                result[f"{name}, {disk}"] = served(guest, *server)
    names = [f"{length} {operation}" for length in LENGTHS.values() for operation in ("read", "write")]
    titles = [f"{length} {operation}" for length in LENGTHS for operation in ("read", "write")]
    print(f"Instructions a request, Linux {kernel}\n\n| | {' | '.join(titles)} |\n|{' --- |' * (len(titles) + 1)}")
    for row, costs in result.items():
        print(f"| {row} | {' | '.join(str(costs[name]) if costs else '–' for name in names)} |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"kernel": kernel, "instructions": result}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except GuestFailed as error:
        sys.exit(f"bench/ublk/run.py: {error}")
