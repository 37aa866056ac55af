"""How fast streams in the guest's control groups were at the device: samples that a script took,
and rates from them.

What counts is what the kernel let through (each group's io.stat, which grows when a request passes
its limit) and what the disk counts itself; not what `dd` says, whose buffered writes end in the
page cache.

Never says what a rate should be.
"""

from dataclasses import dataclass

from commands import unlimit

GROUPS = ("a", "b")
# A direct stream is at its rate at once. A buffered one when the page cache has taken what it may
# (guest.py), and its rate is even only over some seconds: the kernel writes back in pieces of 4
# MiB.
WARM_SECONDS = {"direct": 1, "cached": 5}


@dataclass(frozen=True)
class Sample:
    """What had been written at an instant: to the disk, and by each group."""

    seconds: float
    disk: int
    groups: tuple[int, ...]


def samples(output):
    """The samples among what a script printed."""
    found = []
    for line in output.splitlines():
        words = line.split()
        if (
            len(words) >= 2
            and words[0].replace(".", "", 1).isdigit()
            and all(word.isdigit() for word in words[1:])
        ):
            found.append(Sample(float(words[0]), int(words[1]), tuple(map(int, words[2:]))))
    return found


def rate(points):
    """Bytes per second of (instant, bytes) in their order, between the first and the last growth;
    0.0 if there are no two.

    From growth to growth, because requests of a buffered stream are up to 4 MiB: a window that
    begins or ends between two of them says less, and after 10 s at 2 MB/s that is a fifth.
    """
    grown = [after for before, after in zip(points, points[1:]) if after[1] > before[1]]
    if len(grown) < 2:
        return 0.0
    (begin, from_bytes), (end, to_bytes) = grown[0], grown[-1]
    return (to_bytes - from_bytes) / (end - begin)


@dataclass(frozen=True)
class Rates:
    """Bytes per second at the device."""

    groups: tuple[float, ...]
    disk: float

    @classmethod
    def of(cls, output):
        """Over all samples that were printed."""
        taken = samples(output)
        count = len(taken[0].groups)
        groups = (
            rate([(sample.seconds, sample.groups[index]) for sample in taken]) for index in range(count)
        )
        return cls(tuple(groups), rate([(sample.seconds, sample.disk) for sample in taken]))


def start(disk, mode, groups=GROUPS):
    """The script that starts one stream a group."""
    return "\n".join(f"stream {disk.name} {mode} {group}" for group in groups)


def window(disk, seconds, groups=GROUPS, interval=0.1):
    """The script that samples for so long."""
    return f"sample_for {seconds} {interval} {disk.name} {' '.join(groups)}"


def two_streams(disk, mode, seconds):
    """The script that samples two streams over so many seconds, from when their rates are even."""
    return (
        f"{start(disk, mode)}\npause {WARM_SECONDS[mode]}\npart window\n{window(disk, seconds)}\npart after"
    )


def end(disk, groups=GROUPS):
    """The script that ends the streams and removes their limits.

    These first: what a buffered stream leaves behind would else take as long as it was limited to.
    """
    names = " ".join(groups)
    return f"kill_group {names}\n{unlimit(disk, *groups)}\nend_streams {disk.name} {names}"
