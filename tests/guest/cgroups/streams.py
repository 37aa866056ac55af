"""Two `dd` streams in two control groups of the guest, as in the table of io-throttle v16, and how fast each was at the device.

What counts is what the kernel let through (each group's io.stat, which grows when a request passes its limit) and what the
disk counts itself; not what `dd` says, whose buffered writes end in the page cache.

Never says what a rate should be.
"""

from dataclasses import dataclass

GROUPS = ("a", "b")
INTERVAL = 0.1  # seconds between two samples
# A direct stream is at its rate at once. A buffered one when the page cache has taken what it may (guest.py), and its rate is even
# only over some seconds: the kernel writes back in pieces of 4 MiB.
WARM_SECONDS = {"direct": 1, "cached": 5}
# Of one write. As large as keeps the emulated processor idle at the disk's speed, and small beside what passes in a window.
BLOCK = "256k"


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
        if len(words) >= 2 and words[0].replace(".", "", 1).isdigit() and all(word.isdigit() for word in words[1:]):
            found.append(Sample(float(words[0]), int(words[1]), tuple(map(int, words[2:]))))
    return found


def rate(points):
    """Bytes per second of (instant, bytes) in their order, between the first and the last growth; 0.0 if there are no two.

    From growth to growth, because requests of a buffered stream are up to 4 MiB: a window that begins or ends between two
    of them says less, and after 10 s at 2 MB/s that is a fifth.
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
    def of(cls, taken):
        """Over all these samples."""
        count = len(taken[0].groups)
        groups = tuple(rate([(sample.seconds, sample.groups[index]) for sample in taken]) for index in range(count))
        return cls(groups, rate([(sample.seconds, sample.disk) for sample in taken]))


def start(disk, mode, groups=GROUPS, block=BLOCK):
    """The script that starts one stream a group. Each makes its file itself: what a file's pages are charged to is who wrote them first."""
    flag = "oflag=direct" if mode == "direct" else ""
    return "\n".join(
        f"rm -f {disk.mount}/{group}; in_group {group} dd if=/dev/zero of={disk.mount}/{group} bs={block} count=100000000 {flag} 2>/dev/null &"
        for group in groups
    )


def stop(guest, disk, groups=GROUPS):
    """Ends the streams, and waits until nothing of them is on its way to the disk."""
    files = " ".join(f"{disk.mount}/{group}" for group in groups)
    guest.run(f"kill_group {' '.join(groups)}; rm -f {files}; sync")


def measure(guest, disk, seconds, interval=INTERVAL, groups=GROUPS):
    """Samples of a window that begins now."""
    script = f"sample_for {seconds} {interval} {disk.name} {guest.number(disk.name)} {' '.join(groups)}"
    return samples(guest.run(script))


def two_streams(guest, disk, mode, seconds, before_stop=None):
    """The rates of both streams over a window of so many seconds; they have ended afterwards.

    `before_stop` is called between: with limits still in force, what a buffered stream leaves behind takes long to be written.
    """
    guest.run(f"{start(disk, mode)}\npause {WARM_SECONDS[mode]}")
    try:
        return Rates.of(measure(guest, disk, seconds))
    finally:
        guest.run("kill_group a b")
        if before_stop:
            before_stop()
        stop(guest, disk)
