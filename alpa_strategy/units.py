"""Numbers as text for users: three significant digits with a unit."""

import math


def format_bytes(num_bytes: float) -> str:
    """Return bytes as text: `0 B`, `1.50 KiB`, `24.0 MiB`, `13.2 GiB`; infinity is `no limit`."""
    value = float(num_bytes)
    if math.isinf(value):
        return "no limit"

    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value /= 1024
        index += 1
    if index == 0:
        return f"{value:.0f} B"
    return f"{_three_digits(value)} {units[index]}"


def format_seconds(seconds: float) -> str:
    """Return seconds as text: `0 s`, `1.20 µs`, `3.45 ms`, `12.3 s`, `4 min 05 s`."""
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


def format_share(share: float) -> str:
    """Return a share, 0 to 1, as per cent: with one decimal below 10%."""
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def format_count(count: float) -> str:
    """Return a count as text: `512`, `9999`, `12.3 k`, `1.34 M`, `2.60 B`, `1.20 T`."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= factor:
            return f"{_three_digits(count / factor)} {unit}"
    # Four digits are shorter than three with a unit.
    if count >= 1e4:
        return f"{_three_digits(count / 1e3)} k"
    return f"{count:.0f}"


def format_flops(flops: float) -> str:
    """Return a number of FLOPs as text: `512 FLOP`, `1.20 GFLOP`, `9.87 PFLOP`."""
    value = float(flops)
    units = ("", "k", "M", "G", "T", "P", "E")
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value /= 1000
        index += 1
    digits = _three_digits(value) if index else f"{value:.0f}"
    return f"{digits} {units[index]}FLOP"


def format_rate(per_second: float) -> str:
    """Return a number per second as text: `0.0310`, `7.25`, `512`, `12.3 k`."""
    return format_count(per_second) if per_second >= 99.95 else f"{per_second:#.3g}"


def _three_digits(value: float) -> str:
    """Return a number below 1000 with three significant digits, rounded; two decimals below 1."""
    if abs(value) < 9.995:
        return f"{value:.2f}"
    if abs(value) < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"
