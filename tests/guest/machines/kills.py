"""Back ends that are killed under load and restarted, or upgraded, and machines that are killed."""

import random
import subprocess

from load import Load, check_files, make_files
from stage import Skipped
from virtual_machine import Drive

# Number of kills, and with --full.
SERVER, MACHINE, FULL = 3, 2, 50
# Maximum number of rounds of the load between kills.
ROUNDS = 4


def raw(stage):
    """A raw image with two queues. The machine keeps running while its requests wait."""
    stage.case("server-killed-raw", lambda: _server(stage, "raw", queues=2))


def packed(stage):
    """As `raw`, with packed rings."""
    stage.case("server-killed-packed", lambda: _server(stage, "raw", queues=2, packed=True))


def qcow2(stage):
    """A qcow2 image. Without a write cache, because the mapping is in the back end's memory until
    the next flush: a kill loses writes acknowledged after the last flush.
    """
    stage.case("server-killed-qcow2", lambda: _server(stage, "qcow2", write_through=True))


def _server(stage, kind, queues=1, packed=False, **offer):
    if not stage.features.RECOVERS:
        raise Skipped("the back end loses requests in flight when it is killed")
    server = stage.serve(stage.image("killed", kind), kind, queues=queues, **offer)
    machine = stage.machine([Drive(server.socket, queues, packed)], processors=queues)
    make_files(machine, "vda")
    load = Load("vda")
    load.begin(machine)
    moments = random.Random(1)
    for _ in range(FULL if stage.full else SERVER):
        load.more(machine, moments.randint(1, ROUNDS))
        server.kill()
        server.start()
    # An orderly restart, as by a service manager.
    load.more(machine)
    server.stop()
    server.start()
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    server.stop()


def upgraded(stage):
    """Repeated upgrades, without a reconnection of any machine. The last process is killed: so a
    qcow2 image has no write cache here either.
    """
    stage.case("upgraded-raw", lambda: _upgraded(stage, "raw", queues=2))
    stage.case(
        "upgraded-packed", lambda: _upgraded(stage, "qcow2", packed=True, write_through=True)
    )


def _upgraded(stage, kind, queues=1, packed=False, **offer):
    if not stage.features.UPGRADES:
        raise Skipped("the back end has no upgrade")
    server = stage.serve(stage.image("over", kind), kind, queues=queues, **offer)
    machine = stage.machine([Drive(server.socket, queues, packed)], processors=queues)
    make_files(machine, "vda")
    load = Load("vda")
    load.begin(machine)
    moments = random.Random(3)
    for _ in range(FULL if stage.full else SERVER):
        load.more(machine, moments.randint(1, ROUNDS))
        for _ in range(moments.randint(1, 3)):
            server.upgrade()
            lost = [line for line in server.log_lines() if "a front end has connected" in line]
            assert not lost, lost
    load.more(machine)
    # After the upgrades, a restart works as after a normal start.
    server.kill()
    server.start()
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    server.stop()


def machine(stage):
    """Data that the machine has flushed is present for the next one on the same socket."""
    stage.case("machine-killed", lambda: _machine(stage))


def _machine(stage):
    server = stage.serve(stage.image("machine"))
    moments = random.Random(2)
    load = Load("vda")
    for time in range(FULL if stage.full else MACHINE):
        current = stage.machine([Drive(server.socket)])
        if time == 0:
            make_files(current, "vda")
        else:
            current.run("mkdir /mnt/vda; mount -t ext4 -o discard /dev/vda /mnt/vda")
            load.check(current)
        load.begin(current)
        load.more(current, moments.randint(1, ROUNDS))
        current.kill()
        load.remember(current)
    last = stage.machine([Drive(server.socket)])
    load.check(last)
    # Operations of the file system that were in progress are completed by its journal.
    last.run("mkdir /mnt/vda; mount -t ext4 /dev/vda /mnt/vda")
    check_files(last, "vda")
    server.stop()
    subprocess.run(["/sbin/e2fsck", "-fn", server.image], check=True, capture_output=True)
