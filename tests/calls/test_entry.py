"""Every entry point of an op preserves the dispatcher features: modes, subclasses, autograd,
autocast and transforms. A call without a gradient runs no Python code below the public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels
from tests.support import faults
from tests.support.ranked import fresh_group, functions_called, on_ranks
from tests.support.tiers import sweep

WORLD = 2


class Counting:
    """Counts calls of the ops."""

    seen = 0

    def count(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += "tpkernels" in str(function)
        return function(*args, **(kwargs or {}))


class Functions(Counting, TorchFunctionMode):
    __torch_function__ = Counting.count


class Dispatches(Counting, TorchDispatchMode):
    __torch_dispatch__ = Counting.count


class CountingTensor(torch.Tensor):
    """A tensor subclass that counts calls of the ops."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        cls.seen += "tpkernels" in str(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@on_ranks(WORLD)
def test_modes_subclasses_and_profilers_observe_the_op() -> None:
    with fresh_group(autotune=False) as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        for _ in range(3):
            tpkernels.all_reduce(x, group)
            tpkernels.matmul_all_reduce(x, w, group)
        for mode in (Functions(), Dispatches()):
            with mode:
                tpkernels.all_reduce(x, group)
                tpkernels.matmul_all_reduce(x, w, group)
            assert mode.seen == 2, f"{type(mode).__name__} saw {mode.seen} calls"
        tpkernels.all_reduce(x.as_subclass(CountingTensor), group)
        assert CountingTensor.seen == 1, f"the subclass saw {CountingTensor.seen} calls"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            tpkernels.all_reduce(x, group)
        assert any(event.name == "tpkernels::all_reduce" for event in profile.events())


@on_ranks(WORLD)
def test_dispatcher_features() -> None:
    with fresh_group(autotune=False) as group:
        world = group.size()
        x, w = torch.full((4, 8), 2.0), torch.ones(8, 6)
        for _ in range(3):
            tpkernels.all_reduce(x, group)
            tpkernels.all_reduce_(x.clone(), group)
            tpkernels.matmul_all_reduce(x, w, group)
        negative = torch._neg_view(x)  # contiguous; torch resolves the negative bit
        assert torch.equal(tpkernels.all_reduce(negative, group), x * -world), "negative"
        leaf = x.clone().requires_grad_()
        result = tpkernels.all_reduce(leaf, group)
        assert result.requires_grad, "gradient"
        result = tpkernels.matmul_all_reduce(x, w.clone().requires_grad_(), group)
        assert result.requires_grad, "gradient of a weight"
        bias = torch.ones(6, requires_grad=True)
        tpkernels.matmul_all_reduce(x, w, group, bias=bias.detach())
        result = tpkernels.matmul_all_reduce(x, w, group, bias=bias)
        assert result.requires_grad, "gradient of a bias"
        with pytest.raises(NotImplementedError):
            tpkernels.all_reduce_(leaf, group)
        with torch.no_grad():
            assert not tpkernels.all_reduce(leaf, group).requires_grad, "no_grad"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = tpkernels.matmul_all_reduce(x, w, group)
        assert result.dtype == torch.bfloat16, "autocast"
        target = x.clone()
        before = target._version
        tpkernels.all_reduce_(target, group)
        assert target._version > before, "version"
        with torch.inference_mode():
            inference = x.clone()
            tpkernels.all_reduce_(inference, group)
            tpkernels.all_reduce_(target, group)
            assert torch.equal(inference, x * world), "inference mode"
            assert tpkernels.all_reduce(x, group).is_inference(), "an inference result"
        assert target._version > before + 1, "version in inference mode"
        dual = torch.autograd.forward_ad
        with dual.dual_level(), pytest.raises(NotImplementedError):
            tpkernels.all_reduce(dual.make_dual(x, x), group)


def make_calls(group: dist.ProcessGroup, packed: bool) -> dict[str, Callable[[], object]]:
    """Return a call of each op with plain tensors. The tensors are created in the current grad
    mode."""
    x, w, name = torch.ones(4, 8), torch.ones(8, 6), group.group_name
    bias = torch.nn.Parameter(torch.ones(6), requires_grad=False)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: tpkernels.all_reduce(x, group),
        "all_reduce_": lambda: tpkernels.all_reduce_(x, name),
        "all_gather": lambda: tpkernels.all_gather(x, group, 1),
        "reduce_scatter": lambda: tpkernels.reduce_scatter(x, group),
        "matmul_all_reduce": lambda: tpkernels.matmul_all_reduce(x, w, group, bias=bias),
        "matmul_reduce_scatter": lambda: tpkernels.matmul_reduce_scatter(x, w, group),
        "all_gather_matmul": lambda: tpkernels.all_gather_matmul(x, [w, w], group),
        "overload": lambda: torch.ops.tpkernels.all_reduce.default(x[1:], name),
    }
    if packed:
        factor = tpkernels.pack(w)
        calls["packed"] = lambda: tpkernels.matmul_all_reduce(x, factor, group)
    return calls


def _is_public(name: str) -> bool:
    module, _, function = name.removeprefix("tpkernels.ops.").partition(".")
    return function.removesuffix("_") == module


@on_ranks(WORLD)
def test_warm_calls_run_no_python_code_below_the_function() -> None:
    above = {"tpkernels.ops.registration.entry", "tpkernels.groups.group_name"}
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with fresh_group(autotune=False) as group, context():
            for op, call in make_calls(group, packed=context is not torch.enable_grad).items():
                call()
                with functions_called("tpkernels") as names:
                    call()
                functions = {name for name in names if name not in above and not _is_public(name)}
                assert not functions, f"{op} in {context.__name__}: {functions}"


@pytest.mark.parametrize("backend", sweep(["eager", "aot_eager", "inductor"], 2))
@on_ranks(WORLD)
def test_compiled_graphs_contain_the_op(backend: str) -> list[str]:
    graphs: list[Any] = []

    def save_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with fresh_group(autotune=False) as group:
        x = torch.ones(4, 8)
        for _ in range(3):
            tpkernels.all_reduce(x, group)
        name = group.group_name
        torch.compile(
            lambda x: tpkernels.all_reduce(x, name) + 1, backend=save_graph, fullgraph=True
        )(x)
        function = torch.compile(lambda x: tpkernels.all_reduce(x, name) + 1, backend=backend)
        same = torch.equal(function(x), x * dist.get_world_size() + 1)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    contains_op = any("tpkernels.all_reduce" in target for target in targets)
    return [] if same and contains_op else [f"{same}, {targets}"]


def entry_points(group: dist.ProcessGroup) -> dict[str, Callable[[Any, Any], torch.Tensor]]:
    """Return the entry points of an op: the function and both overloads."""
    ops, name = torch.ops.tpkernels, group.group_name
    return {
        "function": lambda x, w: tpkernels.matmul_all_reduce(x, w, group),
        "X": lambda x, w: ops.matmul_all_reduce(x, w, name),
        "_X": lambda x, w: ops._matmul_all_reduce(x, w, name),
    }


@on_ranks(WORLD)
def test_unusual_tensors_give_the_right_result() -> None:
    with fresh_group(autotune=False) as group:
        x, w = torch.randn(4, 8), torch.randn(8, 6)
        with torch.inference_mode():
            inference = x.clone()
        for entry, op in entry_points(group).items():
            expected, zeros = op(x, w), op(torch.zeros(4, 8), w)
            for _ in range(2):  # the first call is planned, the second uses the cached plan
                results = {
                    "a negative view": op(torch._neg_view(-x), w),
                    "a negative view as a weight": op(x, torch._neg_view(-w)),
                    "an inference tensor": op(inference, w),
                    "a parameter": op(x, torch.nn.Parameter(w, requires_grad=False)),
                    "a subclass": op(x.as_subclass(CountingTensor), w).as_subclass(torch.Tensor),
                    "other strides": op(x.t().contiguous().t(), w),
                }
                for kind, got in results.items():
                    assert torch.equal(got, expected), f"{entry}: {kind}"
                efficient = op(torch._efficientzerotensor((4, 8)), w)
                assert torch.equal(efficient, zeros), f"{entry}: zeros without memory"
            with FakeTensorMode() as mode:
                fake = op(mode.from_tensor(x), mode.from_tensor(w))
                assert (type(fake), fake.shape) == (FakeTensor, expected.shape), (
                    f"{entry}: fake tensors"
                )
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert op(x, w).dtype == torch.bfloat16, f"{entry}: autocast"
            examples = torch.randn(2, 4, 8)
            got = torch.vmap(op, in_dims=(0, None))(examples, w)
            assert torch.equal(got, torch.stack([op(example, w) for example in examples])), (
                f"{entry}: vmap"
            )


@on_ranks(WORLD)
def test_unsupported_tensors_are_refused() -> None:
    """Each entry point raises before it sends data."""
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    mesh = init_device_mesh("cpu", (WORLD,))
    unusual: dict[str, tuple[torch.Tensor, str]] = {
        "sparse": (x.to_sparse(), "SparseCPU"),
        "mkldnn": (x.to_mkldnn(), "has layout torch._mkldnn; the ops support dense tensors only"),
        "quantised": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "QuantizedCPU"),
        "conjugate": (torch.ones(8, 8, dtype=torch.complex64).conj(), "complex64"),
        "nested": (
            torch.nested.nested_tensor([x, x], layout=torch.jagged),
            "tpkernels._matmul_all_reduce.default",
        ),
        "meta": (x.to("meta"), "must be on the same device"),
        "DTensor": (DTensor.from_local(x, mesh), "convert all torch.Tensor to DTensor"),
    }
    with fresh_group(autotune=False) as group:
        workspace = faults.get_workspace(group)
        for entry, op in entry_points(group).items():
            op(x, w)
            epoch = workspace.epoch
            for kind, (tensor, pattern) in unusual.items():
                for operands in ((tensor, w), (x, tensor)):
                    error = (NotImplementedError, TypeError, ValueError, RuntimeError)
                    with pytest.raises(error, match=pattern):
                        op(*operands)
                    assert workspace.epoch == epoch, f"{entry}: a {kind} tensor was sent"
            op(x, w)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@on_ranks(WORLD)
def test_gradients_through_wrappers_and_transforms() -> None:
    """Gradients of wrapped tensors and in transforms: the function matches the overload."""
    with fresh_group(autotune=False) as group:
        world, name = group.size(), group.group_name
        x, w = torch.randn(3, 4, 8), torch.randn(8, 6)
        for op in (
            lambda a, _: tpkernels.all_reduce(a, group),
            lambda a, w: tpkernels.matmul_all_reduce(a, w, group),
        ):
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            torch.vmap(op, in_dims=(0, None))(*leaves).sum().backward()
            expected_leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            torch.stack(
                [op(row, expected_leaves[1]) for row in expected_leaves[0]]
            ).sum().backward()
            for leaf, expected in zip(leaves, expected_leaves, strict=True):
                assert (leaf.grad is None) == (expected.grad is None), "vmap: a gradient is lost"
                if leaf.grad is not None and expected.grad is not None:
                    torch.testing.assert_close(leaf.grad, expected.grad)

        def total(a: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: tpkernels.all_reduce(row, group))(a).sum()

        for compute_grad in (
            lambda: torch.func.grad(total)(x),
            lambda: torch.func.grad(lambda a: tpkernels.all_reduce(a, group).sum())(x),
        ):
            with pytest.raises(RuntimeError):
                compute_grad()
        traced = torch.fx.symbolic_trace(lambda a: tpkernels.all_reduce(a, name))
        leaf = x.clone().requires_grad_()
        traced(leaf).sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.ones_like(x)), (
            "symbolic_trace"
        )

        class Module(torch.nn.Module):
            def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return tpkernels.all_reduce(a @ b, name)

        module = torch.export.export(Module(), (x[0], w), strict=False).module()
        leaf = w.clone().requires_grad_()
        module(x[0], leaf).sum().backward()
        assert leaf.grad is not None, "a module that was exported"
        assert torch.allclose(module(x[0], w), (x[0] @ w) * world, atol=1e-4)


@on_ranks(WORLD)
def test_an_op_without_a_gradient_refuses_to_record_gradients() -> None:
    """``_X`` raises before it sends data, and autocast of a different device has no effect."""
    with fresh_group(autotune=False) as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6, requires_grad=True)
        tpkernels.matmul_all_reduce(x, w, group)
        epoch = faults.get_workspace(group).epoch
        with pytest.raises(NotImplementedError, match="_matmul_all_reduce records no gradient"):
            torch.ops.tpkernels._matmul_all_reduce(x, w, group.group_name)
        assert faults.get_workspace(group).epoch == epoch
        torch.set_autocast_enabled("cuda", True)
        try:
            assert tpkernels.matmul_all_reduce(x, w, group).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)
