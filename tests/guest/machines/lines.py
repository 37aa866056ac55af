"""Lines that another program writes, collected as they arrive, and waited for.

Never drops a line; never judges any.
"""

import threading

# Much longer than any awaited event takes, on stalled hosts as well.
SECONDS = 300


class LinesFailed(Exception):
    """A line did not arrive; the text contains the lines that did."""


class Lines:
    """All lines of a file until its end, read by a separate thread. Closes the file."""

    def __init__(self, file, what):
        self._what = what
        self._lines = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(file,), daemon=True)
        self._thread.start()

    def __len__(self):
        with self._changed:
            return len(self._lines)

    def all(self, begin=0):
        """The lines so far, starting at index `begin`."""
        with self._changed:
            return self._lines[begin:]

    def until_end(self):
        """All lines, once the writer has closed its end."""
        self._thread.join(SECONDS)
        return self.all()

    def wait_for(self, holds, begin=0):
        """Waits until the predicate holds for the lines from `begin` on; False if the file ended
        before.
        """
        with self._changed:
            is_found = self._changed.wait_for(
                lambda: self._ended or holds(self._lines[begin:]), timeout=SECONDS
            )
            if not is_found:
                last = "\n".join(self._lines[-40:])
                raise LinesFailed(f"{self._what}: nothing for {SECONDS} s; last was:\n{last}")
            return holds(self._lines[begin:])

    def _read(self, file):
        with file:
            for line in file:
                with self._changed:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
