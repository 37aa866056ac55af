"""Rates of streams in the guest's control groups at the device, computed from samples of a script.

The rates are those admitted by the kernel (each group's io.stat, which grows when a request passes
its limit) and those counted by the disk; not those printed by `dd`, whose buffered writes end in
the page cache.

Never asserts a rate.
"""

from dataclasses import dataclass

from commands import unlimit

GROUPS = ("a", "b")
# A direct stream reaches its rate at once. A buffered one does when the page cache has reached its
# limit (guest.py), and its rate is steady only over some seconds: the kernel writes back in pieces
# of 4 MiB.
WARM_SECONDS = {"direct": 1, "cached": 5}


@dataclass(frozen=True)
class Sample:
    """Bytes written at an instant: to the disk, and by each group."""

    seconds: float
    disk: int
    groups: tuple[int, ...]


def samples(output):
    """The samples in the output of a script."""
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
    """Bytes per second of a sequence of (instant, bytes), between the first and the last growth;
    0.0 without two of them.

    Measured from growth to growth, because requests of a buffered stream are up to 4 MiB: a window
    that begins or ends between two of them is wrong by up to a request, which is a fifth after 10 s
    at 2 MB/s.
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
        """The rates over all samples in the output."""
        all_samples = samples(output)
        count = len(all_samples[0].groups)
        groups = (
            rate([(sample.seconds, sample.groups[index]) for sample in all_samples])
            for index in range(count)
        )
        return cls(tuple(groups), rate([(sample.seconds, sample.disk) for sample in all_samples]))


def start(disk, mode, groups=GROUPS):
    """Shell code that starts one stream per group."""
    return "\n".join(f"stream {disk.name} {mode} {group}" for group in groups)


def window(disk, seconds, groups=GROUPS, interval=0.1):
    """Shell code that samples for this time."""
    return f"sample_for {seconds} {interval} {disk.name} {' '.join(groups)}"


def two_streams(disk, mode, seconds):
    """Shell code that samples two streams for this time, once their rates are steady."""
    return (
        f"{start(disk, mode)}\npause {WARM_SECONDS[mode]}\npart window\n{window(disk, seconds)}\npart after"
    )


def end(disk, groups=GROUPS):
    """Shell code that ends the streams and removes their limits.

    The limits are removed first: otherwise the dirty pages of a buffered stream would be written
    back at its limit.
    """
    names = " ".join(groups)
    return f"kill_group {names}\n{unlimit(disk, *groups)}\nend_streams {disk.name} {names}"
