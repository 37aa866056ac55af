"""QMP over an existing socket, with the events, which the bench's client drops.

Never reconnects.
"""

import qmp  # bench/qmp.py


class Monitor(qmp.Monitor):
    """One connection, past its greeting. Closes `socket` with it."""

    def __init__(self, socket):
        self._socket = socket
        self._socket.settimeout(qmp.TIMEOUT_SECONDS)
        self._lines = socket.makefile("r", encoding="utf-8")
        self._events = []
        self._receive("greeting")
        self.run("qmp_capabilities")

    def wait_for(self, event, holds=lambda data: True):
        """The data of the next matching event, including events that arrived during commands."""
        while True:
            while self._events:
                message = self._events.pop(0)
                if message["event"] == event and holds(message.get("data", {})):
                    return message.get("data", {})
            self._receive(event)

    def _receive(self, awaited):
        message = super()._receive(awaited)
        if "event" in message:
            self._events.append(message)
        return message
