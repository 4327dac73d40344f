"""Numbers in the data of a page."""


def short_number(value: float) -> float:
    """Return a number with seven digits, which is more than a page shows."""
    return float(f"{value:.7g}")
