"""A bar chart for the terminal: one measured value per second, and the expected line.

Block characters and 60 lines instead of a library: the output works over any connection and can be
pasted into a report. It fits 80 columns. Colour is optional and carries no information of its own.

Never interprets the values.
"""

BLOCKS = " ▁▂▃▄▅▆▇█"
EXPECTED = "\x1b[36m"
PLAIN = "\x1b[0m"


def bar(value, largest, width):
    """A horizontal bar of `value`, with `width` characters for `largest`, in eighths of a
    character.
    """
    eighths = round(max(0.0, min(value / largest, 1.0)) * width * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return "█" * (eighths // 8) + partial


def cell(value, expected, low, high):
    """One character: the part of the bar of `value` in the band `low..high`, or the expected line
    at its foot.

    The line is drawn in the band above the expected value: a bar that reaches the value ends right
    below it, a shorter one leaves a gap, and a longer one covers the line.
    """
    eighths = round(8 * (value - low) / (high - low))
    if eighths > 1:
        return BLOCKS[min(eighths, 8)], False
    if low <= expected < high:
        return "▁", True
    return BLOCKS[max(eighths, 0)], False


def columns(measured, expected, step, height, colour):
    """The lines of a chart: `measured` and `expected` have one value per second, `step` is the
    height of a line.
    """
    lines = []
    for row in reversed(range(height)):
        low, high = row * step, (row + 1) * step
        text = []
        for value, line in zip(measured, expected, strict=True):
            character, is_line = cell(value, line, low, high)
            painted = f"{EXPECTED}{character * 2}{PLAIN}" if is_line and colour else character * 2
            text.append(painted)
        label = f"{low:>6,}" if row % 2 == 0 else " " * 6
        lines.append(f"{label} ┤{''.join(text)}")
    ticks = "".join(f"{second:<10}" for second in range(0, len(measured), 5))
    lines.append(f"{'':>6} └{'─' * (2 * len(measured))}")
    lines.append(f"{'':>8}{ticks}".rstrip() + "  seconds")
    return lines
