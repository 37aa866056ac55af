"""A guest under load moves between machines on the host. Its disk has an export for each.

Requests that are in flight, the rings and their indices move so; whether all memory that a back end
has written to is copied again is seen in part only (`Machine.move_to`).
"""

from load import Load, check_files, make_files
from virtual_machine import Drive

# How often, and with --full.
MOVES, FULL = 2, 20


def migration(stage):
    """There and back again."""
    stage.case("migration", lambda: _migration(stage))


def _migration(stage):
    server = stage.serve(stage.image("moving"))
    sockets = [server.socket, server.second_socket()]
    machine = stage.machine([Drive(sockets[0])])
    make_files(machine, "vda")
    load = Load("vda")
    load.begin(machine)
    for move in range(1, 1 + (FULL if stage.full else MOVES)):
        load.more(machine)
        # Short, as sockets' names are.
        where = server.socket.with_name(f"move{move}.sock")
        other = stage.machine([Drive(sockets[move % 2])], incoming=where)
        machine.move_to(other, lambda machine=machine: load.more(machine))
        machine.quit()
        machine = other
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    server.stop()
