"""Ranks that are in different products: each learns both, before anything is sent, or, of products
that all know, while they wait."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    rest += r"on a cpu mesh of 2 x 2 \(a, b\), ranks 0 to 3\)"
    pattern = (
        r"CollectiveMismatchError: the ranks are in different products: global ranks 0, 2 in "
        rf"sharded_matmul\(\[6, 4\] R,R @ \[4, 8\] S1,R -> R,R, {rest}; global ranks 1, 3 in "
        rf"sharded_matmul\(\[6, 4\] R,R @ \[4, 8\] R,S1 -> R,R, {rest}\. Nothing has been sent"
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
        assert re.match(rf"CollectiveMismatchError: .*rank 0 in .*{pattern}", message), message


@on_ranks(2)
def test_gradients_of_different_operands() -> None:
    """Rank 0 needs the gradient of w, rank 1 that of x."""
    mesh = make_mesh((2,))
    x, w = draw("x", (6, 4), mesh, (S0,)).sharded, draw("w", (4, 8), mesh, (S1,)).sharded
    x, w = (x.detach(), w) if dist.get_rank() == 0 else (x, w.detach())
    y = tpkernels.sharded_matmul(x, w, [S0])
    (message,) = messages_of([lambda: y.backward(y.detach())])
    pattern = r"CollectiveMismatchError: .* rank 0 in .*\[4, 6\].*; global rank 1 in .*\[6, 8\]"
    assert re.match(pattern, message), message


@contextmanager
def counted() -> Iterator[list[str]]:
    """The exchanges of this rank."""
    found: list[str] = []
    usual = Group.exchange_in_turn

    def count(group: Any, purpose: str, *args: Any) -> Any:
        found.append(purpose)
        return usual(group, purpose, *args)

    with mock.patch.object(Group, "exchange_in_turn", count):
        yield found


@on_ranks(4)
def test_a_known_product_is_not_compared_again() -> None:
    """And all ranks forget the same ones. The exchanges after each product: of two that are known,
    and with room for two."""
    counts: list[list[int]] = [[], []]
    mesh = make_mesh((2, 2))
    with counted() as found:
        for given in (ALONG_0, ALONG_0, ALONG_1, ALONG_0, ALONG_1):
            assert multiply(mesh, **given) is None
            counts[0].append(len(found))
    with mock.patch.object(agreement, "_MOST_KNOWN", 2), counted() as found:
        mesh = make_mesh((2, 2))
        for m in (1, 2, 1, 3, 1, 2):
            assert multiply(mesh, (R, R), (S1, R), shape=(m, 4, 8)) is None
            counts[1].append(len(found) // 2)
    known, forgotten = counts
    assert (known, forgotten) == ([2, 2, 4, 4, 4], [1, 2, 2, 3, 4, 5])


@on_ranks(2)
def test_using_a_product_does_not_keep_it() -> None:
    """The ranks use what they know in different orders, by products that communicate nothing."""
    mesh = make_mesh((2,))
    with mock.patch.object(agreement, "_MOST_KNOWN", 2):
        for m in (2, 4, *((2, 4), (4, 2))[dist.get_rank()], 6, 2):
            assert multiply(mesh, (S0,), (R,), shape=(m, 4, 8), out=(S0,)) is None


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
    pattern = (
        r"rank 0 is in all_gather\((?s:.*)is in a new sharded_matmul",
        r"sharded_matmul\(.*'none'.*rank 0 .*is in all_gather\(",
    )[dist.get_rank()]
    assert re.match(f"CollectiveMismatchError: {pattern}", message), message
    assert dist.get_rank() == 0 or time.monotonic() - begin < AT_ONCE


@on_ranks(4)
def test_a_failure_in_one_group_is_told_in_the_others() -> None:
    """Rank 3 makes another product than the others; all know both. Those of the others have a step
    along mesh dim 1, where rank 2 finds out, and then one along mesh dim 0."""
    mesh, both = make_mesh((2, 2)), {"x": (R, R), "w": (S1, S1), "strategy": "N,N"}
    for given in (ALONG_1, both):
        assert multiply(mesh, **given) is None
    begin, given = time.monotonic(), (both, both, both, ALONG_1)[dist.get_rank()]
    rank = dist.get_rank()
    (message,), seconds = messages_of([lambda: multiply(mesh, **given)]), time.monotonic() - begin
    kind = "CollectiveMismatchError" if rank in (2, 3) else "PeerLostError"
    assert message.startswith(kind), (rank, message)
    assert seconds < AT_ONCE


# Known products, which are compared while ranks wait.


def known_job(together: bool, behind: int) -> tuple[list[str], float]:
    """Rank 0 makes a product along mesh dim 0, the others one along mesh dim 1 and before that
    ``behind`` products that communicate nothing, which do not count; all know all of them."""
    with nullcontext() if together else apart():
        mesh = make_mesh((2, 2))
        alone: dict[str, Any] = {"x": (R, R), "w": (R, R), "strategy": "none,none"}
        for given in (ALONG_0, ALONG_1, alone):
            assert multiply(mesh, **given) is None
        if dist.get_rank():
            for _ in range(behind):
                multiply(mesh, **alone)
        begin, given = time.monotonic(), ALONG_1 if dist.get_rank() else ALONG_0
        messages = messages_of([lambda: multiply(mesh, **given)])
        return messages, time.monotonic() - begin


@pytest.mark.parametrize(
    ("together", "behind"), [(True, 0), pytest.param(False, 3, marks=pytest.mark.thorough)]
)
def test_known_products_without_a_common_group(
    ranks: RanksFixture, together: bool, behind: int
) -> None:
    """Rank 0 waits for rank 2, which has gone on, and rank 1 for rank 0."""
    told = ranks(4).run(known_job, together, behind)
    pattern = r"ProductMismatchError: the ranks are in different products: as number 3 on the "
    messages = [message for (message,), _ in told[:2]]
    assert any(re.match(pattern, message) for message in messages), messages
    for (message,), seconds in told[:2]:
        assert "strategy 'N,none'" in message and "strategy 'none," in message, message
        assert seconds < AT_ONCE / 2
    assert [message for (message,), _ in told[2:]] == ["nothing", "nothing"]


@pytest.mark.thorough
@on_ranks(2)
def test_a_late_rank_is_in_the_same_products() -> None:
    """One rank after the other comes late to products that all make; meanwhile the other one is
    some ahead of it, and waits."""
    mesh = make_mesh((2,))
    alone: dict[str, Any] = {"x": (R,), "w": (R,), "strategy": "none"}
    wrong = []
    for late in (None, 0, 1):
        if dist.get_rank() == late:
            time.sleep(2.5 * agreement._PATIENCE)
        wrong += [multiply(mesh, **alone), multiply(mesh, **alone)]
        wrong.append(multiply(mesh, (R,), (S1,), "N"))
    assert wrong == [None] * 9


def stuck_job() -> tuple[list[str], float]:
    """One rank does not come, and the stores do not answer the other."""
    with mock.patch.object(meshes, "TIMEOUT", 1.0):
        mesh = make_mesh((2,))
    multiply(mesh, (S1,), (S0,), "K")
    if dist.get_rank() == 1:
        time.sleep(1.8)
        return [], 0.0
    asked = mock.Mock(side_effect=lambda *_: time.sleep(60))
    begin = time.monotonic()
    with mock.patch.object(agreement.History, "_exchanged", asked):
        messages = messages_of([lambda: multiply(mesh, (S1,), (S0,), "K")])
    assert asked.called
    return messages, time.monotonic() - begin


@pytest.mark.thorough
def test_a_store_that_hangs_does_not_keep_a_rank(ranks: RanksFixture) -> None:
    (messages, seconds), _ = ranks(2).run(stuck_job)
    assert re.match(r"CollectiveTimeoutError: .*rank 1", messages[0]) and seconds < 2.5, messages
