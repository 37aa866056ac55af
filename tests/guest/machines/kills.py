"""A back end that is killed under load and started again, or that another goes on for, and a machine
to which that happens.
"""

import random
import subprocess

from load import Load, check_files, make_files
from stage import LeftOut
from virtual_machine import Drive

# How often, and with --full.
SERVER, MACHINE, FULL = 3, 2, 50
# Most rounds of the load before the next time.
ROUNDS = 4


def raw(stage):
    """Of a raw image, with two queues. The machine lives on, with requests that nobody answers for
    a while.
    """
    stage.case("server-killed-raw", lambda: _server(stage, "raw", queues=2))


def packed(stage):
    """The same with virtio's other kind of ring."""
    stage.case("server-killed-packed", lambda: _server(stage, "raw", queues=2, packed=True))


def qcow2(stage):
    """Of a qcow2 image. Without a write cache, as its mapping is in the back end's memory until the
    next flush: what was acknowledged before that may go with it.
    """
    stage.case("server-killed-qcow2", lambda: _server(stage, "qcow2", write_through=True))


def _server(stage, kind, queues=1, packed=False, **offer):
    if not stage.features.RECOVERS:
        raise LeftOut("the back end remembers no requests")
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
    # And as a service manager does it, in order.
    load.more(machine)
    server.stop()
    server.start()
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    server.stop()


def taken_over(stage):
    """Another process goes on, again and again, and nobody connects anew. The last is killed: so a
    qcow2 image is without a write cache here too.
    """
    stage.case("taken-over-raw", lambda: _taken_over(stage, "raw", queues=2))
    stage.case("taken-over-packed", lambda: _taken_over(stage, "qcow2", packed=True, write_through=True))


def _taken_over(stage, kind, queues=1, packed=False, **offer):
    if not stage.features.TAKES_OVER:
        raise LeftOut("no other process goes on")
    server = stage.serve(stage.image("over", kind), kind, queues=queues, **offer)
    machine = stage.machine([Drive(server.socket, queues, packed)], processors=queues)
    make_files(machine, "vda")
    load = Load("vda")
    load.begin(machine)
    moments = random.Random(3)
    for _ in range(FULL if stage.full else SERVER):
        load.more(machine, moments.randint(1, ROUNDS))
        for _ in range(moments.randint(1, 3)):
            server.take_over()
            lost = [line for line in server.log_lines() if "a front end has connected" in line]
            assert not lost, lost
    load.more(machine)
    # What has come along serves as the one that it began with.
    server.kill()
    server.start()
    load.more(machine)
    load.end(machine)
    check_files(machine, "vda")
    server.stop()


def machine(stage):
    """What it was told to be flushed is there for the next one on the same socket."""
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
    # What was being done to the file system is done by its journal.
    last.run("mkdir /mnt/vda; mount -t ext4 /dev/vda /mnt/vda")
    check_files(last, "vda")
    server.stop()
    subprocess.run(["/sbin/e2fsck", "-fn", server.image], check=True, capture_output=True)
