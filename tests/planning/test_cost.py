"""The number of hops of a small all-reduce on GPUs, by the model of hops."""

from __future__ import annotations

import pytest

from tpkernels.planning import cost
from tpkernels.planning.cost import all_reduce_way, hop_seconds

ONE, TWO, LINES, FENCED = "ll", "ll_two_shot", "ll128", "two_shot"
KIB, WORDS = 1 << 10, frozenset({ONE, TWO, FENCED})


def test_one_hop_up_to_a_size_that_depends_on_the_ranks() -> None:
    """What 0.6 us at 450 GB/s carry, 270 KB, over the bytes that two hops save."""
    for world, words, lines in (
        (3, 202_500, 109_038),
        (4, 90_000, 63_000),
        (8, 25_714, 22_500),
        (16, 10_285, 9_692),
    ):
        for most, ways, second in ((words, WORDS, TWO), (lines, WORDS | {LINES}, LINES)):
            assert all_reduce_way(most, world, ways) == ONE
            assert all_reduce_way(most + 2, world, ways) == second
    # Alone nothing is sent. Between two, words in one hop are as many as in two.
    assert all_reduce_way(1 << 19, 1, WORDS) == all_reduce_way(1 << 19, 2, WORDS) == ONE
    assert all_reduce_way(256 * KIB, 2, WORDS | {LINES}) == ONE
    assert all_reduce_way(512 * KIB, 2, WORDS | {LINES}) == LINES


@pytest.mark.parametrize("second", [TWO, LINES])
def test_the_fastest_by_the_model(second: str) -> None:
    most, among = cost.WITHOUT_FENCES[second], WORDS | {second}
    for world in (2, 3, 4, 5, 8, 16, 72):
        for nbytes in (*range(0, 256 * KIB, 8 * KIB), most):
            ways = {way: hop_seconds(way, nbytes, world) for way in (ONE, second, FENCED)}
            way = all_reduce_way(nbytes, world, among)
            assert way == min(ways, key=ways.__getitem__), (nbytes, world)
        assert all_reduce_way(most + 1, world, among) == FENCED


def test_only_what_is_qualified() -> None:
    for nbytes in (1 << 10, 1 << 22):
        for way in (ONE, TWO, LINES, FENCED):
            assert all_reduce_way(nbytes, 4, frozenset({way})) == way
    assert all_reduce_way(1 << 10, 4, frozenset({TWO, FENCED})) == TWO


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
