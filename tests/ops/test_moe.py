"""``moe_dispatch`` and ``moe_combine`` on real ranks, against a loop over tokens in float64."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import DTYPES, QUICK_WORLDS, RanksFixture, uneven_splits
from tests.support.cuda_rehearsal import cuda_code_path
from tests.support.faults import get_workspace
from tests.support.ranked import (
    SMALLEST_WORKSPACE,
    collect_messages,
    fresh_group,
    on_ranks,
    report_cases,
)
from tpkernels import shard_sizes
from tpkernels.common.dtypes import accumulator

ALGORITHMS = ("auto", "unfused", "direct")
Router = Callable[[int, int, int, torch.Generator], torch.Tensor]


def any_experts(tokens: int, k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Route at random. A token may use an expert several times, and some experts get no tokens."""
    return torch.randint(experts, (tokens, k), generator=generator)


def one_expert(tokens: int, k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    return torch.full((tokens, k), experts - 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer in which expert e multiplies by e + 1.

    ``sizes``: tokens of each rank. By default every rank has 5 tokens.
    """

    sizes: tuple[int, ...] | None = None
    width: int = 37
    experts: int = 8
    k: int = 2
    dtype: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    algorithm: str = "auto"
    integers: bool = True
    route: Router = any_experts
    strided: bool = False
    max_rows: int | None = None


def make_rank_inputs(case: Case, rank: int, world: int) -> tuple[torch.Tensor, ...]:
    """Return x, topk_ids, topk_weights and the output gradient of a rank. With integers, all
    results are exact in bf16."""
    sizes, generator = case.sizes or (5,) * world, torch.Generator().manual_seed(rank)
    shape = (sizes[rank], case.width)
    ids = case.route(sizes[rank], case.k, case.experts, generator)
    if not case.integers:
        x, grad = (torch.randn(shape, generator=generator).to(case.dtype) for _ in range(2))
        return x, ids, torch.rand(sizes[rank], case.k, generator=generator), grad
    x, grad = (torch.randint(-1, 2, shape, generator=generator).to(case.dtype) for _ in range(2))
    return x, ids, torch.randint(1, 3, (sizes[rank], case.k), generator=generator).float(), grad


def failure(case: Case, group: dist.ProcessGroup) -> str | None:
    """Describe wrong rows, a wrong result or a wrong gradient, or return None."""
    rank, world = group.rank(), group.size()
    inputs = [make_rank_inputs(case, peer, world) for peer in range(world)]
    x, ids, weights, grad = inputs[rank]
    weights = weights.to(accumulator(case.dtype))
    if case.strided:
        contiguous = torch.contiguous_format  # the default would keep the strides
        x, ids, weights = (t.t().clone(memory_format=contiguous).t() for t in (x, ids, weights))
    x, weights = x.detach().requires_grad_(), weights.requires_grad_()

    def layer() -> tuple[torch.Tensor, ...]:
        args = x, ids.to(case.ids), weights, case.experts, group
        options = {"shard_sizes": case.sizes, "max_rows": case.max_rows}
        rows, counts, handle = tpkernels.moe_dispatch(*args, **options, algorithm=case.algorithm)
        first = sum(shard_sizes(case.experts, world)[:rank])
        factors = torch.arange(first + 1, first + 1 + len(counts)).repeat_interleave(counts)
        factors = torch.nn.functional.pad(factors, (0, len(rows) - len(factors)), value=7)
        expert_outputs = rows * factors[:, None].to(case.dtype)
        return rows, counts, tpkernels.moe_combine(expert_outputs, handle, algorithm=case.algorithm)

    rows, counts, y = layer()
    all_x, all_ids = (torch.cat([tensors[i] for tensors in inputs]) for i in (0, 1))
    order = all_ids.flatten().argsort(stable=True)
    experts_per_rank = shard_sizes(case.experts, world)
    all_counts = all_ids.flatten().bincount(minlength=case.experts)
    local = slice(*(int(all_counts[: sum(experts_per_rank[:r])].sum()) for r in (rank, rank + 1)))
    expected_rows = all_x[order[local] // case.k]
    if case.max_rows is not None:
        padding = (0, 0, 0, case.max_rows - len(expected_rows))
        expected_rows = torch.nn.functional.pad(expected_rows, padding)
    if not torch.equal(rows, expected_rows):
        return f"{case} on rank {rank}: other rows"
    if not torch.equal(counts, all_counts.split(experts_per_rank)[rank]):
        return f"{case} on rank {rank}: counts {counts.tolist()}"
    if not torch.equal(layer()[2], y):
        return f"{case} on rank {rank}: another result the second time"
    factors = (ids + 1)[..., None].double() * weights.detach()[..., None].double()
    exact = (factors * x.detach()[:, None].double()).sum(1)
    grads = torch.autograd.grad(y, (x, weights), grad)
    all_expected = [
        exact,
        (factors * grad[:, None].double()).sum(1),
        (ids + 1) * (x.detach().double() * grad.double()).sum(1, keepdim=True),
    ]
    for name, result, expected in zip(
        ("y", "grad_x", "grad_weights"), (y, *grads), all_expected, strict=True
    ):
        error = (result.double() - expected).abs()
        eps = torch.finfo(case.dtype).eps * (case.experts + case.width) * 4
        if (error > (0 if case.integers else eps)).any() or result.shape != expected.shape:
            return f"{case} on rank {rank}: {name} is {result.tolist()}, not {expected.tolist()}"
    return None


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    combinations = itertools.product(
        (*DTYPES, torch.float64), ALGORITHMS, (torch.int32, torch.int64), (False, True)
    )
    cases = [Case(dtype=d, algorithm=a, ids=i, integers=b) for d, a, i, b in combinations]
    report_cases(ranks(world), failure, cases)


def shapes(world: int) -> Iterator[Case]:
    for experts, k in itertools.product((1, 3, 8, 64), (1, 2, 8)):
        yield Case(experts=experts, k=k)
        max_rows = 5 * world * k  # capacity for all assignments
        yield Case(experts=experts, k=k, max_rows=max_rows + experts)
        single_expert = Case(experts=experts, k=k, route=one_expert, width=64, dtype=torch.bfloat16)
        yield from (single_expert, replace(single_expert, max_rows=max_rows))
    for sizes in [*uneven_splits(7, world), (0,) * world]:
        yield Case(sizes=tuple(sizes), strided=True)
        yield Case(sizes=tuple(sizes), width=1, experts=2, k=1, strided=True)


def test_experts_and_tokens_of_any_number(ranks: RanksFixture, world: int) -> None:
    """Fewer experts than ranks, experts without tokens, all tokens on one expert, and ranks without
    tokens."""
    cases = [replace(c, algorithm=a) for c in shapes(world) for a in ALGORITHMS[1:]]
    report_cases(ranks(world), failure, cases)


@pytest.mark.thorough
def test_chunks_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Several chunks (csrc/host/collectives.cpp), and rows wider than a chunk, which use a
    different code path."""
    *_, sizes = uneven_splits(301, world)
    cases = [Case(sizes=sizes, width=width, k=3) for width in (100, 1000, 9000)]
    report_cases(ranks(world), failure, cases, workspace_bytes=SMALLEST_WORKSPACE)
    direct = Case(sizes=sizes, width=1000, k=8, algorithm="direct")
    report_cases(ranks(world), failure, [direct])


@on_ranks(2)
def test_code_path_of_cuda_tensors() -> None:
    """Dispatch with int32 and int64 ids. The gathers of CUDA tensors do not support integers."""
    with cuda_code_path(), fresh_group() as group:
        cases = [Case(ids=ids, sizes=(3, 0)) for ids in (torch.int32, torch.int64)]
        assert [failure(case, group) for case in cases] == [None, None]


@pytest.mark.thorough
def test_without_shared_memory(ranks: RanksFixture, world: int) -> None:
    cases = [Case(), Case(sizes=tuple(next(iter(uneven_splits(7, world)))), dtype=torch.bfloat16)]
    report_cases(ranks(world), failure, cases, hosts=True)


def bits_job(world: int, width: int = 100) -> torch.Tensor:
    """Return the results of 12 random tokens, which the ranks share. All algorithms must agree."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    x = torch.randn(12, width, generator=generator)
    ids = torch.randint(8, (12, 4), generator=generator)
    weights = torch.rand(12, 4, generator=generator)
    results = []
    with fresh_group() as group:
        for algorithm in ALGORITHMS:
            local = (tensor.split(12 // world)[rank] for tensor in (x, ids, weights))
            rows, _, handle = tpkernels.moe_dispatch(*local, 8, group, algorithm=algorithm)
            y = tpkernels.moe_combine(rows.cos(), handle, algorithm=algorithm)
            results.append(tpkernels.all_gather(y, group))
    assert all(torch.equal(results[0], result) for result in results)
    return results[0]


def test_results_do_not_depend_on_the_world_size(ranks: RanksFixture) -> None:
    single, *results = (ranks(world).run(bits_job, world)[0] for world in (1, 2, 3))
    assert all(torch.equal(single, result) for result in results)


def delayed_job(algorithm: str = "auto", **broken: bool) -> int:
    """Return the number of calls with wrong results, with delays before signals and waits."""
    (rank, world), wrong, ops = (dist.get_rank(), dist.get_world_size()), 0, torch.ops.tpkernels
    with fresh_group() as group:
        for call in range(21):
            generator = torch.Generator().manual_seed(call)
            routes = torch.randint(8, (world * 6, 2), generator=generator)
            x = torch.full((6, 64), float(call * (rank + 1)))
            options = routes, 8, group.group_name
            rows, _ = ops.moe_dispatch(x, *options, algorithm=algorithm)
            y = ops.moe_combine(rows + 1, torch.ones(6, 2), *options, algorithm=algorithm)
            order = routes.flatten().argsort(stable=True)
            first = int((routes < sum(shard_sizes(8, world)[:rank])).sum())
            source = order[first : first + len(rows)] // 2 // 6 + 1.0
            wrong += not (torch.equal(rows[:, 0], call * source) and torch.equal(y, 2 * x + 2))
            if call == 0:  # the first call has set up the group
                get_workspace(group).set_chaos(seed=rank + 1, max_delay_us=1000, **broken)
        dist.barrier()  # a rank that skips waits may be ahead, and must not end the group yet
    return wrong


@pytest.mark.parametrize("broken", [{}, {"single_buffer": True}], ids=str)
def test_delays_and_a_negative_control(ranks: RanksFixture, broken: dict[str, bool]) -> None:
    tries = range(10 if broken else 1)  # failures depend on timing
    wrong = (sum(ranks(3).run(delayed_job, timeout=60, **broken)) for _ in tries)
    assert any(wrong) == bool(broken)


@on_ranks(3)
def test_peers_read_a_symmetric_tensor_in_place() -> None:
    """Each rank overwrites the tensor as soon as its call returns."""
    rank, routes = dist.get_rank(), torch.arange(18).view(9, 2) % 3
    with fresh_group() as group:
        x = tpkernels.empty(3, 50, group=group)
        x.fill_(0)
        torch.ops.tpkernels.moe_dispatch(x, routes, 3, group.group_name)
        get_workspace(group).set_chaos(seed=rank + 1, max_delay_us=2000)
        for call in range(1, 11):
            x.copy_((torch.arange(3) + 3 * rank + 9 * call)[:, None].expand(3, 50))
            rows, _ = torch.ops.tpkernels.moe_dispatch(x, routes, 3, group.group_name)
            x.fill_(-1)
            expected = 9 * call + (routes == rank).nonzero()[:, 0]
            assert torch.equal(rows, expected[:, None].expand(6, 50).float()), (call, rows[:, 0])


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """fp8 rows of random bytes, with ``scales`` scales per row."""

    scales: int
    dtype: torch.dtype = torch.float8_e4m3fn
    algorithm: str = "auto"
    max_rows: int | None = None


def scaled_failure(case: Scaled, group: dist.ProcessGroup) -> str | None:
    """Describe an error in the bits or the order of the rows or their scales, or return None."""
    (rank, world), generator = (group.rank(), group.size()), torch.Generator().manual_seed(0)
    tokens, columns = 4 * world, 128 * max(2, case.scales)
    data = torch.randint(256, (tokens, columns), generator=generator, dtype=torch.uint8)
    bits = torch.randint(-(2**31), 2**31, (tokens, case.scales), generator=generator)
    bits, ids = bits.int(), torch.randint(5, (tokens, 2), generator=generator)
    local = slice(4 * rank, 4 * rank + 4)
    args = data[local].view(case.dtype), ids[local], torch.ones(4, 2), 5, group
    scale_x, options = bits[local].view(torch.float32), {"max_rows": case.max_rows}
    rows, counts, handle = tpkernels.moe_dispatch(
        *args, scale_x=scale_x, algorithm=case.algorithm, **options
    )
    first = sum(shard_sizes(5, world)[:rank])
    order = ids.flatten().argsort(stable=True) // 2
    begin = int((ids < first).sum())
    source, scales = order[begin : begin + int(counts.sum())], handle.scales
    assert scales is not None and rows.dtype == case.dtype and len(rows) == len(scales)
    results = rows.view(torch.uint8), scales.view(torch.int32)
    right = all(
        torch.equal(result[: len(source)], expected[source]) and not result[len(source) :].any()
        for result, expected in zip(results, (data, bits), strict=True)
    )
    if not right or (case.max_rows or len(source)) != len(rows):
        return f"{case} on rank {rank}: other rows or scales"
    return None


def test_scales_follow_their_rows(ranks: RanksFixture, world: int) -> None:
    cases = [
        Scaled(scales=scales, algorithm=a, max_rows=max_rows)
        for scales in (1, 2, 3)
        for a in ALGORITHMS
        for max_rows in (None, 8 * world)
    ]
    cases += [Scaled(scales=1, dtype=torch.float8_e5m2)]
    report_cases(ranks(world), scaled_failure, cases)


@on_ranks(2)
def test_fp8_experts() -> None:
    """Dispatch in fp8, multiply and combine, eager and compiled, against float64."""
    torch.manual_seed(0)
    rank, ids, weights = dist.get_rank(), torch.randint(4, (6, 2)), torch.rand(6, 2)
    x, w = torch.randn(6, 256), torch.randn(4, 256, 40)
    scale_w = torch.rand(4, 2, 1)
    with fresh_group() as group:
        local = slice(3 * rank, 3 * rank + 3)
        blocks = x[local].view(3, 2, 128)
        scale_x = blocks.abs().amax(2) / 448
        x8 = (blocks / scale_x[..., None]).view(3, 256).to(torch.float8_e4m3fn)
        w8 = w.to(torch.float8_e4m3fn)[2 * rank : 2 * rank + 2]

        def layer(x8: torch.Tensor, scale_x: torch.Tensor) -> torch.Tensor:
            rows, counts, handle = tpkernels.moe_dispatch(
                x8, ids[local], weights[local], 4, group, scale_x=scale_x
            )
            assert handle.scales is not None
            outputs = tpkernels.scaled_grouped_matmul(
                rows, w8, handle.scales, scale_w[2 * rank : 2 * rank + 2], counts
            )
            return tpkernels.moe_combine(outputs, handle)

        y = layer(x8, scale_x)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x8, scale_x), y)
        fp64_x = x8.double() * scale_x.double().repeat_interleave(128, 1)
        fp64_w = w.to(torch.float8_e4m3fn).double() * scale_w.double().repeat_interleave(128, 1)
        outputs = torch.einsum("tk,tjkn->tjn", fp64_x, fp64_w[ids[local]])
        terms = outputs * weights[local][..., None].double()
        bound = torch.finfo(torch.bfloat16).eps * (terms.abs().sum(1) + 1e-3)
        assert ((y.double() - terms.sum(1)).abs() <= bound).all()


@on_ranks(2)
def test_refusals_of_scales() -> None:
    """Wrong scales are refused before any data is sent, and so are different dtypes of scaled rows
    on the ranks."""
    x, ids = torch.ones(3, 256).to(torch.float8_e4m3fn), torch.ones(3, 2, dtype=torch.int64)
    weights, good = torch.ones(3, 2), torch.ones(3, 1)
    with fresh_group() as group:

        def attempt(x: torch.Tensor, scale: torch.Tensor | None) -> Callable[[], object]:
            return lambda: tpkernels.moe_dispatch(x, ids, weights, 8, group, scale_x=scale)

        different = x if dist.get_rank() == 0 else x.float().to(torch.float8_e5m2)
        calls = [
            attempt(x, torch.ones(3, 3)),
            attempt(x, torch.ones(2, 1)),
            attempt(x[:, 1:], torch.ones(3, 2)),
            attempt(x, good.double()),
            attempt(x.float(), good),
            attempt(x, None),
            attempt(x, good.clone().requires_grad_()),
            attempt(x, good),
            attempt(different, good),
        ]
        patterns = [
            r"ValueError: scale_x has shape \[3, 3\]; it must be \[3, 1\] or \[3, 2\]",
            r"ValueError: scale_x has shape \[2, 1\]; it must be \[3, 1\] or \[3, 2\]",
            r"ValueError: scale_x has shape \[3, 2\]; it must be \[3, 1\]$",
            r"TypeError: scale_x is float64; it must be float32",
            r"NotImplementedError: x with scales has dtype float32; supported: float8_e4m3fn",
            r"NotImplementedError: x has dtype float8_e4m3fn; supported",
            r"NotImplementedError: moe_dispatch has no gradient with scale_x; call it under",
            r"nothing",
            r"CollectiveMismatchError",
        ]
        for message, pattern in zip(collect_messages(calls), patterns, strict=True):
            assert re.match(pattern, message), message


@pytest.mark.parametrize("difference", ["tokens", "dtype"])
@on_ranks(2)
def test_ids_that_differ_between_ranks_are_a_mismatch(difference: str) -> None:
    """The ids differ in number, or are int32 and int64 of equal size in bytes."""
    ids = torch.ones(6, 2, dtype=torch.int32)
    if dist.get_rank() == 1:
        ids = ids[:5] if difference == "tokens" else ids[:, :1].long()
    x, weights = torch.ones(len(ids), 8), torch.ones(ids.shape)
    with fresh_group() as group:
        (message,) = collect_messages([lambda: tpkernels.moe_dispatch(x, ids, weights, 4, group)])
    assert message.startswith("CollectiveMismatchError: "), message
    assert "pass shard_sizes with the tokens of each rank" in message


REFUSED = [
    r"RoutingError: topk_ids of rank 1 contains expert 8 at \[2, 1\], which is out of range; "
    r"expected 0 to 7",
    r"RoutingError: topk_ids of rank 1 contains expert -1 at \[2, 1\], which is out of range; "
    r"expected 0 to 7",
    r"ValueError: topk_ids has shape \[3, 2\] and topk_weights has shape \[3, 1\]; both must be",
    r"ValueError: x has shape \[2, 4\], but topk_ids has 3 tokens; x must have one row per token",
    r"ValueError: x has shape \[\], but topk_ids has 3 tokens",
    r"ValueError: topk_ids has shape \[3, 0\] .*; both must be \[tokens, k\] with k >= 1",
    r"TypeError: topk_weights is int64; it must be floating-point",
    r"ValueError: topk_weights is on meta but x is on cpu",
    r"TypeError: topk_ids is int16; it must be int32 or int64",
    r"NotImplementedError: x has dtype int64; supported",
    r"ValueError: num_experts is 0; it must be at least 1",
    r"ValueError: x has shape \[3, 4, 1\]; it must be \[rows, H\]",
    r"ValueError: routes is float32 of shape \[6, 2\]; it must be int32 or int64",
    r"ValueError: routes has 4 tokens, but the ranks have 6 in total \(\[3, 3\] per rank\)",
    r"ValueError: topk_weights has shape \[3, 1\], but routes has 2 experts per token",
    r"RoutingError: 12 \(token, expert\) assignments go to the experts of rank 0, but max_rows is "
    r"11; 12 \(tokens x top_k\) is always enough",
    r"RoutingError: 12 \(token, expert\) assignments go to the experts of rank 0, but max_rows is "
    r"11; 12 \(tokens x top_k\) is always enough",
    r"ValueError: max_rows is 0; it must be at least 1",
    r"NotImplementedError: algorithm 'ring' of moe_dispatch does not support moe_dispatch on cpu",
    r"ValueError: x has 1 rows, but \d+ \(token, expert\) assignments go to the experts of this "
    r"rank|PeerLostError: .*left",
]


@on_ranks(2)
def test_refusals() -> None:
    """An expert id out of range on one rank raises on all ranks. The group remains usable after
    that, and after every failed argument check."""
    x, ids, weights = torch.ones(3, 4), torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2)
    above, below = ids.clone(), ids.clone()
    if dist.get_rank() == 1:
        above[2, 1], below[2, 1] = 8, -1
    ops, routes = torch.ops.tpkernels, torch.ones(6, 2, dtype=torch.int32)
    with fresh_group() as group:
        name, dispatch = group.group_name, tpkernels.moe_dispatch
        calls = [
            lambda: dispatch(x, above, weights, 8, group),
            lambda: dispatch(x, below, weights, 8, group, algorithm="unfused"),
            lambda: dispatch(x, ids, weights[:, :1], 8, group),
            lambda: dispatch(x[:2], ids, weights, 8, group),
            lambda: dispatch(x[0, 0], ids, weights, 8, group),
            lambda: dispatch(x, ids[:, :0], weights[:, :0], 8, group),
            lambda: dispatch(x, ids, ids, 8, group),
            lambda: dispatch(x, ids, weights.to("meta"), 8, group),
            lambda: dispatch(x, ids.short(), weights, 8, group),
            lambda: dispatch(x.long(), ids, weights, 8, group),
            lambda: dispatch(x, ids, weights, 0, group),
            lambda: dispatch(x[..., None], ids, weights, 8, group),
            lambda: ops.moe_dispatch(x, routes.float(), 8, name),
            lambda: ops.moe_dispatch(x, routes[:4], 8, name),
            lambda: ops.moe_combine(x, weights[:, :1], routes, 8, name),
            lambda: dispatch(x, ids, weights, 8, group, max_rows=11),
            lambda: dispatch(x, ids, weights, 8, group, max_rows=11, algorithm="unfused"),
            lambda: dispatch(x, ids, weights, 8, group, max_rows=0),
            lambda: dispatch(x, ids, weights, 8, group, algorithm="ring"),
        ]
        messages = collect_messages(calls)
        assert failure(Case(), group) is None
        handle = dispatch(x, ids, weights, 8, group)[2]
        messages += collect_messages([lambda: tpkernels.moe_combine(x[:1], handle)])
        for message, pattern in zip(messages, REFUSED, strict=True):
            assert re.match(pattern, message), message


@on_ranks(2)
def test_calls_with_different_rows_share_a_plan() -> None:
    with fresh_group() as group:
        plan_counts = []
        for seed in range(4):
            ids = torch.randint(8, (5, 2), generator=torch.Generator().manual_seed(seed))
            rows, _, handle = tpkernels.moe_dispatch(
                torch.ones(5, 3), ids, torch.ones(5, 2), 8, group
            )
            tpkernels.moe_combine(rows, handle)
            plan_counts.append(len(tpkernels.groups.get(group.group_name).planned_calls()))
        assert plan_counts == [3] * 4  # includes the gather of the ids


@on_ranks(2)
def test_opcheck_and_compile() -> None:
    """With dynamic output shapes enabled, a dispatch does not break the graph."""
    x, ids, weights, _ = make_rank_inputs(Case(integers=False), dist.get_rank(), 2)
    with fresh_group() as group:
        routes, name = tpkernels.all_gather(ids, group), group.group_name
        ops, tests = torch.ops.tpkernels, ("test_schema", "test_autograd_registration")
        leaf = x.clone().requires_grad_()
        torch.library.opcheck(ops.moe_dispatch.default, (leaf, routes, 8, name), test_utils=tests)

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, _, handle = tpkernels.moe_dispatch(x, ids, weights, 8, group)
            return tpkernels.moe_combine(rows.cos(), handle)

        eager = layer(x, weights)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x, weights), eager)

        def static_layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows, _, handle = tpkernels.moe_dispatch(x, ids, weights, 8, group, max_rows=20)
            return tpkernels.moe_combine(rows.view(20, -1).cos(), handle)

        compiled = torch.compile(static_layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, weights), eager)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        metafunc.parametrize("world", QUICK_WORLDS)
