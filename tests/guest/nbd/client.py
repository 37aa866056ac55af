"""The kernel's NBD client against weir: a raw file with the page cache bypassed, over TCP, two
connections.

A file and not memory, so that unaligned and overlapping writes of the guest meet the alignment
rules of O_DIRECT. Afterwards the file must hold the data that the guest wrote and flushed: the same
2 MiB at 4 MiB and at 16 MiB.
"""

from contextlib import contextmanager

import servers  # bench/servers.py
from outcome import fact

MIB = 1 << 20
CONNECTIONS = 2
STEPS = ("direct write", "buffered write", "discard", "attached again")


@contextmanager
def served(weir, directory):
    """Context manager: a server of a new file; yields both."""
    image = directory / "nbd.raw"
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    with servers.Server(servers.weir_file(weir, image), tcp=True) as server:
        yield server, image


class KernelClient:
    """The case."""

    def __init__(self, server, image):
        self.guest = None  # set by the runner
        self.server = server
        self.image = image

    def cases(self):
        """Name and function."""
        yield "the kernel's NBD client, over TCP with two connections", self.uses

    def uses(self):
        """The guest reads its writes, and they are in the file."""
        port = self.server.address.rpartition(":")[2]
        # The host's loopback is the gateway of QEMU's user-mode network.
        printed, status = self.guest.run_status(f"sh /client.sh 10.0.2.2 {port} '' {CONNECTIONS}")
        content = self.image.read_bytes()
        first, second = content[4 * MIB : 6 * MIB], content[16 * MIB : 18 * MIB]
        seen = f"{printed[-2000:]}\nweir's log:\n{self.server.log()}" if status else "all done"
        steps = [step for step in STEPS if f"step {step}: ok" not in printed]
        return [
            fact("the client's steps", status == 0 and not steps, seen, ", ".join(STEPS)),
            fact(
                "the file", first == second and any(first), "read", "what the client wrote and flushed, twice"
            ),
        ]
