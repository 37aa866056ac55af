"""A bar chart for the terminal: a measured value a second, and the line it was asked to follow.

Why by hand: block characters and 60 lines need no library, work over any connection and can be
pasted into a report. Fits 80 columns. Colour is the caller's choice; without it nothing is lost.

Never knows what the values mean.
"""

BLOCKS = " ▁▂▃▄▅▆▇█"
ASKED = "\x1b[36m"
PLAIN = "\x1b[0m"


def bar(value, largest, width):
    """A horizontal bar of `value`, `width` characters when it is `largest`, in eighths of a
    character.
    """
    eighths = round(max(0.0, min(value / largest, 1.0)) * width * 8)
    partial = " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return "█" * (eighths // 8) + partial


def cell(value, asked, low, high):
    """One character: what the bar of `value` fills of the band `low..high`, or the asked line at
    its foot.

    The line is drawn in the band above the asked value: a bar that meets what was asked ends right
    under it, one that falls short leaves a gap, one that exceeds it covers the line.
    """
    eighths = round(8 * (value - low) / (high - low))
    if eighths > 1:
        return BLOCKS[min(eighths, 8)], False
    if low <= asked < high:
        return "▁", True
    return BLOCKS[max(eighths, 0)], False


def columns(measured, asked, step, height, colour):
    """The lines of a chart: `measured` and `asked` hold one value a second, `step` is a line's
    height.
    """
    lines = []
    for row in reversed(range(height)):
        low, high = row * step, (row + 1) * step
        text = []
        for value, line in zip(measured, asked, strict=True):
            character, is_line = cell(value, line, low, high)
            painted = f"{ASKED}{character * 2}{PLAIN}" if is_line and colour else character * 2
            text.append(painted)
        label = f"{low:>6,}" if row % 2 == 0 else " " * 6
        lines.append(f"{label} ┤{''.join(text)}")
    ticks = "".join(f"{second:<10}" for second in range(0, len(measured), 5))
    lines.append(f"{'':>6} └{'─' * (2 * len(measured))}")
    lines.append(f"{'':>8}{ticks}".rstrip() + "  seconds")
    return lines
