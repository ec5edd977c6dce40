"""Fused ops under the Triton interpreter: the GPU kernels, with one process per rank."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import Case, RanksFixture, expand_cases, uneven_splits
from tests.support.cuda_rehearsal import FUSED_OPS
from tests.support.ranked import check_cases, fresh_group, on_ranks, run_cases
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.symm.device import DeviceWorkspace

FUSED = ("fused",)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# The interpreter uses tiles of 32 x 32 x 32.
SHAPES = {1: (1, 33, 1), 2: (70, 65, 33), 3: (7, 40, 100), 4: (97, 64, 64)}  # M, N, K


def split(rows: int, world: int) -> tuple[int, ...]:
    """Return shard sizes that grow with the rank. With few rows, the first shards are empty."""
    _, growing = islice(uneven_splits(rows, world), 2)
    return growing


def gather(m: int, n: int, k: int, world: int) -> Case:
    return Case(op="all_gather_matmul", shape=(m, k), sizes=split(m, world), n=(n,))


def scatter(m: int, n: int, k: int, world: int) -> Case:
    return Case(op="matmul_reduce_scatter", shape=(m, n), sizes=split(m, world), k=(k,))


def reduce(m: int, n: int, k: int, world: int) -> Case:
    return Case(op="matmul_all_reduce", shape=(m, n), k=(k,))


def reduce_and_normalise(m: int, n: int, k: int, world: int) -> Case:
    return replace(reduce(m, n, k, world), op="matmul_all_reduce_rms_norm")


OPS: dict[str, Callable[[int, int, int, int], Case]] = {
    "all_gather_matmul": gather,
    "matmul_reduce_scatter": scatter,
    "matmul_all_reduce": reduce,
    "matmul_all_reduce_rms_norm": reduce_and_normalise,
}


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 1, 3, 4])
def test_every_dtype(interpreter_ranks: RanksFixture, world: int, op: str) -> None:
    run_cases(
        interpreter_ranks, world, expand_cases(OPS[op](*SHAPES[world], world), algorithms=FUSED)
    )


SEVERAL = Case(
    op="all_gather_matmul",
    shape=(40, 50),
    n=(40, 7),
    n_by_rank=True,
    biases=(F32, None),
    return_gathered=True,
    out_dtype=F32,
    weight_layout="linear",
    layout="sliced",
)
ADDED = Case(
    op="matmul_reduce_scatter",
    shape=(17, 40),
    sizes=(5, 12),
    k=(33, 20),
    biases=(F32,),
    residual=BF16,
    wire_dtype=F32,
    layout="transposed",
    weight_layout="sliced",
)


@pytest.mark.thorough
def test_biases_residuals_dtypes_and_layouts(interpreter_ranks: RanksFixture) -> None:
    """Several weights, biases, residuals, result and communication dtypes, strides and batches."""
    all_reduce = replace(ADDED, op="matmul_all_reduce", sizes=None, wire_dtype=None, out_dtype=F32)
    batched = replace(ADDED, shape=(2, 17, 40), dim=1, layout="plain", weight_layout="plain")
    cases = [replace(case, dtype=BF16) for case in (SEVERAL, ADDED, all_reduce, batched)]
    cases.append(replace(SEVERAL, shape=(6, 5, 20), layout="plain", dtype=F32))
    run_cases(interpreter_ranks, 2, [replace(case, algorithm="fused") for case in cases])


def shots_job(cases: list[Case], one_shot_bytes: int) -> list[str]:
    from tpkernels.kernels import matmul_all_reduce

    shots = mock.patch.object(matmul_all_reduce, "ONE_SHOT_BYTES", one_shot_bytes)
    with shots, fresh_group() as group:
        return check_cases(cases, group)


@pytest.mark.slow
@pytest.mark.parametrize("shots", sweep([0, 1 << 30]))  # two-shot, one-shot
@pytest.mark.parametrize("world", [2, *(pytest.param(w, marks=pytest.mark.slow) for w in (3, 4))])
def test_one_shot_and_two_shot_and_even_shards(
    interpreter_ranks: RanksFixture, world: int, shots: int
) -> None:
    """Some cases have fewer tile rows than ranks. Kernels compute the offsets of even shards, and
    look up the offsets of uneven shards."""
    even = [replace(make(42 * world, 40, 33, world), sizes=None) for make in (gather, scatter)]
    cases = [reduce(rows, 40, 33, world) for rows in (33, 100, 64 * world)]
    variants = expand_cases(*cases, dtypes=(F32,), algorithms=FUSED)
    if shots == 0:
        variants += expand_cases(*even, dtypes=(F16,), algorithms=FUSED)
    for errors in interpreter_ranks(world).run(shots_job, variants, shots):
        assert not errors, errors


# Protocol.


def _device(group: dist.ProcessGroup) -> DeviceWorkspace:
    workspace = groups.get(group.group_name).workspace
    assert workspace is not None and workspace._device_workspace is not None
    return workspace._device_workspace


def _poison(workspace: DeviceWorkspace, epoch: int) -> None:
    """Fill the local buffer of an epoch with NaN."""
    region = torch.frombuffer(workspace._memory[workspace.rank], dtype=F32)
    begin = workspace.buffers_offset + (epoch & 1) * workspace.buffer_stride
    region[begin // 4 : (begin + workspace.buffer_bytes) // 4].fill_(math.nan)


def _calls(world: int) -> Iterator[Case]:
    """Yield cases of different ops and sizes in rotation."""
    while True:
        for make in (gather, scatter, reduce, scatter, gather):
            for rows in (40, 9, 33):
                case = make(rows, 20, 17, world)
                yield replace(case, algorithm="fused", integers=True)


def protocol_job(seed: int, calls: int, delay_us: int, poison: bool, **broken: bool) -> list[str]:
    wrong: list[str] = []
    with fresh_group() as group:
        largest = Case(op="matmul_reduce_scatter", shape=(64 * group.size(), 20), k=(17,))
        wrong += check_cases([replace(largest, algorithm="fused", integers=True)], group)
        chaos = {"seed": seed * 10 + group.rank(), "max_delay_us": delay_us, **broken}
        workspace = faults.get_workspace(group)
        workspace.set_chaos(**chaos)
        for _, case in zip(range(calls), _calls(group.size()), strict=False):
            # The buffer was last used two calls ago, and all peers have read that data.
            if poison and case.op == "all_gather_matmul":
                _poison(_device(group), int(_device(group).state[0]) + 1)
            wrong += check_cases([case], group)
            if poison and case.op != "all_gather_matmul":  # only the owner reads pushed data
                _poison(_device(group), int(_device(group).state[0]))
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_many_calls_with_delays_and_poison(interpreter_ranks: RanksFixture, world: int) -> None:
    errors = interpreter_ranks(world).run(protocol_job, 70 + world, 150, 5000, True, timeout=840)
    assert not any(errors), errors


@pytest.mark.thorough
def test_a_skipped_wait_is_detected(interpreter_ranks: RanksFixture) -> None:
    """Negative control: the test above can fail."""
    errors = interpreter_ranks(2).run(
        protocol_job, 5, 8, 20_000, False, timeout=250, skip_waits=True
    )
    assert any(errors)


# Unsupported devices and dtypes.


@on_ranks(2)
def test_errors_without_the_interpreter() -> None:
    group = faults.new_group()
    for op, dtype in itertools.product(FUSED_OPS, (torch.float32, torch.float64)):
        operands = torch.ones(8, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype)
        call = functools.partial(getattr(tpkernels, op), *operands, group, algorithm="fused")
        ending = faults.record_ending(call)
        assert ending.error == "NotImplementedError", ending
        if dtype == torch.float64:
            assert "does not support float64" in ending.message, ending
        else:
            assert ending.message.startswith(
                f"algorithm 'fused' of {op} needs a GPU, because it runs Triton"
            ), ending
            assert "TRITON_INTERPRET=1" in ending.message, ending
    faults.run_op("all_gather_matmul", group)
    assert groups.get(group.group_name).workspace is not None
