"""Virtual machines that do nothing: front ends of vhost-user-blk with a ring that is started and stays
empty.

Why by hand: thousands of them in one process, where each machine would be one. QEMU's
docs/interop/vhost-user.rst is the specification.

`hostile` is the other kind: its ring holds whatever chance puts there.
"""

import contextlib
import os
import random
import resource
import socket
import struct
from contextlib import ExitStack, contextmanager
from mmap import mmap

GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL = 8, 9, 10, 12, 13
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE = 15, 16, 18
PROTOCOL_FEATURES, VERSION_1 = 1 << 30, 1 << 32
FIRST_VERSION = 1
DESCRIPTORS = 128
# Where the parts of the ring lie in a memory of as many bytes.
TABLE, AVAILABLE, USED, BYTES = 0, 4096, 8192, 16384
TIMEOUT_SECONDS = 120


class NotServed(Exception):
    """A server did not take a machine; the text says why."""


def send(server, request, payload=b"", fds=()):
    """One message."""
    socket.send_fds(server, [struct.pack("<III", request, FIRST_VERSION, len(payload)) + payload], list(fds))


def ask(server, request):
    """The number that a message is answered with."""
    send(server, request)
    answer = server.recv(20, socket.MSG_WAITALL)
    if len(answer) < 20:
        raise NotServed(f"message {request} is not answered")
    return struct.unpack("<IIIQ", answer)[3]


def start(server, memory, event):
    """A machine from its first word to a ring that is served."""
    send(server, SET_OWNER)
    ask(server, GET_FEATURES)
    send(server, SET_FEATURES, struct.pack("<Q", PROTOCOL_FEATURES | VERSION_1))
    ask(server, GET_PROTOCOL_FEATURES)
    send(server, SET_PROTOCOL_FEATURES, struct.pack("<Q", 0))
    send(server, SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, 0, BYTES, 0, 0), [memory])
    send(server, SET_VRING_NUM, struct.pack("<II", 0, DESCRIPTORS))
    send(server, SET_VRING_BASE, struct.pack("<II", 0, 0))
    send(server, SET_VRING_ADDR, struct.pack("<IIQQQQ", 0, 0, TABLE, USED, AVAILABLE, 0))
    for request in (SET_VRING_CALL, SET_VRING_KICK):
        send(server, request, struct.pack("<Q", 0), [event])
    send(server, SET_VRING_ENABLE, struct.pack("<II", 0, 1))
    # Answered once all of it is done.
    ask(server, GET_FEATURES)


def allow_descriptors():
    """As many as this process and those it starts may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def idle(paths):
    """A machine at each of these sockets."""
    with ExitStack() as stack:
        # They share what no one touches.
        memory = os.memfd_create("idle")
        stack.callback(os.close, memory)
        os.ftruncate(memory, BYTES)
        event = os.eventfd(0)
        stack.callback(os.close, event)
        for path in paths:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.settimeout(TIMEOUT_SECONDS)
            try:
                server.connect(str(path))
                start(server, memory, event)
            except OSError as error:
                raise NotServed(f"{path}: {error}") from error
        yield


def hostile(path, ended):
    """Drivers one after the other, each with a ring of rubbish that it offers again and again, until
    `ended` is set. How many of them were served.
    """
    chance, served = random.Random(1), 0
    memory = os.memfd_create("hostile")
    event = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.ftruncate(memory, BYTES)
        with mmap(memory, BYTES) as ring:
            while not ended.is_set():
                ring[:USED] = rubbish(chance)
                with socket.socket(socket.AF_UNIX) as server:
                    server.settimeout(TIMEOUT_SECONDS)
                    server.connect(str(path))
                    start(server, memory, event)
                    served += 1
                    offer(ring, event, ended)
    finally:
        os.close(event)
        os.close(memory)
    return served


def rubbish(chance):
    """A table of descriptors that are nearly right: in memory and past it, in loops, of odd lengths, some
    with a table of their own.
    """
    table = bytearray()
    for _ in range(DESCRIPTORS):
        address = chance.choice((chance.randrange(BYTES), chance.randrange(BYTES), chance.getrandbits(64)))
        length = chance.choice((1, 16, 16, 512, 4096, chance.getrandbits(32)))
        table += struct.pack("<QIHH", address, length, chance.randrange(8), chance.randrange(DESCRIPTORS + 2))
    heads = (chance.randrange(DESCRIPTORS) for _ in range(DESCRIPTORS))
    available = struct.pack(f"<HH{DESCRIPTORS}H", 0, 0, *heads)
    return bytes(table).ljust(AVAILABLE, b"\0") + available.ljust(USED - AVAILABLE, b"\0")


def offer(ring, event, ended):
    """The whole ring, some hundred times, and no look at what came back."""
    for turn in range(1, 400):
        if ended.is_set():
            return
        struct.pack_into("<H", ring, AVAILABLE + 2, turn * DESCRIPTORS & 0xFFFF)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(event, 1)
