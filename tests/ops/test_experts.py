"""Products with experts on the ranks, split by width and whole, beside a loop over tokens in
float64."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.ops.test_moe import Router, any_experts, one_expert
from tests.support.cases import DTYPES, QUICK_WORLDS, RanksFixture
from tests.support.faults import workspace_of
from tests.support.ranked import fresh_group, messages_of, on_ranks, report_cases
from tests.support.tiers import thorough
from tpkernels import shard_sizes
from tpkernels.dtypes import accumulator
from tpkernels.ops.experts import route

K, WIDTH, N, TOP = 8, 6, 5, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Experts of two products. ``spare``: how many tokens the last rank has less than 4.
    ``max_rows``: beyond those of all routes."""

    whole: bool
    experts: int = 4
    spare: int = 1
    dtype: torch.dtype = torch.float32
    integers: bool = True
    route: Router = any_experts
    packed: bool = False
    algorithm: str = "auto"
    max_rows: int | None = None
    bias: bool = False

    def numbers(self, *shape: int) -> torch.Tensor:
        if self.integers:
            return torch.randint(-1, 2, shape).to(self.dtype)
        return torch.randn(shape).to(self.dtype)


def layer(
    case: Case, group: dist.ProcessGroup, x: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    weights, up, down = rest
    sizes = [4] * (group.size() - 1) + [4 - case.spare]
    strided = (torch.stack([w.sum(1)] * 2, 2)[..., 0] for w in (up, down))
    biases = list(strided) if case.bias else [None, None]
    if case.whole:
        most = None if case.max_rows is None else sum(sizes) * TOP + case.max_rows
        options: dict[str, Any] = {"shard_sizes": sizes, "max_rows": most}
        inner, counts, handle = tpkernels.dispatch_grouped_matmul(
            *(x, ids, weights, up, case.experts, group),
            bias=biases[0],
            algorithm=case.algorithm,
            **options,
        )
        assert len(inner) == (counts.sum() if most is None else most)
        return tpkernels.grouped_matmul_combine(
            inner, down, handle, bias=biases[1], algorithm=case.algorithm
        )
    options = {"shard_sizes": sizes, "algorithm": case.algorithm}
    inner, routing = tpkernels.all_gather_grouped_matmul(
        x, ids, weights, up, group, bias=biases[0], **options
    )
    return tpkernels.grouped_matmul_reduce_scatter(
        inner, down, routing, group, bias=biases[1], **options
    )


def inputs_of(
    case: Case, group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x, topk_ids, topk_weights, the weights of both products, and the gradient of the result: of
    all ranks in float64, and this one's."""
    (rank, world), generator = (group.rank(), group.size()), torch.Generator().manual_seed(1)
    tokens = 4 * world - case.spare
    torch.manual_seed(1)
    ids = case.route(tokens, TOP, case.experts, generator)
    x, grad = case.numbers(tokens, K), case.numbers(tokens, N)
    weights = torch.randint(1, 3, (tokens, TOP)).to(accumulator(case.dtype))
    if not case.integers:
        weights *= torch.rand_like(weights)
    up, down = case.numbers(case.experts, K, WIDTH), case.numbers(case.experts, WIDTH, N)
    parts = list(zip(*(t.split(4) for t in (x, ids, weights, grad)), strict=True))
    x_here, ids_here, weights_here, grad_here = (
        parts[rank] if rank < len(parts) else (t[:0] for t in (x, ids, weights, grad))
    )
    dims, total = ((0, 0), case.experts) if case.whole else ((2, 1), WIDTH)
    up_here, down_here = (
        w.split(shard_sizes(total, world), dim)[rank].clone()
        for w, dim in zip((up, down), dims, strict=True)
    )
    everyone = [t if t is ids else t.double() for t in (x, ids, weights, up, down, grad)]
    return everyone, [x_here, ids_here, weights_here, up_here, down_here, grad_here]


def failure(case: Case, group: dist.ProcessGroup) -> str | None:
    """What is wrong with the result or a gradient."""
    (rank, world), ((x, ids, weights, up, down, grad), here) = (
        (group.rank(), group.size()),
        inputs_of(case, group),
    )
    if case.packed:
        with torch.no_grad():
            y = layer(case, group, *here[:3], *map(tpkernels.pack, here[3:5]))
            plain = layer(case, group, *here[:5])
        return None if torch.equal(y, plain) else f"{case} on rank {rank}: {y} and {plain}"
    leaves = [t.requires_grad_() for t in (x, weights, up, down)]
    rows = []
    one = float(case.bias)  # a bias is what a token of ones is multiplied to
    for token, chosen, factors in zip(x, ids, weights, strict=True):
        made = [
            f * (((token + one) @ up[e] + one) @ down[e])
            for e, f in zip(chosen, factors, strict=True)
        ]
        rows.append(torch.stack(made).sum(0))
    want = torch.stack(rows)
    wanted = [want.detach(), *torch.autograd.grad(want, leaves, grad)]
    tokens, dims = slice(4 * rank, 4 * rank + 4), (0, 0) if case.whole else (2, 1)
    splits = shard_sizes(case.experts if case.whole else WIDTH, world)
    wanted = [t[tokens] for t in wanted[:3]] + [
        t.split(splits, dim)[rank] for t, dim in zip(wanted[3:], dims, strict=True)
    ]
    if case.algorithm == "auto":
        mine = [here[i].requires_grad_() for i in (0, 2, 3, 4)]
        y = layer(case, group, *here[:5])
        got = [y.detach(), *torch.autograd.grad(y, mine, here[5])]
    else:  # one call each, which has no gradient
        with torch.no_grad():
            got, wanted = [layer(case, group, *here[:5])], wanted[:1]
    names = ("y", "x", "weights", "up", "down")[: len(got)]
    for name, found, exact in zip(names, got, wanted, strict=True):
        bound = 0 if case.integers else 64 * torch.finfo(case.dtype).eps * (1 + exact.abs().max())
        if found.shape != exact.shape or ((found.double() - exact).abs() > bound).any():
            return f"{case} on rank {rank}: {name} is {found.tolist()}, not {exact.tolist()}"
    return None


@pytest.mark.parametrize("world", QUICK_WORLDS)
def test_as_a_loop_over_tokens(ranks: RanksFixture, world: int) -> None:
    """Fewer experts than ranks, empty ones, all tokens to one, ranks without tokens; gradients."""
    every = itertools.product((False, True), (2, 4, 7), (1, 4), (any_experts, one_expert))
    cases = [Case(whole=w, experts=e, spare=s, route=r) for w, e, s, r in every]
    kinds = itertools.product((False, True), (torch.bfloat16, torch.float64), (False, True))
    cases += [Case(whole=w, dtype=d, integers=i) for w, d, i in kinds]
    cases += [Case(whole=w, packed=True) for w in (False, True)]
    named = itertools.product(("auto", "unfused", "direct"), (None, 0, 9), (False, True))
    cases += [Case(whole=True, algorithm=a, max_rows=m, bias=b) for a, m, b in named]
    report_cases(ranks(world), failure, cases)


def fused_cases() -> Iterator[Case]:
    """Fewer experts than ranks, empty ones, all tokens to one, ranks without tokens."""
    for whole in (False, True):
        fused = Case(whole=whole, algorithm="fused")
        for experts, spare, most in ((2, 4, None), (7, 1, 0), (40, 1, 9)):
            yield replace(fused, experts=experts, spare=spare, max_rows=most, bias=most is not None)
        yield replace(fused, spare=0, route=one_expert)
        for dtype, integers in itertools.product(DTYPES, (False, True)):
            if whole or integers == (dtype == torch.float16):
                yield replace(fused, dtype=dtype, integers=integers, bias=True, max_rows=0)


@pytest.mark.parametrize("world", [2, thorough(3)])
def test_in_the_kernels_that_move_rows(interpreting: RanksFixture, world: int) -> None:
    """Under Triton's interpreter; products of 32 x 32 x 32 at a time."""
    report_cases(interpreting(world), failure, list(fused_cases()))


def large_job(algorithm: str, missing: bool) -> tuple[torch.Tensor, set[int]]:
    """Results of several tiles, for which a fetcher brings several pieces; and which tokens have a
    route that leads to no expert, or beyond the rows of a rank."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    held, sizes = shard_sizes(5, world), [60, *shard_sizes(30, world - 1)]
    x, ids, weights = torch.randn(90, 96), torch.randint(5, (90, 3)), torch.rand(90, 3)
    up, down = torch.randn(5, 96, 100), torch.randn(5, 300, 100)
    if missing:
        ids[0, 1] = 5
    by_rank = (
        ids.flatten()
        .argsort(stable=True)
        .split(
            [
                int(part.sum())
                for part in ids.flatten().bincount().split([*held, int(missing)])[:world]
            ]
            + [1] * missing
        )
    )
    most = max(map(len, by_rank)) - 2 if missing else 270
    lost = torch.cat([*(places[most:] for places in by_rank[:world]), *by_rank[world:]]) // 3
    mine = (part.split(sizes)[rank] for part in (x, ids, weights))
    up, down = (w.split(held)[rank] for w in (up, down))
    options: dict[str, Any] = {"algorithm": algorithm}
    with fresh_group() as group, torch.no_grad():
        inner, _, handle = tpkernels.dispatch_grouped_matmul(
            *(*mine, up, 5, group), shard_sizes=sizes, max_rows=most, **options
        )
        y = tpkernels.grouped_matmul_combine(inner, down.transpose(1, 2), handle, **options)
    return y, set(lost.tolist())


@pytest.mark.thorough
def test_many_tiles_and_routes_without_a_row(interpreting: RanksFixture) -> None:
    """A token with such a route becomes NaN: no host has looked."""
    for world in (2, 3):
        plain, whole, some = (
            interpreting(world).run(large_job, *args)
            for args in (("unfused", False), ("fused", False), ("fused", True))
        )
        y, want, lacking = (torch.cat([r[0] for r in found]) for found in (whole, plain, some))
        assert torch.allclose(y, want, rtol=1e-5, atol=1e-3)
        without = lacking.isnan().all(1)
        assert set(without.nonzero().flatten().tolist()) == some[0][1] and len(some[0][1]) >= 2
        assert torch.allclose(lacking[~without], y[~without], rtol=1e-5, atol=1e-3)


def awaited_job() -> tuple[bool, list[tuple[int, int]]]:
    """Whether tiles read no token that they have not waited for: it is brought then. Of each tile,
    the program, and how many ranks after this one the last token is that it waits for."""
    import triton.language as tl

    from tpkernels.kernels import all_gather_matmul, experts

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes, k = [150, *shard_sizes(90, world - 1)], 9
    x, ids = torch.randint(-4, 5, (240, k)).float(), torch.randint(3, (240, 2))
    up = torch.randint(-2, 3, (3, k, 8)).float()
    rows = torch.arange(240).split(sizes)
    fetch, wait = all_gather_matmul.fetch_rows, experts._await_tokens
    memory: list[torch.Tensor] = []
    reached: list[tuple[int, int]] = []

    def take(peers: Any, gathered: Any, *others: Any) -> None:
        fetch(peers, gathered, *others)
        there = (ctypes.c_float * x.numel()).from_address(int(gathered.handle.data[0]))
        memory[:] = [torch.frombuffer(there, dtype=torch.float32).view(x.shape)]
        memory[0][torch.cat([own for i, own in enumerate(rows) if i != rank])] = math.nan

    def bring(peers: Any, tokens: Any, k: Any, owner: Any, row: Any, count: Any, *_: Any) -> None:
        first = int(rows[int(owner)][0]) + int(row)
        memory[0][first : first + int(count)] = x[first : first + int(count)]
        program, after = reached[-1]
        reached[-1] = program, max(after, (int(owner) - rank) % world)

    def wait_for_one(arrivals: Any, *tile: Any) -> None:
        reached.append((int(tl.program_id(0)), 0))
        wait(arrivals, *tile)

    with (
        mock.patch.multiple(all_gather_matmul, fetch_rows=take, await_pieces=bring),
        mock.patch.object(experts, "_await_tokens", wait_for_one),
        fresh_group() as group,
        torch.no_grad(),
    ):
        y, routing = tpkernels.all_gather_grouped_matmul(
            *(part.split(sizes)[rank] for part in (x, ids, torch.ones(240, 2))),
            *(up, group),
            shard_sizes=sizes,
            algorithm="fused",
        )
    tokens = (routing.order // 2).split(routing.counts.tolist())
    want = torch.cat([x[here] @ w for here, w in zip(tokens, up, strict=True)])
    return torch.equal(y, want), reached


@pytest.mark.parametrize("world", [2, thorough(3)])
def test_tiles_wait_for_their_tokens_and_begin_with_those_of_this_rank(
    interpreting: RanksFixture, world: int
) -> None:
    for rank, (right, reached) in enumerate(interpreting(world).run(awaited_job)):
        assert right
        for program in {program for program, _ in reached}:
            ranks = [after for here, after in reached if here == program]
            assert ranks == sorted(ranks) and (rank or ranks[0] < ranks[-1]), reached


def summed_job() -> tuple[bool, int]:
    """Whether tokens are summed right, of products that are taken away and brought back tile by
    tile, as they are waited for; and how many times some were."""
    from tpkernels.kernels import experts, sync

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    sizes, n = [50, *shard_sizes(20, world - 1)], 270
    ids, weights = torch.randint(3, (70, 3)), torch.randint(1, 4, (70, 3)).float()
    rows, w = torch.randint(-3, 4, (world, 210, 5)).float(), torch.randint(-3, 4, (world, 3, 5, n))
    routing = route(ids, weights, 4)  # the last has none
    w = torch.cat([w, w[:, :1]], 1).float()
    tiles = [t for part in torch.arange(210).split(routing.counts.tolist()) for t in part.split(32)]
    tiles = [tile for tile in tiles if len(tile)]
    publish, wait = experts._publish_tile, sync.wait_for_range
    memory: list[torch.Tensor] = []
    waits: list[int] = []

    def tell(products: Any, *tile: Any) -> None:
        there = (ctypes.c_float * (210 * n)).from_address(int(products.out.handle.data[0]))
        memory[:] = [torch.frombuffer(there, dtype=torch.float32).view(210, n)]
        publish(products, *tile)

    def bring(peers: Any, source: Any, first: Any, last: Any) -> None:
        wait(peers, source, first, last)
        if not waits:
            memory.append(memory[0].clone())
            memory[0].fill_(math.nan)
        waits.append(int(last) - int(first))
        for word in range(int(first) - 1, int(last) - 1):
            column, tile = divmod(word, len(tiles))
            columns = slice(32 * column, 32 * column + 32)
            memory[0][tiles[tile], columns] = memory[1][tiles[tile], columns]

    with (
        mock.patch.object(experts, "_publish_tile", tell),
        mock.patch.object(sync, "wait_for_range", bring),
        fresh_group() as group,
        torch.no_grad(),
    ):
        y = tpkernels.grouped_matmul_reduce_scatter(
            *(rows[rank], w[rank], routing, group), shard_sizes=sizes, algorithm="fused"
        )
    want = torch.zeros(70, n)
    for x, own in zip(rows, w, strict=True):
        product = torch.cat(
            [a @ b for a, b in zip(x.split(routing.counts.tolist()), own, strict=True)]
        )
        scaled = weights.flatten()[routing.order][:, None] * product
        want.index_add_(0, routing.order // 3, scaled)
    return torch.equal(y, want.split(sizes)[rank]), len(waits)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2, 3])
def test_tokens_are_summed_when_all_tiles_of_their_columns_are_there(
    interpreting: RanksFixture, world: int
) -> None:
    for right, waits in interpreting(world).run(summed_job):
        assert right and waits == 10, waits  # 5 blocks of 2 columns, by 2 programs


def delayed_job(whole: bool, **broken: bool) -> int:
    """How many of some calls, with delays before their words and waits, have wrong results."""
    case, wrong, ops = Case(whole=whole, spare=0), 0, torch.ops.tpkernels
    with fresh_group() as group:
        (_, routes, *_), (x, ids, weights, up, down, _) = inputs_of(case, group)
        y = layer(case, group, x, ids, weights, up, down)
        name, options = group.group_name, {"algorithm": "fused"}
        most: Any = options | {"max_rows": routes.numel()}
        order, counts, _ = route(routes, routes.float(), case.experts)
        scale = tpkernels.all_gather(weights, group)
        for call in range(1, 5):
            try:
                pair = []
                for factor in (call, -call):
                    if whole:
                        given = factor * x, routes, up, None, case.experts, name
                        _, counts, product = ops.dispatch_grouped_matmul(*given, **most)
                    else:
                        given = factor * x, up, None, order, counts, name
                        product = ops.all_gather_grouped_matmul(*given, **options)
                        given = call * product, down, None, order, counts, scale, name
                        z = ops.grouped_matmul_reduce_scatter(*given, **options)
                        wrong += not torch.equal(z, call * factor * y)
                    pair.append(product)
                other, inner = pair
                wrong += not torch.equal(inner[: counts.sum()], -other[: counts.sum()])
                if whole:
                    given = inner, down, None, counts, weights, routes, case.experts, name
                    result = ops.grouped_matmul_combine(*given, **most)
                    wrong += not torch.equal(result, -call * y)
            except tpkernels.TpkernelsError:
                return wrong + 1
            if call == 1:  # which has set the group up
                workspace_of(group).set_chaos(seed=group.rank(), max_delay_us=5000, **broken)
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("broken", [{}, {"skip_waits": True}], ids=str)
def test_delays_and_a_negative_control(
    interpreting: RanksFixture, whole: bool, broken: dict[str, bool]
) -> None:
    wrong = interpreting(3).run(delayed_job, whole, timeout=100, **broken)
    assert (sum(wrong) > 0) == bool(broken), wrong


REFUSED = [
    r"RoutingError: topk_ids of rank 1 has expert 4 at \[3, 1\]; there are experts 0 to 3",
    r"ValueError: topk_ids has 2000000000; experts are 0 to 3",
    r"ValueError: w has 4 experts; rank \d of 2 holds [23] of 5",
    r"ValueError: w\[0\] has shape \[8, 6\], but x of shape \[4, 7\] needs \[7, N\]",
    r"ValueError: w\[0\] has shape \[8, 3\], but x of shape \[4, 7\] needs \[7, N\]",
    r"TypeError: w\[0\] is float64 but x is float32; they must be equal",
    r"ValueError: x has shape \[4, 8\]; topk_ids have 3 tokens",
    r"ValueError: x has shape \[4, 8\]; topk_ids have 3 tokens",
    r"ValueError: bias has shape \[6\]; it must be \[2, 6\], a row per group",
    r"TypeError: bias is int64; it must be floating-point",
    r"ValueError: bias is on meta but w is on cpu",
    r"ValueError: w\[0\] has shape \[6, 5\], but x of shape \[\d+, 5\] needs \[5, N\]",
    r"NotImplementedError: algorithm 'fused' of experts has no gradient",
]


@on_ranks(2)
def test_refusals_on_all_ranks() -> None:
    """Of an expert that there is not on one of them, too; the group goes on."""
    by_expert, by_width = Case(whole=True, spare=0), Case(whole=False, spare=0)
    with fresh_group() as group:
        x, ids, weights, up, down, _ = inputs_of(by_expert, group)[1]
        part = inputs_of(by_width, group)[1][3]
        bad = ids.clone()
        bad[3, 1] = 4 if group.rank() == 1 else 0
        first, second = tpkernels.dispatch_grouped_matmul, tpkernels.all_gather_grouped_matmul
        inner, _, handle = first(x, ids, weights, up, 4, group)
        calls = [
            lambda: first(x, bad, weights, up, 4, group),
            lambda: second(x, bad.where(bad < 4, 2_000_000_000), weights, part, group),
            lambda: first(x, ids, weights, part.new_ones(4, 8, 6), 5, group),
            lambda: first(x[:, 1:], ids, weights, up, 4, group),
            lambda: second(x[:, 1:], ids, weights, part, group),
            lambda: first(x, ids, weights, up.double(), 4, group),
            lambda: first(x, ids[1:], weights[1:], up, 4, group),
            lambda: second(x, ids[1:], weights[1:], part, group),
            lambda: first(x, ids, weights, up, 4, group, bias=torch.ones(6)),
            lambda: first(x, ids, weights, up, 4, group, bias=torch.ones(2, 6, dtype=torch.int64)),
            lambda: first(x, ids, weights, up, 4, group, bias=torch.ones(2, 6, device="meta")),
            lambda: tpkernels.grouped_matmul_combine(inner[:, 1:], down, handle),
            lambda: first(x, ids, weights, up, 4, group, algorithm="fused"),
        ]
        for message, pattern in zip(messages_of(calls), REFUSED, strict=True):
            assert re.match(pattern, message), message
        assert failure(by_expert, group) is None and failure(by_width, group) is None


@pytest.mark.thorough
@on_ranks(2)
def test_compiled() -> None:
    """In one graph, with its gradients."""
    with fresh_group() as group:
        for case in (Case(whole=True, spare=0), Case(whole=False, spare=0)):
            *inputs, grad = inputs_of(case, group)[1]
            leaves = [inputs[i].requires_grad_() for i in (0, 2, 3, 4)]

            def step(*inputs: torch.Tensor, case: Case = case) -> torch.Tensor:
                return layer(case, group, *inputs)

            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
                results = []
                for call in (step, compiled):
                    y = call(*inputs)
                    results.append([y, *torch.autograd.grad(y, leaves, grad)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), case
