"""How the compiled tile loop stores tiles, when it publishes them, and how sums load them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import triton.language as tl

from tests.support.kernel_builds import Build, build
from tests.support.tiers import sweep, thorough
from tpkernels.kernels.configs import TABLE

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # that a block may have
TENSOR_CORES = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
PUSHES = ("matmul_reduce_scatter", "two_shot")
EVENTS = {
    "product": r"mma\.sync|wgmma\.mma_async|tcgen05\.mma",
    "bulk store": r"cp\.async\.bulk\.tensor\S*global\.shared",
    "store": r"st\.global\.v4",
    "complete": r"cp\.async\.bulk\.wait_group 0",
    "read": r"cp\.async\.bulk\.wait_group\.read",
    "release": r"st\.release\.sys",
    "branch": r"\n\$L__BB",
}
SUMS = r"@p ld\.acquire\.sys"  # which follow the loop over tiles


def events_of(found: Build) -> list[str]:
    """What the loop over tiles does, in the order of the PTX, repetitions left out."""
    loop = re.split(SUMS, found.ptx)[0]
    kinds = (re.compile(pattern) for pattern in EVENTS.values())
    named = "|".join(f"({kind.pattern})" for kind in kinds)
    names = list(EVENTS)
    found_events = (names[match.lastindex - 1] for match in re.finditer(named, loop))
    return [event for event, _ in itertools.groupby(found_events)]


@pytest.mark.parametrize("name", PUSHES)
@pytest.mark.parametrize("arch", sweep([90, 100]))
def test_bulk_stores_are_complete_before_the_word(name: str, arch: int) -> None:
    """Complete, not only read from shared memory. Once in the loop, once for the last tile."""
    events = events_of(build(name, tl.bfloat16, arch, TABLE[arch, 2, False]))
    assert "bulk store" in events and "store" not in events
    _entered, *tiles = (at for at, event in enumerate(events) if event == "release")
    assert len(tiles) >= 2 and all(events[at - 1] == "complete" for at in tiles), events


@pytest.mark.parametrize("name", [*PUSHES, pytest.param("one_shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", [tl.bfloat16, thorough(tl.float32)])
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_a_tile_is_published_within_the_product_of_the_next(
    name: str, wire: tl.dtype, arch: int
) -> None:
    """Under a condition of its own, in the loop over K. A release right behind the stores would
    wait for all of them to arrive."""
    found = build(name, tl.bfloat16, arch, TABLE[arch, 2, False], WIRE=wire)
    events = [event for event in events_of(found) if event not in ("complete", "read")]
    assert ("bulk store" in events) == (arch >= 90 and wire == tl.bfloat16 and name in PUSHES)
    pairs = set(itertools.pairwise(events))
    assert not pairs & {("store", "release"), ("bulk store", "release")}, events
    if name in PUSHES:  # one loop over tiles and K
        entered, tile, *_ = re.split(EVENTS["release"], found.ptx)
        assert int(re.findall(r"Depth=(\d)", entered + tile)[-1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PUSHES, "one_shot"])
@pytest.mark.parametrize("arch", sweep([100, 90, 80]))
def test_wide_partials_do_not_spill(name: str, arch: int) -> None:
    """An accumulator that is converted at once takes 192 to 328 bytes of stack on sm_100. Loads of
    the next tile still have room in shared memory."""
    found = build(name, tl.bfloat16, arch, TABLE[arch, 2, False], WIRE=tl.float32)
    assert found.stack == found.local == 0 and found.shared <= SHARED_BYTES[arch], found
    assert found.depth(TENSOR_CORES[arch]) == (1 if name in PUSHES else 2)


def test_tma_stores_where_a_whole_tile_has_room() -> None:
    config = TABLE[90, 2, False]
    assert config.stores_by_tma(16, 16, 64)
    assert not config.stores_by_tma(16, 16, 63)  # rows that are not aligned
    assert not config.stores_by_tma(16, 32, 64)
    assert not replace(config, num_stages=4).stores_by_tma(16, 16, 64)
    assert not TABLE[80, 2, False].stores_by_tma(16, 16, 64)
    assert TABLE[90, 2, True].stores_by_tma(16, 32, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "in_flight"), [(8, 16), pytest.param(2, 4, marks=pytest.mark.slow), thorough(16, 12)]
)
def test_partials_of_all_ranks_are_loaded_before_they_are_added(world: int, in_flight: int) -> None:
    """16 elements in a thread, 8 in a load, in the order of ptxas. Of 16 ranks it interleaves the
    rest with the additions, for want of registers."""
    config = TABLE[90, 2, False]
    found = build("matmul_reduce_scatter", tl.bfloat16, 90, config, world=world, residual=None)
    opcode = r"\*/\s+(?:@!?U?P\w+ )?(?:(LDG\.E\.128)|FADD|FFMA)"
    first, *_ = [
        len(list(run)) if loads else 0
        for loads, run in itertools.groupby(re.findall(opcode, found.sass), bool)
    ]
    assert first >= in_flight and found.stack == 0
