"""All-reduces with RMSNorm, run on the CPU (support/emulated.py).

The sum is bitwise identical to csrc/host. The normalized rows are within the documented bound and
do not depend on the number of blocks per row. Covers delays, epoch wraparound, and negative
controls without waits and barriers.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.cases import Case, expand_cases
from tests.support.cuda_rehearsal import cuda_code_path
from tests.support.emulated import (
    DTYPES,
    F16,
    F32,
    all_reduce,
    configure_driver,
    host_sum,
    launch_counters,
    make_workspace,
    on_ranks,
    random,
    require_no_failures,
    same_bits,
    sum_over_ranks,
)
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import cuda
from tpkernels.cuda import calls as rows
from tpkernels.cuda.layouts import ll_signals, rows_layout
from tpkernels.ops.reference import rms_norm
from tpkernels.planning.cost import all_reduce_variant
from tpkernels.planning.qualification import SUMS
from tpkernels.symm.device import EPOCH, LAST_EPOCH, DeviceWorkspace

VARIANTS = ("ll", "ll_two_shot", "two_shot")
SHAPES = ((0, 8), (1, 8), (3, 264), (2, 4160), (1, 9000), (70, 16))  # 1, 2 and 4 blocks per row
MAX_ELEMENTS = 5 * 4160
WORKSPACE_SIZE = {
    "signals": ll_signals(4 * MAX_ELEMENTS, 4 * MAX_ELEMENTS),
    "buffer_bytes": 16 * MAX_ELEMENTS,
}
EPS = 1e-5


def launch(
    workspace: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    variant: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normed, total) of one call."""
    normed, total = torch.empty_like(x), torch.empty_like(x) if total is None else total
    prepared = cuda.prepare_normed_all_reduce(
        workspace.world, x, total, normed, weight, EPS, bias, residual, variant, early
    )
    prepared.bind(workspace, signature)(x, total, normed, weight, bias, residual)
    return normed, total


def is_near(normed: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the error is within the documented bound of the op."""
    return not rms_norm(total, weight, EPS).wrong(normed).any()


def find_wrong_rows(workspace: DeviceWorkspace) -> list[str]:
    """Run all dtypes, shapes, epilogues, weights and variants, and describe wrong results."""
    wrong, cases = [], itertools.product(SHAPES, DTYPES, (False, True))
    for number, (shape, dtype, has_epilogue) in enumerate(cases):
        count, columns = shape[0] * shape[1], shape[1]
        misalignment = number % 2  # elements, on rank 0
        offsets = [misalignment if r == 0 else 0 for r in range(workspace.world)]
        flats = [random(count, dtype, 100 * number + r, offset) for r, offset in enumerate(offsets)]
        if columns == 264:  # eps affects small values
            flats = [x * 2**-9 for x in flats]
        x = flats[workspace.rank].view(shape)
        weight = random(columns, F32 if has_epilogue else dtype, 5, misalignment)
        bias = random(columns, DTYPES[number % 3], 7) if has_epilogue else None
        flat_residual = (
            random(count, DTYPES[number // 2 % 3], 9, misalignment) if has_epilogue else None
        )
        residual = None if flat_residual is None else flat_residual.view(shape)
        want = host_sum(flats, dtype, bias, flat_residual).view(shape)
        unfused = torch.empty(shape, dtype=dtype)
        cuda.rms_norm(want, unfused, weight, EPS)
        if not is_near(unfused, want, weight):
            wrong.append(f"{shape} {dtype} alone: beyond the bound")
        for offset, variant in enumerate(VARIANTS):
            normed, total = launch(
                workspace, 1000 + 3 * number + offset, x, weight, variant, bias, residual
            )
            if not same_bits(total, want):
                wrong.append(f"{shape} {dtype} {variant}: the sum")
            if not same_bits(normed, unfused):
                wrong.append(f"{shape} {dtype} {variant}: the rows")
    return wrong


# GPUs before sm_90 do not support clusters.
@pytest.mark.parametrize(
    ("world", "sm"), sweep([(3, 90), (2, 80), (1, 90), (4, 90)], num_thorough=1)
)
@on_ranks()
def test_sums_and_rows(sm: int) -> None:
    with configure_driver(capability=sm):
        workspace = make_workspace(**WORKSPACE_SIZE)
        require_no_failures(find_wrong_rows(workspace), workspace)


@on_ranks(1)
def test_row_results_do_not_depend_on_the_cluster_size() -> None:
    """Normalize rows in clusters of 4, 2 and 1 blocks, and with more threads.

    All results are bitwise identical.
    """
    x, weight = random(8 * 9000, F32, 1).view(8, 9000), random(9000, F32, 2)
    results = []
    for largest, threads in ((4, 2), (2, 2), (1, 2), (4, 5)):
        with configure_driver(threads=threads), mock.patch.object(rows, "_MAX_CLUSTER", largest):
            assert rows._cluster(8, 9000, x.device) == largest
            cuda.rms_norm(x, normed := torch.empty_like(x), weight, EPS)
            results.append(normed)
    assert all(same_bits(result, results[0]) for result in results)


def count_wrong_calls(delay_us: int, previous_epoch: int = 0, **broken: bool) -> int:
    """Run consecutive calls under random delays, some in place, mixed with plain all-reduces.

    Args:
        previous_epoch: last epoch before the calls.

    Returns:
        The number of wrong calls on all ranks.
    """
    workspace = make_workspace(**WORKSPACE_SIZE)
    workspace.state[EPOCH] = previous_epoch
    weight, wants, results = torch.ones(4160), [], []
    for call in range(18):
        x = torch.arange((1 + call % 2) * 4160).add(call).remainder(7).view(-1, 4160)
        wants.append((workspace.world * x + sum(range(workspace.world))).to(F32))
        results.append((x + workspace.rank).to(F32))
    dist.barrier()
    if broken and workspace.rank > 0:
        delay_us = 0  # only rank 0 is delayed, so its peers are ahead
    workspace.set_chaos(seed=workspace.rank, max_delay_us=delay_us, **broken)
    for call, x in enumerate(results):
        if call % 6 == 5:
            all_reduce(workspace, call + 1, x, x, variant=("two_shot", "ll")[call // 6 % 2])
            results[call] = x, x
        else:
            total = x if call % 2 else torch.empty_like(x)
            variant = VARIANTS[call // 2 % 3]
            results[call] = launch(workspace, call + 1, x, weight, variant, total=total)
    wrong = int(workspace.failure() is not None)
    for (normed, total), want in zip(results, wants, strict=True):
        wrong += not torch.equal(total, want)
        wrong += normed is not total and not is_near(normed, want, weight)
    return sum_over_ranks(wrong)


@pytest.mark.parametrize("world", sweep([3, 2]))
@on_ranks()
def test_call_after_call_under_delays() -> None:
    assert count_wrong_calls(300) == 0


@on_ranks(2)
def test_epoch_wraparound() -> None:
    assert count_wrong_calls(50, LAST_EPOCH - 9) == 0


@on_ranks(3)
def test_broken_protocol_is_detected() -> None:
    """Negative control of the tests above."""
    assert count_wrong_calls(2000, skip_waits=True) > 0


@on_ranks(2)
def test_clusters_need_their_barrier() -> None:
    """Negative control without the cluster barrier.

    Blocks then read the sums of squares before their peers store them.
    """
    with configure_driver(loose=1):
        assert count_wrong_calls(500) > 0


@on_ranks(3)
def test_sequential_operations_of_a_call() -> None:
    """Count barriers, releases and atomics with one thread per peer.

    The row has one block, then a cluster of 4. One of the barriers belongs to the start of the
    cluster, and two belong to the row.
    """
    workspace, counters = make_workspace(**WORKSPACE_SIZE), []
    with configure_driver(threads=8):
        for variant, columns in itertools.product(VARIANTS, (256, 8192)):
            launch(workspace, 1, torch.ones(1, columns), torch.ones(columns), variant)
            counters.append(launch_counters())
    assert counters[:4] == [(5, 0, 0), (5, 0, 1)] * 2 and counters[4][1:] == (3, 0), counters


@pytest.mark.parametrize("variant", ["auto", "ll_two_shot", "two_shot"])
@on_ranks(3)
def test_the_ops(variant: str) -> None:
    """Run `direct` on the code path of CUDA tensors, also with rows that are not whole vectors."""
    cases = expand_cases(
        *(Case(op="all_reduce_rms_norm", shape=s, residual=F32) for s in ((40, 24), (2, 3, 20))),
        Case(op="all_reduce_rms_norm", shape=(9, 2056), norm=F32),
        Case(op="matmul_all_reduce_rms_norm", shape=(6, 72), k=(20, 9), biases=(F32,)),
        Case(op="matmul_all_reduce_rms_norm", shape=(6, 17), k=(20, 9)),
        dtypes=(F32,),
        algorithms=("direct",),
    )
    with cuda_code_path() as patch, fresh_group() as group:
        if variant != "auto":
            patch.setattr(rows, "all_reduce_variant", lambda *_, **__: variant)
        require_no_failures(check_cases(cases, group))


def test_auto_variant() -> None:
    """Select a variant by rows and columns.

    In a two-shot call each rank reduces full rows. With 2 rows most ranks are idle, with 9 one rank
    has two.
    """
    for variant, cases in {
        "ll": [(1, 8192, 8), (1, 65536, 8), (2, 32768, 8), (32, 8192, 2), (9, 1536, 8)],
        "ll_two_shot": [(8, 8192, 8), (4, 32768, 8), (32, 8192, 8), (5, 3328, 8)],
    }.items():
        for m, n, world in cases:
            assert all_reduce_variant(m * 2 * n, world, frozenset(SUMS), rows=m) == variant
    needs = rows_layout("ll_two_shot", 9, 64, 8, 2, 1)
    assert (needs.segment, needs.signals, needs.blocks) == (2 * 64, ll_signals(256, 256), 9)


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
