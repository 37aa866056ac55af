"""A guest under load moves between machines on the host. Its disk has an export for each, of one
back end or of two that share the image.

Requests that are in flight, the rings and their indices move so; whether all memory that a back end
has written to is copied again is seen in part only (`Machine.move_to`).
"""

import subprocess

from load import Load, check_files, make_files
from stage import LeftOut
from virtual_machine import Drive

# How often, and with --full.
MOVES, FULL = 2, 20


def migration(stage):
    """There and back again."""
    stage.case("migration", lambda: _migration(stage))


def handover(stage):
    """The same between two daemons, on the two formats."""
    for kind in ("raw", "qcow2"):
        stage.case(f"handover-{kind}", lambda kind=kind: _handover(stage, kind))


def _migration(stage):
    server = stage.serve(stage.image("moving"))
    _move(stage, [server.socket, server.second_socket()])
    server.stop()


def _handover(stage, kind):
    if not stage.features.HANDS_OVER:
        raise LeftOut("it holds an image as long as it has it")
    image = stage.image("handed-over", kind)
    servers = [stage.serve(image, kind, handover=True) for _ in range(2)]
    _move(stage, [server.socket for server in servers])
    for server in servers:
        server.stop()
    if kind != "raw":
        subprocess.run(["qemu-img", "check", "-q", "-f", kind, image], check=True)


def _move(stage, sockets):
    """Moves a guest from the one to the other, and back."""
    machine = stage.machine([Drive(sockets[0])])
    make_files(machine, "vda")
    load = Load("vda")
    load.begin(machine)
    for move in range(1, 1 + (FULL if stage.full else MOVES)):
        load.more(machine)
        # Short, as sockets' names are.
        where = sockets[0].with_name(f"move{move}.sock")
        other = stage.machine([Drive(sockets[move % 2])], incoming=where)
        machine.move_to(other, lambda machine=machine: load.more(machine))
        machine.quit()
        machine = other
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    machine.quit()
