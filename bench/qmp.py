"""A client of QMP, the monitor protocol of weir and QEMU's daemons: enough to change a limit and to
query.

Forty lines instead of PyPI's `qemu.qmp`, which the end-to-end tests use: the bench must know to the
millisecond when it sent a command and when the reply arrived.

Never reconnects, and drops events.
"""

import json
import socket

TIMEOUT_SECONDS = 120


class CommandFailed(Exception):
    """A command failed, or the daemon closed the connection; the text names it."""


class Monitor:
    """One connection, past its greeting. Use it in a `with` statement."""

    def __init__(self, path, timeout_seconds=TIMEOUT_SECONDS):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_seconds)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise CommandFailed(f"{path}: {error.strerror}") from error
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._receive("greeting")
        self.run("qmp_capabilities")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._lines.close()
        self._socket.close()

    def run(self, command, **arguments):
        """Runs one command; returns its reply. Keys with dashes are passed as `**{"bps-total": 0}`.
        """
        message = {"execute": command} | ({"arguments": arguments} if arguments else {})
        self._socket.sendall(json.dumps(message).encode() + b"\r\n")
        while True:
            answer = self._receive(command)
            if "error" in answer:
                raise CommandFailed(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def _receive(self, awaited):
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            seconds = self._socket.gettimeout()
            raise CommandFailed(f"{awaited}: no answer within {seconds:.0f} s") from error
        if not line:
            raise CommandFailed(f"{awaited}: the daemon closed the connection")
        return json.loads(line)
