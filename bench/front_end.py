"""Idle virtual machines: front ends of vhost-user-blk whose ring is started and stays empty.

A client of its own instead of QEMU: thousands of them fit in one process. QEMU's
docs/interop/vhost-user.rst is the specification.

`hostile` is the opposite: its ring holds random content.
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
# Offsets of the parts of the ring in memory, and the size of the memory.
TABLE, AVAILABLE, USED, BYTES = 0, 4096, 8192, 16384
TIMEOUT_SECONDS = 120


class NotServed(Exception):
    """A server rejected a front end; the text gives the reason."""


def send(server, request, payload=b"", fds=()):
    """Sends one message."""
    socket.send_fds(server, [struct.pack("<III", request, FIRST_VERSION, len(payload)) + payload], list(fds))


def query(server, request):
    """Sends a message; returns the number in the reply."""
    send(server, request)
    answer = server.recv(20, socket.MSG_WAITALL)
    if len(answer) < 20:
        raise NotServed(f"message {request} is not answered")
    return struct.unpack("<IIIQ", answer)[3]


def start(server, memory, event):
    """The handshake of a front end up to a running ring."""
    send(server, SET_OWNER)
    query(server, GET_FEATURES)
    send(server, SET_FEATURES, struct.pack("<Q", PROTOCOL_FEATURES | VERSION_1))
    query(server, GET_PROTOCOL_FEATURES)
    send(server, SET_PROTOCOL_FEATURES, struct.pack("<Q", 0))
    send(server, SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, 0, BYTES, 0, 0), [memory])
    send(server, SET_VRING_NUM, struct.pack("<II", 0, DESCRIPTORS))
    send(server, SET_VRING_BASE, struct.pack("<II", 0, 0))
    send(server, SET_VRING_ADDR, struct.pack("<IIQQQQ", 0, 0, TABLE, USED, AVAILABLE, 0))
    for request in (SET_VRING_CALL, SET_VRING_KICK):
        send(server, request, struct.pack("<Q", 0), [event])
    send(server, SET_VRING_ENABLE, struct.pack("<II", 0, 1))
    # The reply arrives after all earlier messages were processed.
    query(server, GET_FEATURES)


def allow_descriptors():
    """Raises the limit of open files to its maximum, for child processes as well."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def idle(paths):
    """Connects a front end to each of these sockets."""
    with ExitStack() as stack:
        # They share memory, which none of them modifies.
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
    """Runs consecutive front ends, each with a ring of random descriptors that it offers
    repeatedly, until `ended` is set. Returns the number of them that were served.
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
    """A table of almost valid descriptors: inside memory and beyond, in loops, with odd lengths,
    some with indirect tables.
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
    """Offers the whole ring several hundred times, without reading the used ring."""
    for turn in range(1, 400):
        if ended.is_set():
            return
        struct.pack_into("<H", ring, AVAILABLE + 2, turn * DESCRIPTORS & 0xFFFF)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(event, 1)
