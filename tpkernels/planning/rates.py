"""How long a product and a collective take by the rates of a machine. Pure."""

from __future__ import annotations

from tpkernels.planning.machines import Link, Profile


def product_seconds(profile: Profile, m: int, k: int, n: int, itemsize: int) -> float:
    """A local product [m, k] @ [k, n]."""
    multiply = 2 * m * k * n / profile.rate(itemsize)
    move = (m * k + k * n + m * n) * itemsize / profile.bandwidth
    return max(multiply, move) if profile.overlaps else multiply + move


def collective_seconds(
    profile: Profile, nbytes: float, ranks: int, *, stride: int = 1, passes: int = 1
) -> float:
    """An all-gather or a reduce-scatter.

    Args:
        nbytes: of the whole tensor, which each rank has after an all-gather or before a
            reduce-scatter.
        ranks: of the group.
        stride: between the numbers of neighbours in the group.
        passes: 2 for an all-reduce, which is both.
    """
    if ranks == 1:
        return 0.0
    inner = _ranks_in_a_node(profile, ranks, stride)
    outer = ranks // inner
    # Between nodes each rank gets the parts of those with its place; in the node, their results.
    seconds = _ring_seconds(profile.between, outer, (outer - 1) / ranks * nbytes, passes)
    return seconds + _ring_seconds(profile.within, inner, (inner - 1) / inner * nbytes, passes)


def all_to_all_seconds(profile: Profile, nbytes: float, ranks: int, *, stride: int = 1) -> float:
    """An all-to-all, in which ranks of other nodes send each rank its pieces themselves.

    Args:
        nbytes: of what a rank has after it.
        ranks, stride: as for `collective_seconds`.
    """
    inner = _ranks_in_a_node(profile, ranks, stride)
    far, near = ranks - inner, inner - 1
    seconds = _ring_seconds(profile.between, far + 1, far / ranks * nbytes, 1)
    return seconds + _ring_seconds(profile.within, near + 1, near / ranks * nbytes, 1)


def _ranks_in_a_node(profile: Profile, ranks: int, stride: int) -> int:
    """Neighbours of a group that share a node: the largest number that divides the group."""
    most = max(1, min(ranks, profile.node // stride))
    return max(inner for inner in range(1, most + 1) if ranks % inner == 0)


def _ring_seconds(link: Link, ranks: int, received: float, passes: int) -> float:
    if ranks == 1:
        return 0.0
    return link.call + passes * (link.step * (ranks - 1) + received / link.bandwidth)
