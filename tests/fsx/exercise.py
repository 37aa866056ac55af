#!/usr/bin/env python3
"""Random operations on one file, each checked against a model in memory.

    tests/fsx/exercise.py FILE [--operations 5000] [--seed N] [--model-to COPY]

The file is read, written, appended to, mapped, cut and made longer at any byte, punched, zeroed,
reserved, synced, copied within itself, searched for holes, closed and opened again, as by the
program fsx. After each operation its size is that of the model; each read and the final look at
the whole file return the model's bytes. A mode of fallocate that the file lacks (EOPNOTSUPP)
changes nothing and is not tried again.

Operations come from the seed alone. A mismatch prints the seed, the first byte that is wrong and
the last operations, and ends with status 1. `--model-to` writes the final model to a file.
"""

import argparse
import collections
import ctypes
import errno
import mmap
import os
import random
import sys

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def fallocate(fd, mode, offset, length):
    if LIBC.fallocate64(fd, mode, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Mismatch(Exception):
    """The file differs from the model."""


class Exercise:
    # Operations and their relative frequency.
    OPERATIONS = [
        ("read", 20), ("write", 22), ("append", 4), ("map_read", 7), ("map_write", 7), ("truncate", 14),
        ("reserve", 4), ("reserve_keeping_size", 3), ("punch", 7), ("zero", 4), ("zero_keeping_size", 4),
        ("copy", 2), ("seek", 4), ("sync", 1), ("reopen", 2),
    ]  # fmt: skip

    def __init__(self, path, seed, largest):
        self.path, self.largest = path, largest
        self.random = random.Random(seed)
        self.pool = self.random.randbytes(1 << 20)
        self.log = collections.deque(maxlen=40)
        self.counts = collections.Counter()
        self.lacks = set()
        self.maps = True
        self.open()
        self.model = bytearray(os.pread(self.fd, os.fstat(self.fd).st_size + 1, 0))

    def open(self):
        flags = os.O_RDWR | self.random.choice([0] * 7 + [os.O_DSYNC])
        self.fd = os.open(self.path, flags)
        self.appending = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def close(self):
        os.close(self.fd)
        os.close(self.appending)

    def run(self, operations):
        names, weights = zip(*self.OPERATIONS)
        for number in range(operations):
            name = self.random.choices(names, weights)[0]
            self.counts[name] += 1
            getattr(self, name)()
            size = os.fstat(self.fd).st_size
            if size != len(self.model):
                raise Mismatch(f"after operation {number} the file has {size} bytes, not {len(self.model)}")
            if number % 1000 == 999:
                self.check_all()
        self.check_all()

    # Choice of operands.

    def said(self, *what):
        self.log.append(what)

    def length(self):
        """A length: short, of some sectors, or long."""
        most = self.random.choice([16, 600, 5000, 5000, 70_000])
        return self.random.randint(1, min(most, self.largest))

    def place(self, within):
        """An offset up to `within`, often at or beside a boundary."""
        place = self.random.randint(0, within)
        match self.random.randrange(6):
            case 0:
                place -= place % PAGE
            case 1:
                place -= place % 512
            case 2:
                place = max(0, min(within, place - place % 512 + self.random.choice([-1, 1, 511])))
        return place

    def inside(self):
        """A non-empty range inside the file; None if the file is empty."""
        if not self.model:
            return None
        start = self.place(len(self.model) - 1)
        return start, min(self.length(), len(self.model) - start)

    def anywhere(self):
        start = self.place(self.largest - 1)
        return start, min(self.length(), self.largest - start)

    def data(self, length):
        start = self.random.randrange(len(self.pool) - length)
        return self.pool[start : start + length]

    def extend_model(self, end):
        if end > len(self.model):
            self.model.extend(bytes(end - len(self.model)))

    def check(self, start, found, what):
        wanted = self.model[start : start + len(found)]
        if found == wanted:
            return
        at = next(at for at in range(len(found)) if at >= len(wanted) or found[at] != wanted[at])
        wrong = sum(a != b for a, b in zip(found, wanted))
        raise Mismatch(
            f"{what}: byte {start + at} is {found[at]:#x}, not {wanted[at] if at < len(wanted) else None} "
            f"({wrong} of {len(found)} bytes from {start} on are wrong; the file has {len(self.model)})"
        )

    def check_all(self):
        self.said("look at everything")
        found = os.pread(self.fd, self.largest + 1, 0)
        if len(found) != len(self.model):
            raise Mismatch(f"the whole file has {len(found)} bytes, not {len(self.model)}")
        self.check(0, found, "whole file")

    # Operations.

    def read(self):
        start, length = self.anywhere()
        self.said("read", start, length)
        found = os.pread(self.fd, length, start)
        if len(found) != max(0, min(length, len(self.model) - start)):
            raise Mismatch(f"read of {length} at {start} returned {len(found)} of {len(self.model)} bytes")
        self.check(start, found, "read")

    def write(self):
        start, length = self.anywhere()
        self.said("write", start, length)
        data = self.data(length)
        if os.pwrite(self.fd, data, start) != length:
            raise Mismatch(f"short write of {length} at {start}")
        self.extend_model(start + length)
        self.model[start : start + length] = data

    def append(self):
        length = min(self.length(), self.largest - len(self.model))
        self.said("append", len(self.model), length)
        if length > 0:
            data = self.data(length)
            if os.write(self.appending, data) != length:
                raise Mismatch(f"short append of {length}")
            self.model.extend(data)

    def mapped(self, what):
        """A range, and a mapping of its pages; None if the file cannot be mapped."""
        inside = self.inside()
        if inside is None or not self.maps:
            return None
        start, length = inside
        first = start - start % PAGE
        self.said(what, start, length)
        try:
            return start, length, mmap.mmap(self.fd, start + length - first, offset=first), start - first
        except OSError as error:
            # Shared mappings of a file opened for direct I/O need Linux 6.6 or newer.
            if error.errno != errno.ENODEV:
                raise
            self.maps = False
            return None

    def map_read(self):
        mapped = self.mapped("mapped read")
        if mapped is None:
            return
        start, length, memory, at = mapped
        found = memory[at : at + length]
        memory.close()
        self.check(start, found, "mapped read")

    def map_write(self):
        mapped = self.mapped("mapped write")
        if mapped is None:
            return
        start, length, memory, at = mapped
        data = self.data(length)
        memory[at : at + length] = data
        if self.random.random() < 0.5:
            memory.flush()
        memory.close()
        self.model[start : start + length] = data

    def truncate(self):
        size = self.place(self.random.choice([self.largest, self.largest, len(self.model), 600, 0]))
        self.said("truncate", len(self.model), size)
        os.ftruncate(self.fd, size)
        del self.model[size:]
        self.extend_model(size)

    def allocated(self, mode, start, length, what):
        """Returns True if the operation was done; the file may lack support."""
        if mode in self.lacks:
            return False
        self.said(what, start, length)
        try:
            fallocate(self.fd, mode, start, length)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self.lacks.add(mode)
            return False
        return True

    def reserve(self):
        start, length = self.anywhere()
        if self.allocated(0, start, length, "reserve"):
            self.extend_model(start + length)

    def reserve_keeping_size(self):
        self.allocated(KEEP_SIZE, *self.anywhere(), "reserve keeping the size")

    def zero_model(self, start, length):
        end = min(start + length, len(self.model))
        if start < end:
            self.model[start:end] = bytes(end - start)

    def punch(self):
        start, length = self.anywhere()
        if self.allocated(PUNCH_HOLE | KEEP_SIZE, start, length, "punch"):
            self.zero_model(start, length)

    def zero(self):
        start, length = self.anywhere()
        if self.allocated(ZERO_RANGE, start, length, "zero"):
            self.extend_model(start + length)
            self.zero_model(start, length)

    def zero_keeping_size(self):
        start, length = self.anywhere()
        if self.allocated(ZERO_RANGE | KEEP_SIZE, start, length, "zero keeping the size"):
            self.zero_model(start, length)

    def copy(self):
        inside = self.inside()
        if inside is None:
            return
        start, length = inside
        to = self.place(self.largest - length)
        if abs(to - start) < length:
            return
        self.said("copy", start, length, to)
        copied = os.copy_file_range(self.fd, self.fd, length, start, to)
        data = self.model[start : start + copied]
        self.extend_model(to + copied)
        self.model[to : to + copied] = data

    def seek(self):
        start = self.place(self.largest)
        self.said("seek", start)
        try:
            data = os.lseek(self.fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            data = len(self.model)
        if any(self.model[start:data]):
            raise Mismatch(f"no data is said to be from {start} to {data}")
        if start < len(self.model):
            hole = os.lseek(self.fd, start, os.SEEK_HOLE)
            if not start <= hole <= len(self.model):
                raise Mismatch(f"the hole from {start} on is said to be at {hole} of {len(self.model)}")

    def sync(self):
        self.said("sync")
        self.random.choice([os.fsync, os.fdatasync])(self.fd)

    def reopen(self):
        self.said("reopen")
        self.close()
        self.open()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--operations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--largest", type=int, default=256 << 10, help="bytes of the file at most")
    parser.add_argument("--model-to", help="file to write the final model to")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.operations} operations", flush=True)
    exercise = Exercise(arguments.file, arguments.seed, arguments.largest)
    try:
        exercise.run(arguments.operations)
    except (Mismatch, OSError) as error:
        print(f"{error} (seed {arguments.seed})\nlast operations:", file=sys.stderr)
        for operation in exercise.log:
            print(" ", *operation, file=sys.stderr)
        return 1
    os.fsync(exercise.fd)
    exercise.close()
    if arguments.model_to:
        with open(arguments.model_to, "wb") as model:
            model.write(exercise.model)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(exercise.counts.items()))
    lacks = f"; lacks modes {sorted(exercise.lacks)} of fallocate" if exercise.lacks else ""
    print(f"{counts}{lacks}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
