"""QEMU's tools as clients of vhost-user-blk, without a machine.

A tool opens a disk, and the next tool opens it after the first has ended.
"""

import subprocess

from load import Wrong
from stage import MIB, Skipped

DRIVER = "virtio-blk-vhost-user"


def tools(stage):
    """qemu-io and qemu-img."""
    stage.case("tools", lambda: _both(stage))


def _both(stage):
    for kind in ("raw", "qcow2"):
        _one(stage, kind)


def _one(stage, kind):
    server = stage.serve(stage.image("tools", kind), kind, queues=2)
    disk = f"driver={DRIVER},path={server.socket},cache.direct=on"

    def tool(name, *words):
        """Runs a tool; returns its output. A mismatch of a pattern is an error as well."""
        command = [stage.emulator.tool(name), *words]
        ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if f"Unknown driver '{DRIVER}'" in ended.stderr:
            raise Skipped(f"the {name} of {stage.emulator} has no driver {DRIVER}")
        if ended.returncode:
            raise Wrong(f"{command}: ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        return ended.stdout

    def io(*commands):
        tool("qemu-io", "--image-opts", disk, *(f"--cmd={command}" for command in commands))

    io(
        "write -P 17 0 1M", "flush", "read -P 17 0 1M",
        "write -z 256k 256k", "write -z -u 512k 128k", "discard 768k 128k", "aio_flush",
        "read -P 17 0 256k", "read -P 0 256k 384k", "read -P 17 640k 128k", "read -P 0 768k 128k",
    )  # fmt: skip
    size = 300 * MIB
    server.resize(size)
    # Unlike a machine, a tool reads the size when it opens a disk.
    io(f"write -P 18 {size - MIB} 1M", f"read -P 18 {size - MIB} 1M")
    copy = stage.directory / f"copy-of-{kind}"
    tool("qemu-img", "convert", "--image-opts", disk, "-O", "raw", copy)
    server.stop()
    tool("qemu-img", "compare", "-f", kind, "-F", "raw", server.image, copy)
