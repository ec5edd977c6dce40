"""FSDP2, DTensor, tensor parallelism, DDP and compiled collectives of torch on the backend
"tpkernels", with the models and checks of ``torch.testing``.

Each test also runs on gloo. The results of both backends match an unsharded reference. The default
group of the ranks uses the backend "tpkernels".
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from tests.support.ranked import on_ranks
from tests.support.tiers import sweep, thorough
from tpkernels.launch import Ranks

BACKENDS = ("gloo", "tpkernels")
STEPS = 3
WORLDS = sweep([2, 3, 4])
PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max"))


@pytest.fixture(scope="module")
def backend_ranks() -> Iterator[Callable[[int], Ranks]]:
    """``backend_ranks(2)``: ranks whose default group uses the backend "tpkernels". Other modules
    do not share them, because an import of ``torch.testing._internal`` changes global state."""
    pools: dict[int, Ranks] = {}

    def start(world: int) -> Ranks:
        if world not in pools or not pools[world].healthy:
            pools[world] = Ranks(world, backend="tpkernels", timeout=120.0)
        return pools[world]

    yield start
    for pool in pools.values():
        pool.close()


@functools.cache
def make_mesh(backend: str, **sizes: int) -> DeviceMesh:
    # torch caches shardings by mesh. Meshes with equal sizes and names are equal, even if their
    # groups differ: hence one mesh per backend, with the backend in the names.
    names = tuple(f"{name}_{backend}" for name in sizes)
    return init_device_mesh(
        "cpu",
        tuple(sizes.values()),
        mesh_dim_names=names,
        backend_override=dict.fromkeys(names, backend),
    )


def make_transformer(**options: Any) -> nn.Module:
    from torch.testing._internal.distributed._tensor import common_dtensor

    torch.manual_seed(0)
    args = common_dtensor.ModelArgs(dropout_p=0.0, **options)
    return common_dtensor.Transformer(args)


def make_tokens(seed: int) -> torch.Tensor:
    return torch.randint(8, (2, 16), generator=torch.Generator().manual_seed(seed))


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of the ranks, with a gather in place of a reduction."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gradients, parameter.grad)
            parameter.grad = torch.stack(gradients).mean(0)


def check_gradients(model: nn.Module, reference: nn.Module, tolerance: float | None = None) -> None:
    for p, want in zip(model.parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        assert_close(grad, want.grad, rtol=tolerance, atol=tolerance)


# FSDP2.


def check_sharded_steps(
    model: nn.Module, shard: Callable[[nn.Module], Any], inputs: Callable[[int], torch.Tensor]
) -> None:
    """Train a sharded copy on the inputs of this rank. Parameters and gradients match a replicated
    copy with averaged gradients."""
    from torch.testing._internal.common_fsdp import check_sharded_parity
    from torch.testing._internal.common_utils import TestCase

    sharded = copy.deepcopy(model)
    shard(sharded)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, sharded)]
    for step in range(STEPS):
        x = inputs(step * dist.get_world_size() + dist.get_rank())
        for m in (model, sharded):
            m(x).square().mean().backward()
        average_gradients(model)
        check_sharded_parity(TestCase(), model, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_sharded_parity(TestCase(), model, sharded)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("reshard", [True, thorough(False)])
@on_ranks(fixture="backend_ranks")
def test_fully_sharded_mlp(reshard: bool) -> None:
    """Shards are uneven with 3 ranks."""
    from torch.testing._internal.common_fsdp import MLPStack

    for backend in BACKENDS:
        mesh = make_mesh(backend, dp=dist.get_world_size())

        def shard(model: nn.Module, mesh: DeviceMesh = mesh) -> None:
            for module in [*model.children(), model]:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)

        torch.manual_seed(0)
        rows = torch.randn(32, 4, 8)
        check_sharded_steps(MLPStack(8), shard, rows.__getitem__)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(fixture="backend_ranks")
def test_fully_sharded_transformer() -> None:
    for backend in BACKENDS:
        mesh = make_mesh(backend, dp=dist.get_world_size())

        def shard(model: Any, mesh: DeviceMesh = mesh) -> None:
            for module in [*model.layers, model]:
                fully_shard(module, mesh=mesh)

        check_sharded_steps(make_transformer(), shard, make_tokens)


@pytest.mark.parametrize("world", [4])
@on_ranks(fixture="backend_ranks")
def test_tensor_parallel_and_fully_sharded() -> None:
    """Train an MLP on a mesh of 2 x 2 ranks. The losses match the unsharded model."""
    from torch.testing._internal.common_fsdp import MLPStack

    for backend in BACKENDS:
        mesh = make_mesh(backend, dp=2, tp=2)
        torch.manual_seed(0)
        reference = MLPStack(8, with_seq_parallel=True)
        model = copy.deepcopy(reference).parallelize(
            mesh[f"tp_{backend}"], mesh[f"dp_{backend}"], False
        )
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (reference, model)]
        for x in torch.randn(STEPS, 2, 4, 4, 8):
            want = reference(x.flatten(0, 1)).square().mean()
            loss = model(x[mesh.get_local_rank(0)]).full_tensor().square().mean()
            want.backward()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group(0))
            assert_close(mean, want.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


# DTensor.


def make_dtensor(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Make a DTensor of integers. The local tensors of a partial tensor depend on the rank."""
    whole = torch.arange(1.0, 36.0).view(5, 7)
    if not any(p.is_partial() for p in placements):
        return distribute_tensor(whole, mesh, placements)
    spread = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(whole, mesh, spread).to_local()
    factors = [
        2 + i if p.is_partial() else 1
        for p, i in zip(placements, mesh.get_coordinate() or [], strict=True)
    ]
    return DTensor.from_local(
        local * torch.tensor(factors).prod(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def find_expected(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Return the full tensor of `make_dtensor`."""
    whole = torch.arange(1.0, 36.0).view(5, 7)
    for placement, size in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Partial):
            factors = range(2, 2 + size)
            whole = whole * (sum(factors) if placement.reduce_op == "sum" else max(factors))
    return whole


@pytest.mark.parametrize("world", sweep([2, 4]))
@on_ranks(fixture="backend_ranks")
def test_redistribute_between_all_placements() -> list[str]:
    """Redistribute uneven shards, on one mesh dim and on two. Results are exact."""
    failures = []
    world = dist.get_world_size()
    for backend, sizes in itertools.product(BACKENDS, [{"a": world}, {"a": world // 2, "b": 2}]):
        mesh = make_mesh(backend, **sizes)
        targets = [p for p in PLACEMENTS if not p.is_partial()]
        for source in itertools.product(PLACEMENTS, repeat=mesh.ndim):
            if len({p for p in source if p.is_partial()}) > 1:
                continue  # mixed reductions have no single result
            x, want = make_dtensor(mesh, source), find_expected(mesh, source)
            for target in itertools.product(targets, repeat=mesh.ndim):
                got = x.redistribute(mesh, target)
                local = distribute_tensor(want, mesh, target, src_data_rank=None).to_local()
                if not torch.equal(got.to_local(), local):
                    failures.append(f"{backend} {source} -> {target}: {got.to_local()}")
                if not torch.equal(got.full_tensor(), want):
                    failures.append(f"{backend} {source} -> {target} -> full")
    return failures


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(fixture="backend_ranks")
def test_operators_on_all_shardings() -> None:
    """Run operators on every combination of shardings of their arguments, forward and backward."""
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter

    numel = 12 * 12
    x, y = (torch.arange(1.0, 1 + numel).view(12, 12).requires_grad_() for _ in range(2))
    operators: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.mm, (x, y)),
        (torch.add, (x, y)),
        (torch.nn.functional.layer_norm, (x, [12])),
        (torch.sum, (x, 0)),
        (torch.cat, ([x, y], 1)),
    ]
    for backend in BACKENDS:
        mesh = make_mesh(backend, a=dist.get_world_size())
        for operator, args in operators:
            want = operator(*args)
            (want_grad,) = torch.autograd.grad(want.square().sum(), x)
            converter = DTensorConverter(mesh, args, {})
            for dist_args, _ in converter:
                leaf = torch.utils._pytree.tree_leaves(dist_args)[0]
                got = operator(*dist_args)
                (grad,) = torch.autograd.grad(got.square().sum(), leaf)
                assert_close(got.full_tensor(), want)
                assert_close(grad.full_tensor(), want_grad)
            assert converter.successful()


@pytest.mark.parametrize("world", sweep([2, 4]))
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(fixture="backend_ranks")
def test_tensor_parallel_transformer(sequence_parallel: bool) -> None:
    for backend in BACKENDS:
        mesh = make_mesh(backend, tp=dist.get_world_size())
        reference: Any = make_transformer()
        model: Any = copy.deepcopy(reference)
        # A head of attention is not a DTensor: DTensor has no rule for attention on CPUs.
        model = model.parallelize(model, mesh, sequence_parallel, local_output_for_attn=True)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        for step in range(STEPS):
            tokens = make_tokens(step)
            want, got = reference(tokens), model(tokens)
            assert_close(got, want)
            for logits in (want, got):
                nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            check_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


# DDP.


def check_ddp_steps(
    model: nn.Module,
    backend: str,
    inputs: Callable[[int], torch.Tensor],
    hook: Any = None,
    micro_batches: int = 1,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Train with DDP on the inputs of this rank. Gradients match averaged gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    reference = copy.deepcopy(model)
    group = make_mesh(backend, dp=world).get_group()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, **options)
    if hook is not None:
        ddp.register_comm_hook(group, hook)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(STEPS):
        for i in range(micro_batches):
            x = inputs((step * micro_batches + i) * world + rank)
            reference(x).square().mean().backward()
            last = i == micro_batches - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                ddp(x).square().mean().backward()
        average_gradients(reference)
        check_gradients(model, reference, tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(reference.state_dict())  # differences do not add up over the steps


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("views", [True, thorough(False)])
@on_ranks(fixture="backend_ranks")
def test_ddp(views: bool) -> None:
    for backend in BACKENDS:
        for options in ({}, {"static_graph": True}):
            model = make_transformer()
            check_ddp_steps(model, backend, make_tokens, gradient_as_bucket_view=views, **options)
        check_ddp_steps(make_transformer(), backend, make_tokens, micro_batches=3)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(fixture="backend_ranks")
def test_ddp_communication_hooks() -> None:
    hooks = [
        (default_hooks.allreduce_hook, None),
        (default_hooks.fp16_compress_hook, 2**-9),
    ]
    for backend, (hook, tolerance) in itertools.product(BACKENDS, hooks):
        model = make_transformer()
        check_ddp_steps(model, backend, make_tokens, hook, tolerance=tolerance)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(fixture="backend_ranks")
def test_ddp_unused_parameters() -> None:
    """The parameters that no rank uses get no gradient."""
    from torch.testing._internal.common_fsdp import DoubleLinear

    for backend in BACKENDS:
        torch.manual_seed(0)
        rows, model = torch.randn(32, 4, 8), DoubleLinear(8, use_second_linear=False)
        inputs = rows.__getitem__
        check_ddp_steps(model, backend, inputs, find_unused_parameters=True)
        assert model.lin2.weight.grad is None


# Functional collectives.


def run_functional_collectives(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    world = group.size()
    sizes = [x.shape[0] // world] * world
    return [
        funcol.all_reduce(x, "sum", group) + 1,
        funcol.all_reduce(x * 2, "max", group) - x,
        funcol.all_gather_tensor(x + 1, 0, group) * 2,
        funcol.all_gather_tensor(x, 1, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group) + x[: sizes[0]],
        funcol.all_to_all_single(x * 3, sizes, sizes, group) + 1,
        funcol.broadcast(x, world - 1, group) - 1,
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x + 1], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
    ]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("compiler", sweep(["aot_eager", "eager", "inductor"], 2))
@on_ranks(fixture="backend_ranks")
def test_functional_collectives(compiler: str) -> None:
    """Run integers, compiled and not. The results of both backends are equal, and exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.arange(12.0 * world).view(-1, 2) * (rank + 1)
    results = []
    for backend in BACKENDS:
        group = make_mesh(backend, dp=world).get_group()
        torch._dynamo.reset()
        function = torch.compile(run_functional_collectives, backend=compiler, fullgraph=True)
        results.append([t + 0 for t in function(x, group)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    whole = torch.arange(12.0 * world).view(-1, 2)
    assert torch.equal(results[0][0], whole * sum(range(1, world + 1)) + 1)
