"""The number of hops of a small all-reduce on GPUs, by the model of hops."""

from __future__ import annotations

import pytest

from tpkernels.planning import cost
from tpkernels.planning.cost import all_reduce_way, hop_seconds

ONE, TWO, LINES, FENCED = "ll", "ll_two_shot", "ll128", "two_shot"
KIB = 1 << 10


def test_one_hop_up_to_a_size_that_depends_on_the_ranks() -> None:
    """What 0.6 us at 450 GB/s carry, 270 KB, over the bytes that two hops save."""
    for world, words, lines in (
        (3, 202_500, 109_038),
        (4, 90_000, 63_000),
        (8, 25_714, 22_500),
        (16, 10_285, 9_692),
    ):
        for most, lines_arrive, second in ((words, False, TWO), (lines, True, LINES)):
            assert all_reduce_way(most, world, lines_arrive) == ONE
            assert all_reduce_way(most + 2, world, lines_arrive) == second
    # Alone nothing is sent. Between two, words in one hop are as many as in two.
    assert all_reduce_way(1 << 19, 1, False) == all_reduce_way(1 << 19, 2, False) == ONE
    assert all_reduce_way(256 * KIB, 2, True) == ONE
    assert all_reduce_way(512 * KIB, 2, True) == LINES


@pytest.mark.parametrize("ll128", [False, True])
def test_the_fastest_by_the_model(ll128: bool) -> None:
    second, most = (LINES, cost.LL128_MAX_BYTES) if ll128 else (TWO, cost.LL_TWO_SHOT_MAX_BYTES)
    for world in (2, 3, 4, 5, 8, 16, 72):
        for nbytes in (*range(0, 256 * KIB, 8 * KIB), most):
            ways = {way: hop_seconds(way, nbytes, world) for way in (ONE, second, FENCED)}
            way = all_reduce_way(nbytes, world, ll128)
            assert way == min(ways, key=ways.__getitem__), (nbytes, world)
        assert all_reduce_way(most + 1, world, ll128) == FENCED


def test_published_table() -> None:
    """benchmarks/results/gpu-by-construction.md, in us."""
    for (world, kib), wanted in {
        (8, 16): (1.1, 1.3, 1.3, 6.9),
        (8, 512): (16.9, 5.3, 3.5, 8.8),
        (8, 2048): (65.8, 17.5, 10.5, 15.0),
        (4, 64): (1.5, 1.6, 1.4, 7.0),
        (2, 512): (2.9, 3.5, 2.5, 8.0),
    }.items():
        found = [
            round(1e6 * hop_seconds(way, kib * KIB, world), 1) for way in (ONE, TWO, LINES, FENCED)
        ]
        assert tuple(found) == wanted
