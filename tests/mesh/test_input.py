"""Invalid input to ``sharded_matmul``, second-order gradients, autocast and torch.compile."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

import tpkernels
from tests.support.meshes import S0, S1, P, R, draw, make_mesh
from tests.support.ranked import collect_messages, on_ranks
from tpkernels import mesh as tpmesh

BF16, matmul = torch.bfloat16, tpkernels.sharded_matmul


def ones(shape: tuple[int, ...], mesh: DeviceMesh, *placements: Any, **options: Any) -> DTensor:
    local = torch.ones(shape, **options)
    return DTensor.from_local(local, mesh, placements, run_check=False)


REFUSALS: list[tuple[str, Callable[..., Any]]] = [  # error pattern and call
    (r"TypeError: x is a Tensor, not a DTensor; create a DTensor with .*distribute_tensor or",
     lambda x, w, **_: matmul(torch.ones(3, 4), w)),
    (r"ValueError: x has shape \[3, 4, 2\]; it must be a matrix",
     lambda x, w, mesh, **_: matmul(ones((3, 4, 2), mesh, R), w)),
    (r"ValueError: x is on DeviceMesh.* and w on DeviceMesh.*; both must be on the same mesh",
     lambda x, w, other, **_: matmul(x, ones((4, 5), other, R, R))),
    (r"NotImplementedError: the mesh has 3 dims \(1, 1, 2\); meshes of one and two dims",
     lambda x, w, cube, **_: matmul(ones((3, 4), cube, R, R, R), ones((4, 5), cube, R, R, R))),
    (r"ValueError: x is on meta but its mesh is on cpu; move its local shards to the device",
     lambda x, w, mesh, **_: matmul(ones((3, 4), mesh, S0, device="meta"), w)),
    (r"TypeError: x is float32 but w is bfloat16; they must be equal",
     lambda x, w, mesh, **_: matmul(x, ones((4, 5), mesh, R, dtype=BF16))),
    (r"NotImplementedError: x has dtype int32; supported: float32",
     lambda x, w, mesh, **_: matmul(ones((3, 4), mesh, R, dtype=torch.int32), w)),
    (r"ValueError: x has shape \[6, 4\] and w has shape \[5, 4\]; x must have as many columns",
     lambda x, w, mesh, **_: matmul(x, ones((5, 4), mesh, R))),
    (r"ValueError: out_placements has 2 placements, but the mesh has 1 dims; pass one placement",
     lambda x, w, **_: matmul(x, w, [R, R])),
    (r"ValueError: out_placements has Shard\(2\), but the tensor has dims 0 to 1",
     lambda x, w, **_: matmul(x, w, [Shard(2)])),
    (r"NotImplementedError: out_placements has Partial.*avg.*; supported: Shard, Replicate and",
     lambda x, w, **_: matmul(x, w, [Partial("avg")])),
    (r"ValueError: strategy is 'rows', which is not available for .* S0 @ .* R on a mesh of 2 -> "
     r"any; choose from 'auto'",
     lambda x, w, **_: matmul(x, w, None, "rows")),
    (r"ValueError: strategy is 'sum_x', which is not available for .* S0 @ .* R on",
     lambda x, w, **_: matmul(x, w, None, "sum_x")),
    (r"ValueError: unknown algorithm 'quick'; choose from auto, unfused",
     lambda x, w, **_: matmul(x, w, algorithm="quick")),
    (r"ValueError: wire_dtype is bfloat16 and x is float32; wire_dtype must be float32",
     lambda x, w, **_: matmul(x, w, wire_dtype=BF16)),
    (r"ValueError: wire_dtype is bfloat16 and x is float32; wire_dtype must be",
     lambda x, w, **_: tpmesh.explain(x, w, wire_dtype=BF16)),
    (r"CollectiveMismatchError: .*partials in float32.*partials in bfloat16",
     lambda x, w, **_: matmul(
         x.to(BF16), w.to(BF16), [R], "M", wire_dtype=(torch.float32, BF16)[dist.get_rank()]
     )),
]  # fmt: skip


@on_ranks(2)
def test_refusals() -> None:
    mesh = make_mesh((2,))
    operands: dict[str, Any] = {
        "x": ones((3, 4), mesh, S0),
        "w": ones((4, 5), mesh, R),
        "mesh": mesh,
    }
    for name, shape in (("other", (1, 2)), ("cube", (1, 1, 2))):
        operands[name] = init_device_mesh("cpu", shape)
    got = collect_messages([functools.partial(call, **operands) for _, call in REFUSALS])
    for message, (pattern, _) in zip(got, REFUSALS, strict=True):
        assert re.match(pattern, message), message


@on_ranks(2)
def test_a_rank_outside_the_mesh() -> None:
    """Rank 1 is not in the mesh and raises. Rank 0 succeeds."""
    mesh = DeviceMesh("cpu", [0])
    x, w = ones((3, 4), mesh, S0), ones((4, 5), mesh, R)
    (message,) = collect_messages([lambda: tpkernels.sharded_matmul(x, w)])
    pattern = (
        "ValueError: this rank is not in the mesh DeviceMesh" if dist.get_rank() else "nothing"
    )
    assert re.match(pattern, message), message


@on_ranks(2)
def test_second_order_gradients() -> list[str]:
    """Compare gradients of gradients with plain torch."""
    mesh = make_mesh((2,), ["second"])
    x, w = draw("x", (5, 4), mesh, (S0,)), draw("w", (4, 3), mesh, (S1,))

    def second_order(a: Any, b: Any, multiply: Any, to_full: Any) -> list[torch.Tensor]:
        y = multiply(a, b)
        first = torch.autograd.grad((to_full(y * y)).sum(), [a, b], create_graph=True)
        total = sum((to_full(grad * grad)).sum() for grad in first)
        return [to_full(grad) for grad in torch.autograd.grad(total, [a, b])]  # type: ignore[arg-type]

    a, b = (drawn.value.float().requires_grad_() for drawn in (x, w))
    want = second_order(a, b, torch.matmul, lambda t: t)
    got = second_order(
        x.sharded, w.sharded, tpkernels.sharded_matmul, lambda t: t.redistribute(placements=[R])
    )
    return [
        f"{i}: {grad.to_local()} {expected}"
        for i, (grad, expected) in enumerate(zip(got, want, strict=True))
        if not torch.equal(grad.to_local(), expected)
    ]


@on_ranks(2)
def test_autocast_changes_no_dtype() -> None:
    """Only some plans contain an op that autocast could change. All plans return float32."""
    mesh = make_mesh((2,))
    x, w = draw("x", (6, 4), mesh, (R,)).sharded, draw("w", (4, 6), mesh, (S1,)).sharded
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {
            tpkernels.sharded_matmul(x, w, [R], plan.strategy).dtype
            for plan in tpmesh.plans(x, w, [R])
        } == {torch.float32}


@pytest.mark.thorough
@on_ranks(2)
def test_a_call_within_a_compiled_function() -> None:
    mesh = make_mesh((2,), ["compiled"])
    x, w = draw("x", (6, 4), mesh, (S0,)), draw("w", (4, 6), mesh, (S1,))

    @torch.compile(backend="eager")
    def twice(a: DTensor, b: DTensor) -> torch.Tensor:
        return 2 * tpkernels.sharded_matmul(a, b, [R])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo")  # tracing the planner would emit warnings
        y = twice(x.sharded, w.sharded)
    (grad,) = torch.autograd.grad(y.sum(), x.sharded)
    want = 2 * w.value.sum(1).float().expand(3, 4)
    assert torch.equal(y.to_local().double(), 2 * x.value @ w.value) and torch.equal(
        grad.to_local(), want
    )


@on_ranks(2)
def test_explain() -> None:
    mesh = make_mesh((2,))
    x, w = draw("x", (6, 4), mesh, (S0,)).sharded, draw("w", (4, 8), mesh, (S1,)).sharded
    lines = tpmesh.explain(x, w, [P]).splitlines()
    assert lines[0].startswith("[6, 4] S0 @ [4, 8] S1 on a mesh of 2, ")
    assert lines[1].split() == ["strategy", "result", "ms", "bytes", "flops", "steps"]
    strategy, result, ms, *numbers = lines[2].split(maxsplit=5)[:5]
    assert (strategy, result, *numbers) == ("K", "P", "112", "384") and float(ms) > 0


@pytest.mark.parametrize("name", ["sharded_matmul", "all_gather"])
def test_names_are_imported_on_first_use(name: str) -> None:
    assert callable(getattr(tpmesh, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(tpmesh, "nothing")  # noqa: B009
