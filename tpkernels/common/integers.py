"""Integer division and multiples, rounded up."""


def ceil_div(value: int, unit: int) -> int:
    """Return ``value / unit``, rounded up."""
    return -(-value // unit)


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``value``."""
    return ceil_div(value, unit) * unit
