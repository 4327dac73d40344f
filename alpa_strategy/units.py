"""Numbers as people read them: three significant digits with a unit."""

import math


def format_bytes(num_bytes: float) -> str:
    """`0 B`, `1.50 KiB`, `24.0 MiB`, `13.2 GiB`."""
    value, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    if math.isinf(value):
        return "no limit"
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1024, index + 1
    return f"{value:.0f} B" if index == 0 else f"{_three_digits(value)} {units[index]}"


def format_seconds(seconds: float) -> str:
    """`0 s`, `1.20 µs`, `3.45 ms`, `12.3 s`, `4 min 05 s`."""
    if seconds == 0:
        return "0 s"
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_count(count: float) -> str:
    """`512`, `1.34 M`, `2.60 B`."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= factor:
            return f"{_three_digits(count / (1e3 if unit == 'k' else factor))} {unit}"
    return f"{count:.0f}"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
