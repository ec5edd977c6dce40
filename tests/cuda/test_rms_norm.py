"""All-reduces that normalise their rows, run on the CPU (support/emulated.py): the sum has the bits
of csrc/host, the rows are within the documented bound and have the same bits however blocks share
them, under delays, over the end of the epochs; and what goes wrong without waits and barriers."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, each
from tests.support.cuda_rehearsal import pretending
from tests.support.emulated import (
    DTYPES,
    F16,
    F32,
    all_reduce,
    anywhere,
    counts,
    driver_that,
    host_sum,
    on_ranks,
    random,
    require_none,
    same_bits,
    space_of,
)
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import cuda
from tpkernels.cuda import calls as rows
from tpkernels.cuda.layouts import ll_words, rows_layout
from tpkernels.ops.reference import rms_norm
from tpkernels.planning.cost import all_reduce_variant
from tpkernels.planning.qualification import SUMS
from tpkernels.symm.device import EPOCH, LAST_EPOCH, DeviceWorkspace

VARIANTS = ("ll", "ll_two_shot", "two_shot")
SHAPES = ((0, 8), (1, 8), (3, 264), (2, 4160), (1, 9000), (70, 16))  # 1, 2 and 4 blocks for a row
MOST = 5 * 4160
SPACE = {"words": ll_words(4 * MOST, 4 * MOST), "buffer_bytes": 16 * MOST}
EPS = 1e-5


def launch(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    variant: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total) of one call."""
    normed, total = torch.empty_like(x), torch.empty_like(x) if total is None else total
    prepared = cuda.prepare_normed_all_reduce(
        space.world, x, total, normed, weight, EPS, bias, residual, variant, early
    )
    prepared.bind(space, signature)(x, total, normed, weight, bias, residual)
    return normed, total


def is_near(normed: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it is within the bound of the op's documentation."""
    return not rms_norm(total, weight, EPS).wrong(normed).any()


def wrong_rows(space: DeviceWorkspace) -> list[str]:
    """All dtypes, shapes, epilogues, weights and variants; what was wrong."""
    wrong, cases = [], itertools.product(SHAPES, DTYPES, (False, True))
    for number, (shape, dtype, more) in enumerate(cases):
        count, columns = shape[0] * shape[1], shape[1]
        off = number % 2  # elements off alignment, on one rank
        offsets = [off if r == 0 else 0 for r in range(space.world)]
        flats = [random(count, dtype, 100 * number + r, at) for r, at in enumerate(offsets)]
        if columns == 264:  # so that eps counts
            flats = [x * 2**-9 for x in flats]
        x = flats[space.rank].view(shape)
        weight = random(columns, F32 if more else dtype, 5, off)
        bias = random(columns, DTYPES[number % 3], 7) if more else None
        flat_residual = random(count, DTYPES[number // 2 % 3], 9, off) if more else None
        residual = None if flat_residual is None else flat_residual.view(shape)
        want = host_sum(flats, dtype, bias, flat_residual).view(shape)
        alone = torch.empty(shape, dtype=dtype)
        cuda.rms_norm(want, alone, weight, EPS)
        if not is_near(alone, want, weight):
            wrong.append(f"{shape} {dtype} alone: beyond the bound")
        for at, variant in enumerate(VARIANTS):
            normed, total = launch(
                space, 1000 + 3 * number + at, x, weight, variant, bias, residual
            )
            if not same_bits(total, want):
                wrong.append(f"{shape} {dtype} {variant}: the sum")
            if not same_bits(normed, alone):
                wrong.append(f"{shape} {dtype} {variant}: the rows")
    return wrong


# Before sm_90 there are no clusters.
@pytest.mark.parametrize(("world", "sm"), sweep([(3, 90), (2, 80), (1, 90), (4, 90)], later=1))
@on_ranks()
def test_sums_and_rows(sm: int) -> None:
    with driver_that(capability=sm):
        space = space_of(**SPACE)
        require_none(wrong_rows(space), space)


@on_ranks(1)
def test_bits_depend_on_the_row_alone() -> None:
    """A row has the same bits in a cluster of 4 blocks, of 2 and of 1, and with another number of
    threads."""
    x, weight = random(8 * 9000, F32, 1).view(8, 9000), random(9000, F32, 2)
    found = []
    for largest, threads in ((4, 2), (2, 2), (1, 2), (4, 5)):
        with driver_that(threads=threads), mock.patch.object(rows, "_CLUSTER", largest):
            assert rows._cluster(8, 9000, x.device) == largest
            cuda.rms_norm(x, normed := torch.empty_like(x), weight, EPS)
            found.append(normed)
    assert all(same_bits(one, found[0]) for one in found)


def wrong_calls(delay_us: int, first: int = 0, **broken: bool) -> int:
    """Calls right after one another, each rank late at random places, in place and not, among
    others; how many were wrong on all ranks. ``first``: the last epoch before them."""
    space = space_of(**SPACE)
    space.state[EPOCH] = first
    weight, wants, results = torch.ones(4160), [], []
    for call in range(18):
        x = torch.arange((1 + call % 2) * 4160).add(call).remainder(7).view(-1, 4160)
        wants.append((space.world * x + sum(range(space.world))).to(F32))
        results.append((x + space.rank).to(F32))
    dist.barrier()
    if broken and space.rank > 0:
        delay_us = 0  # so that they are ahead of rank 0
    space.set_chaos(seed=space.rank, max_delay_us=delay_us, **broken)
    for call, x in enumerate(results):
        if call % 6 == 5:
            all_reduce(space, call + 1, x, x, variant=("two_shot", "ll")[call // 6 % 2])
            results[call] = x, x
        else:
            total = x if call % 2 else torch.empty_like(x)
            variant = VARIANTS[call // 2 % 3]
            results[call] = launch(space, call + 1, x, weight, variant, total=total)
    wrong = int(space.failure() is not None)
    for (normed, total), want in zip(results, wants, strict=True):
        wrong += not torch.equal(total, want)
        wrong += normed is not total and not is_near(normed, want, weight)
    return anywhere(wrong)


@pytest.mark.parametrize("world", sweep([3, 2]))
@on_ranks()
def test_call_after_call_under_delays() -> None:
    assert wrong_calls(300) == 0


@on_ranks(2)
def test_epochs_begin_anew() -> None:
    assert wrong_calls(50, LAST_EPOCH - 9) == 0


@on_ranks(3)
def test_a_broken_protocol_is_seen() -> None:
    """Negative control of the tests above."""
    assert wrong_calls(2000, skip_waits=True) > 0


@on_ranks(2)
def test_clusters_need_their_barrier() -> None:
    """Negative control: blocks read the sums of squares before the others have stored them."""
    with driver_that(loose=1):
        assert wrong_calls(500) > 0


@on_ranks(3)
def test_what_a_call_does_in_turn() -> None:
    """With a thread for each peer, for one row in one block, then in a cluster of 4. Of the
    barriers, one is that of a cluster that starts, and two are a row's."""
    space, found = space_of(**SPACE), []
    with driver_that(threads=8):
        for variant, columns in itertools.product(VARIANTS, (256, 8192)):
            launch(space, 1, torch.ones(1, columns), torch.ones(columns), variant)
            found.append(counts())
    assert found[:4] == [(5, 0, 0), (5, 0, 1)] * 2 and found[4][1:] == (3, 0), found


@pytest.mark.parametrize("variant", ["auto", "ll_two_shot", "two_shot"])
@on_ranks(3)
def test_the_ops(variant: str) -> None:
    """By `direct` on the way of CUDA tensors, and rows that are no whole vectors."""
    cases = each(
        *(Case(op="all_reduce_rms_norm", shape=s, residual=F32) for s in ((40, 24), (2, 3, 20))),
        Case(op="all_reduce_rms_norm", shape=(9, 2056), norm=F32),
        Case(op="matmul_all_reduce_rms_norm", shape=(6, 72), k=(20, 9), biases=(F32,)),
        Case(op="matmul_all_reduce_rms_norm", shape=(6, 17), k=(20, 9)),
        dtypes=(F32,),
        algorithms=("direct",),
    )
    with pretending() as patch, fresh_group() as group:
        if variant != "auto":
            patch.setattr(rows, "all_reduce_variant", lambda *_, **__: variant)
        require_none(check_cases(cases, group))


def test_what_auto_takes() -> None:
    """In two hops a rank has whole rows: of 2 rows most ranks have none, of 9 one has two."""
    for variant, cases in {
        "ll": [(1, 8192, 8), (1, 65536, 8), (2, 32768, 8), (32, 8192, 2), (9, 1536, 8)],
        "ll_two_shot": [(8, 8192, 8), (4, 32768, 8), (32, 8192, 8), (5, 3328, 8)],
    }.items():
        for m, n, world in cases:
            assert all_reduce_variant(m * 2 * n, world, frozenset(SUMS), rows=m) == variant
    needs = rows_layout("ll_two_shot", 9, 64, 8, 2, 1)
    assert (needs.segment, needs.words, needs.blocks) == (2 * 64, ll_words(256, 256), 9)


def test_refusals() -> None:
    x, weight = torch.ones(4, 12), torch.ones(12)
    with pytest.raises(
        NotImplementedError, match=r"rows have 12 elements; .* need a multiple of 8"
    ):
        cuda.prepare_normed_all_reduce(2, x, x, x, weight, EPS)
    with pytest.raises(ValueError, match="variant is 'ring'; it must be one of auto, two_shot"):
        cuda.prepare_normed_all_reduce(2, x, x, x, weight, EPS, variant="ring")
    x = torch.ones(4, 16, dtype=F16)
    with pytest.raises(ValueError, match=r"weight has shape \[12\]; it must be \[16\]"):
        cuda.rms_norm(x, torch.empty_like(x), weight, EPS)
    with pytest.raises(ValueError, match=r"they must match"):
        cuda.rms_norm(x, torch.ones(4, 16), torch.ones(16), EPS)
    with pytest.raises(NotImplementedError, match="x is float64; supported"):
        cuda.rms_norm(x.double(), x.double(), torch.ones(16), EPS)
    with pytest.raises(ValueError, match="normed is not aligned to 16 bytes"):
        cuda.rms_norm(x, torch.empty(65, dtype=F16)[1:].view(4, 16), torch.ones(16), EPS)
