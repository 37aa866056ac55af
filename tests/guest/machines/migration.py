"""A guest under load migrates between machines on the host. Its disk has an export for each
machine, of one back end or of two that share the image.

This transfers requests in flight, the rings and their indices, and memory that a back end has
written meanwhile. Where QEMU itself misses writes to memory that it has copied, the last is tested
only in part (`Emulator.misses_writes`).
"""

import os
import subprocess
from functools import partial

from load import Load, Wrong, check_files, make_files
from stage import MIB, Skipped
from virtual_machine import Drive

# Number of migrations, and with --full.
MOVES, FULL = 2, 20
# Number of queues, and True for packed rings.
RINGS = {"split": (1, False), "two-split": (2, False), "packed": (1, True), "two-packed": (2, True)}
# Cases that suffice for each change of weir.
SHORT = ["migration-two-split", "migration-two-packed", "handover-raw-packed", "handover-qcow2-split"]
# Data that is read into a guest's page cache during the migration.
READ_MIB = 16


def parts(full):
    """Migrations forth and back with each kind of rings: over one back end, and over two on each
    format; and memory that only a back end writes.
    """
    cases = {}
    for rings in RINGS:
        cases[f"migration-{rings}"] = partial(_over_one, rings)
        for kind in ("raw", "qcow2"):
            cases[f"handover-{kind}-{rings}"] = partial(_over_two, kind, rings)
    wanted = cases if full else {name: cases[name] for name in SHORT}
    return [_part(name, case) for name, case in (wanted | {"migration-log": _log}).items()]


def _part(name, case):
    return lambda stage: stage.case(name, lambda: case(stage)), [name]


def _over_one(rings, stage):
    queues, _ = RINGS[rings]
    server = stage.serve(stage.image("moving"), queues=queues)
    _move(stage, [server.socket, server.second_socket()], rings)
    server.stop()


def _over_two(kind, rings, stage):
    if not stage.features.HANDS_OVER:
        raise Skipped("the back end locks an image while it serves it")
    queues, _ = RINGS[rings]
    image = stage.image("handed-over", kind)
    servers = [stage.serve(image, kind, handover=True, queues=queues) for _ in range(2)]
    _move(stage, [server.socket for server in servers], rings)
    for server in servers:
        server.stop()
    if kind != "raw":
        subprocess.run(["qemu-img", "check", "-q", "-f", kind, image], check=True)


def _move(stage, sockets, rings):
    """Migrates a guest from one socket to the second, and back."""
    queues, packed = RINGS[rings]
    # Linux uses at most one queue per processor.
    machine = stage.machine([Drive(sockets[0], queues, packed)], processors=queues)
    make_files(machine, "vda")
    load = Load("vda")
    load.begin(machine)
    for move in range(1, 1 + (FULL if stage.full else MOVES)):
        load.more(machine)
        drive = Drive(sockets[move % 2], queues, packed)
        other = stage.machine([drive], incoming=_waiting(sockets[0], move), processors=queues)
        machine.move_to(other, lambda machine=machine: load.more(machine))
        machine.quit()
        machine = other
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    machine.quit()


def _log(stage):
    """Memory that is written only by a back end after it was copied: the guest's page cache. The
    disk is changed before it is read again, so that only the transferred memory is compared.
    """
    if stage.emulator.misses_writes:
        raise Skipped(f"{stage.emulator} misses writes of the guest to memory that was copied")
    server = stage.serve(stage.image("logged"))
    sockets = [server.socket, server.second_socket()]
    machine = stage.machine([Drive(sockets[0])])
    read = f"dd 2>/dev/null if=/dev/vda bs=1M count={READ_MIB}"
    machine.run(f"dd if=/dev/urandom of=/dev/vda bs=1M count={READ_MIB} oflag=direct")
    written = machine.run(f"{read} iflag=direct | md5sum")
    # Load, so that the copy does not converge at once.
    load = Load("vda", files=False)
    load.begin(machine)
    other = stage.machine([Drive(sockets[1])], incoming=_waiting(sockets[0], 1))

    def reads():
        load.more(machine)
        machine.monitor.wait_for("MIGRATION_PASS", lambda data: data["pass"] > 1)
        machine.run(f"{read} of=/dev/null")
        load.more(machine)

    machine.move_to(other, reads)
    machine.quit()
    with open(server.image, "r+b") as image:
        os.pwrite(image.fileno(), bytes(READ_MIB * MIB), 0)
    if other.run(f"{read} | md5sum") != written:
        raise Wrong(
            f"of {READ_MIB} MiB read during the migration, some differ on the other machine"
        )
    load.end(other)
    other.quit()
    server.stop()


def _waiting(socket, number):
    """Address where a machine waits; short, because paths of sockets are limited."""
    return socket.with_name(f"move{number}.sock")
