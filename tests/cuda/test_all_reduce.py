"""The collectives of csrc/cuda between processes, run on the CPU (see support/emulated.py).

Sums are bitwise identical to csrc/host. Covers consecutive calls under delays, epoch wraparound,
calls mixed with copies, and negative controls with an incomplete protocol.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.emulated import (
    BF16,
    DTYPES,
    F16,
    F32,
    TEARINGS,
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
from tests.support.tiers import sweep
from tpkernels import cuda
from tpkernels.cuda.layouts import all_reduce_layout, ll_signals
from tpkernels.symm.device import EPOCH, LAST_EPOCH, DeviceWorkspace

COUNTS = (0, 1, 7, 64, 65, 1000, 9001)
VARIANTS = ("two_shot", "ll", "ll_two_shot")
SIGNALS = ll_signals(1 << 12)


# 9 ranks exceed the sources that are polled together.
@pytest.mark.parametrize("world", sweep((3, 9, 1, 2)))
@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks()
def test_sums_match_the_host_bitwise(variant: str) -> None:
    """Run all dtypes, counts, alignments and epilogues, some in place.

    The workspace has exactly the size of the largest call.
    """
    sizes = max(COUNTS), dist.get_world_size(), 4
    layouts = [all_reduce_layout(variant, *sizes, out) for out in (4, 2)]
    signals, nbytes = (max(getattr(cut, name) for cut in layouts) for name in ("signals", "nbytes"))
    workspace = make_workspace(signals=signals, buffer_bytes=nbytes)
    rank, world, wrong = workspace.rank, workspace.world, []
    cases = itertools.product(COUNTS, DTYPES, (F32, BF16), (None, F16), (0, 1))
    for number, (count, dtype, out_dtype, residual_dtype, offset) in enumerate(cases):
        xs = [random(count, dtype, 100 * number + r, offset) for r in range(world)]
        bias = random(count, DTYPES[number % 3], 7) if number % 2 else None
        residual = None if residual_dtype is None else random(count, residual_dtype, 9, offset)
        in_place = dtype == out_dtype and number // 2 % 2
        out = (
            xs[rank].clone() if in_place else torch.empty(count + offset, dtype=out_dtype)[offset:]
        )
        all_reduce(
            workspace,
            number + 1,
            out if in_place else xs[rank],
            out,
            bias,
            residual,
            variant=variant,
        )
        if not same_bits(out, host_sum(xs, out_dtype, bias, residual)):
            wrong.append(f"{count} {dtype} {out_dtype} {residual_dtype} {offset}")
    require_no_failures(wrong, workspace)


def uneven_sizes(workspace: DeviceWorkspace, rows: int) -> tuple[int, ...]:
    """Return uneven shard sizes, with an empty shard among three."""
    return tuple(rows * (r % 3) + (r % 2) for r in range(workspace.world))


def gather(
    workspace: DeviceWorkspace, signature: int, row: int, dtype: torch.dtype, variant: str
) -> bool:
    sizes = uneven_sizes(workspace, 3)
    xs = [random(n * row, dtype, 50 + r).view(n, row) for r, n in enumerate(sizes)]
    out = torch.full((sum(sizes), row), 77, dtype=dtype)
    x = xs[workspace.rank]
    cuda.prepare_all_gather(x, out, sizes, variant).bind(workspace, signature)(x, out)
    return same_bits(out, torch.cat(xs))


def scatter(
    workspace: DeviceWorkspace,
    signature: int,
    row: int,
    dtype: torch.dtype,
    variant: str,
    epilogue: bool = False,
) -> bool:
    sizes, rank = uneven_sizes(workspace, 3), workspace.rank
    begin = sum(sizes[:rank])
    xs = [random(sum(sizes) * row, dtype, 60 + r).view(-1, row) for r in range(workspace.world)]
    bias = random(row, F32, 7) if epilogue else None
    residual = random(sizes[rank] * row, BF16, 8 + rank).view(-1, row) if epilogue else None
    out = torch.empty(sizes[rank], row, dtype=dtype)
    prepared = cuda.prepare_reduce_scatter(xs[rank], out, sizes, bias, residual, variant)
    prepared.bind(workspace, signature)(xs[rank], out, bias, residual)
    shards = [x[begin : begin + sizes[rank]].contiguous() for x in xs]
    return same_bits(out, host_sum(shards, dtype, bias, residual))


@pytest.mark.parametrize("world", sweep([3, 1, 4]))
@on_ranks()
def test_shards() -> None:
    workspace, wrong = make_workspace(signals=SIGNALS), []
    cases = itertools.product((1, 5, 8, 64), DTYPES, ("ll", "one_shot"))
    for number, (row, dtype, variant) in enumerate(cases):
        for kind, right in (
            ("gather", gather(workspace, 3 * number + 1, row, dtype, variant)),
            ("scatter", scatter(workspace, 3 * number + 2, row, dtype, variant)),
            ("epilogue", scatter(workspace, 3 * number + 3, row, dtype, variant, epilogue=True)),
        ):
            if not right:
                wrong.append(f"{kind} {row} {dtype} {variant}")
    require_no_failures(wrong, workspace)


@pytest.mark.parametrize("world", sweep([2, 3]))
@on_ranks()
def test_several_blocks() -> None:
    """Run calls of several blocks, two at a time."""
    wrong, workspace = [], make_workspace(signals=1 << 14)
    sums = [random(20_000, BF16, r) for r in range(workspace.world)]
    for variant in VARIANTS[1:]:  # their sums use twice the lines
        all_reduce(workspace, 1, sums[workspace.rank], out := torch.empty(20_000), variant=variant)
        if not same_bits(out, host_sum(sums, F32)):
            wrong.append(f"{variant} in blocks")
    if not (gather(workspace, 2, 2000, F32, "ll") and scatter(workspace, 3, 2000, F32, "ll")):
        wrong.append("shards in blocks")
    require_no_failures(wrong, workspace)


def count_wrong_calls(delay_us: int, previous_epoch: int = 0, **broken: bool) -> tuple[int, bool]:
    """Run consecutive calls of all kinds under random delays.

    All 4-byte words of the data look like signals of the call after the next.

    Args:
        previous_epoch: last epoch before the calls.

    Returns:
        The number of wrong calls on all ranks, and the result of `has_stale_signals`.
    """
    workspace, wrong = make_workspace(signals=SIGNALS), 0
    workspace.state[EPOCH] = previous_epoch
    dist.barrier()
    workspace.set_chaos(seed=workspace.rank, max_delay_us=delay_us, **broken)
    variants = (
        "ll",
        "ll_two_shot",
        "ll_two_shot",
        "ll",
        "two_shot",
        "two_shot",
        "shards",
        "shards",
    )
    # Two-shot is correct in any case: its signals also confirm that its buffers have been read.
    if broken:
        variants = ("shards",) * 8
    for call in range(40):
        variant = variants[call % 8]
        if variant == "shards":
            shards = (gather, scatter)[call // 8 % 2]
            variant = "one_shot" if broken else ("one_shot", "ll")[call // 16 % 2]
            wrong += not shards(workspace, call + 1, 5 + call, F32, variant)
            continue
        after_next = int(workspace.state[EPOCH]) + 3 if previous_epoch == 0 else call
        count = 200 + 37 * (call % 5)
        x = torch.full((count,), after_next, dtype=torch.int32).view(F32)  # denormal
        out = x if call % 3 == 0 else torch.empty_like(x)
        all_reduce(workspace, call + 1, x, out, variant=variant)
        wrong += not bool((out.view(torch.int32) == after_next * workspace.world).all())
    return sum_over_ranks(wrong + (workspace.failure() is not None)), has_stale_signals(workspace)


def has_stale_signals(workspace: DeviceWorkspace) -> bool:
    """Return True if signals from before a wraparound remain. Their epoch is above the current."""
    region = torch.frombuffer(workspace._memory[workspace.rank], dtype=torch.int64)
    epochs = region[: 2 * workspace.world * workspace.signals] & 0xFFFF_FFFF
    return bool((epochs > int(workspace.state[EPOCH])).any())


@pytest.mark.parametrize("world", sweep([4, 2, 3]))
@on_ranks()
def test_call_after_call_under_delays() -> None:
    assert count_wrong_calls(300)[0] == 0


@pytest.mark.parametrize("world", sweep([2, 3]))
@on_ranks()
def test_epoch_wraparound() -> None:
    """Continue past the last epoch. No signal of an earlier epoch remains."""
    assert count_wrong_calls(50, previous_epoch=LAST_EPOCH - 11) == (0, False)


@pytest.mark.parametrize("breakage", ["single_buffer", "skip_waits"])
@on_ranks(4)
def test_broken_protocol_is_detected(breakage: str) -> None:
    """Negative control of the tests above."""
    assert any(count_wrong_calls(1000, **{breakage: True})[0] for _ in range(10))


@pytest.mark.parametrize("how", TEARINGS)
@on_ranks(2)
def test_torn_lines_are_not_read(how: str) -> None:
    """Store the two words of a line separately while other ranks run.

    Negative controls: one flag per 16 bytes, and 8-byte words that are stored in halves.
    """
    workspace, wrong = make_workspace(signals=SIGNALS), 0
    with configure_driver(tearing=TEARINGS.index(how)):
        for call in range(150):
            x = torch.arange(64).add(call + 2 * workspace.rank).to(F32)
            out = torch.empty_like(x)
            all_reduce(workspace, call + 1, x, out, variant=("ll", "ll_two_shot")[call % 2])
            xs = [torch.arange(64).add(call + 2 * r) for r in range(workspace.world)]
            wrong += not torch.equal(out, torch.stack(xs).sum(0).to(F32))
    wrong = sum_over_ranks(wrong + (workspace.failure() is not None))
    assert (wrong > 0) == (how != TEARINGS[0]), wrong


def test_auto_variant() -> None:
    for nbytes, world, variant in (
        (25_714, 8, "ll"),
        (25_716, 8, "ll_two_shot"),
        (524_288, 2, "ll"),
        (524_288, 8, "ll_two_shot"),
        (524_290, 2, "two_shot"),
    ):
        x = torch.empty(nbytes // 2, dtype=BF16)
        needs = cuda.prepare_all_reduce(world, x, x)
        expected = all_reduce_layout(variant, x.numel(), world, 2, 2)
        assert (needs.signals, needs.buffer_bytes) == (expected.signals, expected.nbytes)
    for rows, small in ((64, True), (65, False)):  # 128 KiB and one row more
        shard, full = torch.empty(rows, 512, dtype=BF16), torch.empty(64 + rows, 512, dtype=BF16)
        gathers = cuda.prepare_all_gather(shard, full, (64, rows))
        scatters = cuda.prepare_reduce_scatter(full, shard, (64, rows))
        assert (gathers.buffer_bytes == 0) == (scatters.buffer_bytes == 0) == small
    with pytest.raises(ValueError, match="variant is 'ring'; it must be auto, one_shot or ll"):
        cuda.prepare_all_gather(shard, full, (64, 65), "ring")
    # 512 KiB on 8 ranks: twice the data, two-shot
    assert all_reduce_layout("ll_two_shot", 1 << 18, 8, 2, 2).signals == 2 + 2 * 4096 * 4


@on_ranks(4)
def test_sequential_operations_of_a_call() -> None:
    """Count barriers, releases and atomics in blocks with one thread per peer.

    A release waits until the stores before it arrive, a round trip.
    """
    workspace, counters = make_workspace(signals=1 << 14), {}
    x, sizes = torch.ones(128), (128,) * workspace.world
    column, columns = x.view(-1, 1), torch.empty(128 * workspace.world, 1)
    with configure_driver(threads=8):
        for variant in VARIANTS:
            all_reduce(workspace, 1, x, x, variant=variant)
            counters[f"all_reduce {variant}"] = launch_counters()
        for variant in ("one_shot", "ll"):
            cuda.prepare_all_gather(column, columns, sizes, variant).bind(workspace, 2)(
                column, columns
            )
            counters[f"all_gather {variant}"] = launch_counters()
            prepared = cuda.prepare_reduce_scatter(columns, column, sizes, variant=variant)
            prepared.bind(workspace, 3)(columns, column)
            counters[f"reduce_scatter {variant}"] = launch_counters()
        all_reduce(workspace, 4, (x := torch.ones(4096)), x, variant="ll")
        counters["all_reduce in 2 blocks"] = launch_counters()
    low = {f"{op} ll": (2, 0, 0) for op in ("all_reduce", "all_gather", "reduce_scatter")}
    assert counters == low | {
        "all_reduce two_shot": (8 + workspace.world - 1, 3, 0),
        "all_reduce ll_two_shot": (2, 0, 0),
        "all_gather one_shot": (5 + workspace.world - 1, 2, 0),
        "reduce_scatter one_shot": (6, 2, 0),
        "all_reduce in 2 blocks": (2, 0, 1),
    }, counters


@pytest.mark.parametrize(
    ("world", "skips"), sweep([(3, False), (3, True), (1, False), (2, False)], count=2)
)
@on_ranks()
def test_copies_ordered_by_signals(skips: bool) -> None:
    """Send a different chunk to each peer, with equal addresses in every call.

    All-reduces run between the calls. Negative control: no rank waits.
    """
    workspace = make_workspace()
    workspace.set_chaos(seed=workspace.rank, max_delay_us=1000, skip_waits=skips)
    rank, world, wrong = workspace.rank, workspace.world, 0
    for call in range(20):
        with cuda.CopyCall(workspace, call + 1) as copies:
            for i in range(1, world):
                dst = (rank + i) % world
                copies.put(torch.full((100,), 100 * call + 10 * rank + dst), 800 * dst)
                copies.publish(1 + dst, dst)
            for i in range(1, world):
                source = (rank + i) % world
                chunk = torch.empty(100, dtype=torch.int64)
                copies.fetch(source, 1 + rank, chunk, 800 * rank)
                wrong += not bool((chunk == 100 * call + 10 * source + rank).all())
        # The all-reduce stores to the bytes of the copies without waiting for peers first.
        out = torch.full((600,), call + rank, dtype=F32)
        all_reduce(workspace, 1000 + call, out, out, variant="two_shot")
        wrong += not bool((out == world * call + sum(range(world))).all())
    wrong = sum_over_ranks(wrong + (workspace.failure() is not None))
    assert (wrong > 0) == skips, wrong


@on_ranks(3)
def test_a_barrier_waits_for_every_rank() -> None:
    workspace = make_workspace()
    for late in range(workspace.world):
        dist.barrier()
        begin = time.monotonic()
        if workspace.rank == late:
            time.sleep(0.1)
        cuda.barrier(workspace, late + 1)
        assert time.monotonic() - begin >= 0.09
