"""Rows for the image tool: `weir image convert`, `compare` and `check` beside qemu-img.

The image has 4 GiB: regions of 64 MiB with lines of text alternate with holes. Its qcow2 form is
written by qemu-img, so both programs read the same file. Compression with zlib takes long, so that
row has 64 MiB of text without holes.

All images are in a file system in memory: the programs are compared, not the disk. Each program
runs with its defaults and with its best options; contenders called "direct" open images with
O_DIRECT. A speed is in bytes of data, without the holes; CPU time is that of the program alone.

Never repairs an image, and never writes to a source.
"""

import tempfile
from pathlib import Path

import loads
from results import Faster
from rows import WEIR, Row

WEIR_BEST, WEIR_DIRECT = f"{WEIR} -m 16 -W", f"{WEIR} direct"
QEMU, QEMU_DIRECT = "qemu-img", "qemu-img direct"
BEST = ("-m", 16, "-W")
# Options of the contenders, after `convert`.
OURS = {WEIR: (), WEIR_BEST: BEST, WEIR_DIRECT: (*BEST, "-t", "none", "-T", "none")}
THEIRS = {
    QEMU: (),
    f"{QEMU} -W": ("-W",),
    f"{QEMU} -m 16": ("-m", 16),
    f"{QEMU} -m 16 -W": BEST,
    QEMU_DIRECT: (*BEST, "-t", "none", "-T", "none"),
}
# The same with compression, where each run takes long.
OURS_COMPRESSING = {name: OURS[name] for name in (WEIR, WEIR_BEST)}
THEIRS_COMPRESSING = {name: THEIRS[name] for name in (QEMU, f"{QEMU} -m 16", f"{QEMU} -m 16 -W")}
# The same for `compare` and `check`, which have no other options for speed.
OUR_READERS = {WEIR: (), WEIR_DIRECT: ("-T", "none")}
THEIR_READERS = {QEMU: (), QEMU_DIRECT: ("-T", "none")}
REGIONS = 64
# Checks of one sample: one takes some milliseconds.
CHECKS = 20
LINES = 50_000
PATIENCE_SECONDS = 600


def text(size):
    """Bytes that compress like documents: lines of numbers."""
    content, number = bytearray(), 0
    while len(content) < size:
        content += b"".join(
            b"%d: %x\n" % (n, n * 2654435761 & 0xFFFFFFFF) for n in range(number, number + LINES)
        )
        number += LINES
    return bytes(content[:size])


def in_memory(stack):
    """A directory in memory for the images of a row, removed with it."""
    directory = tempfile.TemporaryDirectory(prefix="weir-bench-", dir="/dev/shm")
    return Path(stack.enter_context(directory))


def write_source(path, region_bytes, regions, step):
    """Writes text into every `step`-th region; the others are holes. The content is deterministic.
    """
    content = text(region_bytes)
    with open(path, "wb") as file:
        for number in range(0, regions, step):
            file.seek(number * region_bytes)
            # Regions differ in their first line.
            file.write(b"%15d\n" % number)
            file.write(memoryview(content)[16:])
        file.truncate(regions * region_bytes)


def half_empty(setup, directory):
    """Creates a raw image: twice the size of the disk, half of it holes. Returns its path, and the
    bytes of data.
    """
    path = directory / "source.raw"
    write_source(path, 2 * setup.size_bytes // REGIONS, REGIONS, step=2)
    return path, setup.size_bytes


def qcow2(setup, directory):
    """The same in qcow2."""
    raw, data_bytes = half_empty(setup, directory)
    path = qcow2_of(raw)
    raw.unlink()
    return path, data_bytes


def qcow2_of(raw):
    """Converts an image to qcow2; returns the path of the new one."""
    path = raw.with_suffix(".qcow2")
    loads.run([QEMU, "convert", "-f", "raw", "-O", "qcow2", raw, path], PATIENCE_SECONDS)
    return path


def full(setup, directory):
    """Creates a raw image without holes, a 32nd of the disk's size."""
    path, size = directory / "source.raw", setup.size_bytes // 32
    write_source(path, size, regions=1, step=1)
    return path, size


def measured(argv, data_bytes, times=1):
    """One sample of a program that processes this much data, run this many times."""
    runs = [loads.run_counted(argv, PATIENCE_SECONDS) for _ in range(times)]
    elapsed = sum(seconds for seconds, _ in runs)
    cpu = sum(usage.ru_utime + usage.ru_stime for _, usage in runs)
    return {"bytes_per_s": times * data_bytes / elapsed, "cpu_s": cpu / times}


def side_by_side(setup, ours, theirs, sample):
    """Contenders of both programs: `sample` takes the beginning of a command line, and options."""
    weir = {
        name: lambda options=options: sample([setup.program, "image"], options) for name, options in ours.items()
    }
    qemu = {name: lambda options=options: sample([QEMU], options) for name, options in theirs.items()}
    return (weir if setup.program else {}) | qemu


def converting(source_of, source_form, form, *options):
    """Conversions into a new image, which is removed."""
    compressing = "-c" in options

    def contenders(setup, stack):
        directory = in_memory(stack)
        source, data_bytes = source_of(setup, directory)
        target = directory / "target"

        def sample(program, own):
            argv = [*program, "convert", "-f", source_form, "-O", form, *options, *own, source, target]
            try:
                return measured(argv, data_bytes)
            finally:
                target.unlink(missing_ok=True)

        if compressing:
            return side_by_side(setup, OURS_COMPRESSING, THEIRS_COMPRESSING, sample)
        return side_by_side(setup, OURS, THEIRS, sample)

    return contenders


def comparing(setup, stack):
    """The two forms of the image, whose content is equal."""
    raw, data_bytes = half_empty(setup, in_memory(stack))
    other = qcow2_of(raw)

    def sample(program, own):
        return measured([*program, "compare", "-f", "raw", "-F", "qcow2", *own, raw, other], data_bytes)

    return side_by_side(setup, OUR_READERS, THEIR_READERS, sample)


def checking(setup, stack):
    """The qcow2 image, several times."""
    path, data_bytes = qcow2(setup, in_memory(stack))
    times = CHECKS if setup.seconds else 1

    def sample(program, own):
        return measured([*program, "check", "-f", "qcow2", *own, path], data_bytes, times)

    return side_by_side(setup, OUR_READERS, THEIR_READERS, sample)


def _faster(factor, peers):
    """Targets: the defaults relative to qemu-img's, and the best options to its best."""
    defaults = Faster(WEIR, factor, (QEMU,), key="bytes_per_s")
    return (defaults, Faster(WEIR_BEST, factor, tuple(peers), key="bytes_per_s"))


def _row(name, title, contenders, targets):
    return Row(
        f"image-{name}", f"{title}, in memory", contenders, targets, ("bytes_per_s", "cpu_s"), rounds_factor=0.6
    )


ROWS = (
    _row(
        "raw-to-qcow2",
        "image convert from raw to qcow2, 4 GiB with 2 GiB of data",
        converting(half_empty, "raw", "qcow2"),
        _faster(1.1, THEIRS),
    ),
    _row(
        "qcow2-to-raw",
        "image convert from qcow2 to raw, 4 GiB with 2 GiB of data",
        converting(qcow2, "qcow2", "raw"),
        _faster(1.1, THEIRS),
    ),
    _row(
        "raw-to-zlib",
        "image convert from raw to compressed qcow2 (zlib), 64 MiB of data",
        converting(full, "raw", "qcow2", "-c"),
        _faster(1.2, THEIRS_COMPRESSING),
    ),
    _row(
        "qcow2-to-zstd",
        "image convert from qcow2 to compressed qcow2 (zstd), 4 GiB with 2 GiB of data",
        converting(qcow2, "qcow2", "qcow2", "-c", "-o", "compression_type=zstd"),
        _faster(1.1, THEIRS_COMPRESSING),
    ),
    _row(
        "compare",
        "image compare of equal images, raw and qcow2, 4 GiB with 2 GiB of data",
        comparing,
        (Faster(WEIR, 1.1, tuple(THEIR_READERS), key="bytes_per_s"),),
    ),
    _row(
        "check",
        "image check of a qcow2 image of 4 GiB with 2 GiB of data",
        checking,
        (Faster(WEIR, 1.1, tuple(THEIR_READERS), key="bytes_per_s"),),
    ),
)
