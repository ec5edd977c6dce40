"""Ranks that are in different products: each learns both, before anything is sent, or, of products
that all know, from the ops' own checks."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpkernels
from tests.support import meshes
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, Placements, R, draw, error_of, make_mesh
from tests.support.ranked import TIMEOUT, apart, messages_of, on_ranks
from tpkernels.errors import WorkspaceMemoryError
from tpkernels.groups.group import Group
from tpkernels.mesh import agreement

AT_ONCE = TIMEOUT / 2  # s: nobody waits until the timeout


def multiply(
    mesh: DeviceMesh,
    x: Placements,
    w: Placements,
    strategy: str = "auto",
    shape: tuple[int, int, int] = (6, 4, 8),
    dtype: torch.dtype = torch.float32,
    algorithm: str = "auto",
    out: Placements | None = None,
) -> str | None:
    """What is wrong with a product, whose result is replicated if nothing else is asked for."""
    m, k, n = shape
    a, b = draw("x", (m, k), mesh, x, dtype), draw("w", (k, n), mesh, w, dtype)
    out = out or (R,) * mesh.ndim
    y = tpkernels.sharded_matmul(a.sharded, b.sharded, out, strategy, algorithm=algorithm)
    return error_of(y, a.value @ b.value, torch.zeros(m, n), out)


# On two dims: one product that communicates along one of them only, and one along the other.
ALONG_0: dict[str, Any] = {"x": (R, R), "w": (S1, R), "strategy": "N,none"}
ALONG_1: dict[str, Any] = {"x": (R, R), "w": (R, S1), "strategy": "none,N"}


@pytest.mark.thorough
@pytest.mark.parametrize("together", [True, False])
@on_ranks(4)
def test_plans_without_a_common_group(together: bool) -> None:
    """Ranks that communicate along different mesh dims, and then make the same products."""
    rest = r"float32, partials in float32, strategy '\w+,\w+', algorithm 'auto', "
    rest += r"on the cpu mesh \[\[0, 1\], \[2, 3\]\]\)"
    pattern = (
        r"CollectiveMismatchError: the ranks are in different calls: global ranks \[0, 2\] in "
        rf"sharded_matmul\(\[6, 4\] R,R @ \[4, 8\] S1,R -> R,R, {rest}; global ranks \[1, 3\] in "
        rf"sharded_matmul\(\[6, 4\] R,R @ \[4, 8\] R,S1 -> R,R, {rest}\. No data was sent"
    )
    with nullcontext() if together else apart():
        mesh = make_mesh((2, 2))
        begin, given = time.monotonic(), (ALONG_0, ALONG_1)[dist.get_rank() % 2]
        (message,) = messages_of([lambda: multiply(mesh, **given)])
        assert re.match(pattern, message), message
        assert time.monotonic() - begin < AT_ONCE
        assert [multiply(mesh, **each) for each in (ALONG_0, ALONG_1)] == [None, None]


# One rank's product and the other's; the error has what differs.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"strategy 'none'.*strategy 'N'": ({"strategy": "none"}, {"strategy": "N"}),
    r"S0 @ .*S1 @ ": ({"x": (S0,)}, {"x": (S1,)}),
    r"-> R, .*-> S0, ": ({"out": (R,)}, {"out": (S0,)}),
    r"\[6, 4\].*\[7, 4\]": ({"shape": (6, 4, 8)}, {"shape": (7, 4, 8)}),
    r"float32.*bfloat16": ({"dtype": torch.float32}, {"dtype": torch.bfloat16}),
    r"algorithm 'auto'.*algorithm 'ring'": ({"algorithm": "auto"}, {"algorithm": "ring"}),
    # The first communicates nothing: it would return.
    r"\] R @ .*\] S1 @ ": ({"x": (R,), "w": (R,)}, {"x": (S1,), "w": (S0,)}),
}


@on_ranks(2)
def test_what_differs_is_named() -> None:
    mesh = make_mesh((2,))
    own = (dict({"x": (R,), "w": (S1,)}, **each[dist.get_rank()]) for each in DIFFERENT.values())
    messages = messages_of([lambda given=given: multiply(mesh, **given) for given in own])
    for message, pattern in zip(messages, DIFFERENT, strict=True):
        assert re.match(rf"CollectiveMismatchError: .*ranks \[0\] in .*{pattern}", message), message


@on_ranks(2)
def test_gradients_of_different_operands() -> None:
    """Rank 0 needs the gradient of w, rank 1 that of x."""
    mesh = make_mesh((2,))
    x, w = draw("x", (6, 4), mesh, (S0,)).sharded, draw("w", (4, 8), mesh, (S1,)).sharded
    x, w = (x.detach(), w) if dist.get_rank() == 0 else (x, w.detach())
    y = tpkernels.sharded_matmul(x, w, [S0])
    (message,) = messages_of([lambda: y.backward(y.detach())])
    pattern = r"CollectiveMismatchError: .*ranks \[0\] in .*\[4, 6\].*ranks \[1\] in .*\[6, 8\]"
    assert re.match(pattern, message), message


@on_ranks(4)
def test_a_known_product_is_not_compared_again() -> None:
    """And all ranks forget the same ones, here with room for two, even if they use them in other
    orders (products that communicate nothing). The exchanges after each."""
    with (
        mock.patch.object(agreement, "_MOST_KNOWN", 2),
        mock.patch.object(
            Group, "exchange_in_turn", autospec=True, side_effect=Group.exchange_in_turn
        ) as exchanges,
    ):
        mesh, counts = make_mesh((2, 2)), []
        for m in (1, 2, 1, 3, 1, 2):
            assert multiply(mesh, (R, R), (S1, R), shape=(m, 4, 8)) is None
            counts.append(exchanges.call_count // 2)
        for m in (4, 5, *((4, 5), (5, 4))[dist.get_rank() % 2], 6, 4):
            assert multiply(mesh, (S0, R), (R, R), shape=(m, 4, 8), out=(S0, R)) is None
    assert counts == [1, 2, 2, 3, 4, 5]


@on_ranks(2)
def test_a_rank_without_memory_is_not_waited_for() -> None:
    """Rank 1 has no memory for its part of the product; rank 0 waits for its rows."""
    mesh = make_mesh((2,))
    fails = mock.patch.object(torch, "matmul", side_effect=MemoryError("none left"))
    begin = time.monotonic()
    with fails if dist.get_rank() else nullcontext():
        # A product without a common op, and then the gather of its rows.
        (message,) = messages_of([lambda: multiply(mesh, (S0,), (R,), "M")])
    pattern = "MemoryError: none left$" if dist.get_rank() else "PeerLostError: .*rank 1"
    assert re.match(pattern, message), message
    assert time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize(("world", "shape"), [(2, (2,)), (4, (2, 2))])
@on_ranks()
def test_a_workspace_without_memory(shape: tuple[int, ...]) -> None:
    """The other groups of a mesh know nothing of it, so they break. What a product raises whose
    workspace cannot grow, as all ranks of a group find, and then the same one with memory."""
    mesh, whole = make_mesh(shape), (R,) * (len(shape) - 1)
    fails = mock.patch.object(torch, "matmul", side_effect=WorkspaceMemoryError("none left"))
    strategy = ",".join(["M", *["none"] * len(whole)])

    def message() -> str:
        return messages_of([lambda: multiply(mesh, (S0, *whole), (R, *whole), strategy)])[0]

    with fails:
        first = message()
    again = message()
    assert first == "WorkspaceMemoryError: none left"
    assert again.startswith("GroupBrokenError" if len(shape) > 1 else "nothing"), again


@on_ranks(2)
def test_a_known_product_and_a_new_one() -> None:
    """Rank 0 makes a product that both know, rank 1 another one."""
    mesh = make_mesh((2,))
    multiply(mesh, (R,), (S1,), "N")
    begin, strategy = time.monotonic(), ("N", "none")[dist.get_rank()]
    (message,) = messages_of([lambda: multiply(mesh, (R,), (S1,), strategy)])
    calls = ["all_gather\\(", "a new sharded_matmul"][:: 1 if dist.get_rank() == 0 else -1]
    pattern = rf"sharded_matmul\(.*'{strategy}'(?s:.*)is in .*{calls[0]}(?s:.*)is in .*{calls[1]}"
    assert re.match(f"CollectiveMismatchError: {pattern}", message), message
    assert time.monotonic() - begin < AT_ONCE


def known_job(
    timeout: float, odd: int, first: dict[str, Any], second: dict[str, Any]
) -> tuple[str, float]:
    """One rank makes another product than the others; all know both."""
    with mock.patch.object(meshes, "TIMEOUT", timeout):
        mesh = make_mesh((2, 2))
    for given in (first, second):
        assert multiply(mesh, **given) is None
    begin, given = time.monotonic(), first if dist.get_rank() == odd else second
    (message,) = messages_of([lambda: multiply(mesh, **given)])
    return message, time.monotonic() - begin


def test_known_products_with_a_common_group(ranks: RanksFixture) -> None:
    """The products of ranks 0 to 2 have a step along mesh dim 1, where rank 2 finds out, and then
    one along mesh dim 0."""
    both = {"x": (R, R), "w": (S1, S1), "strategy": "N,N"}
    for rank, (message, seconds) in enumerate(ranks(4).run(known_job, TIMEOUT, 3, ALONG_1, both)):
        kind = "CollectiveMismatchError" if rank in (2, 3) else "PeerLostError"
        strategy = "none,N" if rank == 3 else "N,N"
        assert re.match(rf"{kind}: sharded_matmul\(.*'{strategy}'", message), (rank, message)
        assert seconds < AT_ONCE


def test_known_products_without_a_common_group(ranks: RanksFixture) -> None:
    """Rank 0 waits for rank 2, which has gone on, and rank 1 for rank 0. The first to give up tells
    the other one which product it was in. Ranks in messages are those of the group."""
    told = ranks(4).run(known_job, 2.0, 0, ALONG_0, ALONG_1)
    pattern = r"(CollectiveTimeout|PeerLost)Error: sharded_matmul\(.*strategy '{}'(?s:.*)rank {}"
    for (message, seconds), strategy, peer in zip(told, ("N,none", "none,N"), (1, 0), strict=False):
        assert re.match(pattern.format(strategy, peer), message), message
        assert seconds < AT_ONCE
    assert [message for message, _ in told[2:]] == ["nothing", "nothing"]
