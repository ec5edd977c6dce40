"""Ranks that run different sharded matmuls. Every rank raises an error with the different matmuls
before data is sent. For cached matmuls, the checks of the ops raise the error."""

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
from tests.support.meshes import S0, S1, Placements, R, draw, find_error, make_mesh
from tests.support.ranked import TIMEOUT, collect_messages, on_ranks, separate_hosts
from tpkernels.errors import WorkspaceMemoryError
from tpkernels.groups.group import Group
from tpkernels.mesh import agreement

PROMPT = TIMEOUT / 2  # s; ranks raise long before the timeout


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
    """Run a sharded matmul, by default with a replicated result. Return its error or None."""
    m, k, n = shape
    a, b = draw("x", (m, k), mesh, x, dtype), draw("w", (k, n), mesh, w, dtype)
    out = out or (R,) * mesh.ndim
    y = tpkernels.sharded_matmul(a.sharded, b.sharded, out, strategy, algorithm=algorithm)
    return find_error(y, a.value @ b.value, torch.zeros(m, n), out)


# Two matmuls on a 2-D mesh. The first communicates along mesh dim 0 only, the second along dim 1.
ALONG_0: dict[str, Any] = {"x": (R, R), "w": (S1, R), "strategy": "N,none"}
ALONG_1: dict[str, Any] = {"x": (R, R), "w": (R, S1), "strategy": "none,N"}


@pytest.mark.thorough
@pytest.mark.parametrize("together", [True, False])
@on_ranks(4)
def test_plans_without_a_common_group(together: bool) -> None:
    """Even and odd ranks communicate along different mesh dims, and all raise a mismatch error.
    Then all ranks run the same matmuls without error."""
    suffix = r"float32, partials in float32, strategy '\w+,\w+', algorithm 'auto', "
    suffix += r"on the cpu mesh \[\[0, 1\], \[2, 3\]\]\)"
    pattern = (
        r"CollectiveMismatchError: the ranks are in different calls: global ranks \[0, 2\] in "
        rf"sharded_matmul\(\[6, 4\] R,R @ \[4, 8\] S1,R -> R,R, {suffix}; global ranks \[1, 3\] in "
        rf"sharded_matmul\(\[6, 4\] R,R @ \[4, 8\] R,S1 -> R,R, {suffix}\. No data was sent"
    )
    with nullcontext() if together else separate_hosts():
        mesh = make_mesh((2, 2))
        begin, local_matmul = time.monotonic(), (ALONG_0, ALONG_1)[dist.get_rank() % 2]
        (message,) = collect_messages([lambda: multiply(mesh, **local_matmul)])
        assert re.match(pattern, message), message
        assert time.monotonic() - begin < PROMPT
        assert [multiply(mesh, **matmul) for matmul in (ALONG_0, ALONG_1)] == [None, None]


# Pattern of the difference in the error -> the matmuls of rank 0 and rank 1.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"strategy 'none'.*strategy 'N'": ({"strategy": "none"}, {"strategy": "N"}),
    r"S0 @ .*S1 @ ": ({"x": (S0,)}, {"x": (S1,)}),
    r"-> R, .*-> S0, ": ({"out": (R,)}, {"out": (S0,)}),
    r"\[6, 4\].*\[7, 4\]": ({"shape": (6, 4, 8)}, {"shape": (7, 4, 8)}),
    r"float32.*bfloat16": ({"dtype": torch.float32}, {"dtype": torch.bfloat16}),
    r"algorithm 'auto'.*algorithm 'ring'": ({"algorithm": "auto"}, {"algorithm": "ring"}),
    # Rank 0 would return, because its matmul does not communicate.
    r"\] R @ .*\] S1 @ ": ({"x": (R,), "w": (R,)}, {"x": (S1,), "w": (S0,)}),
}


@on_ranks(2)
def test_the_error_shows_the_difference() -> None:
    mesh = make_mesh((2,))
    local_matmuls = (
        dict({"x": (R,), "w": (S1,)}, **pair[dist.get_rank()]) for pair in DIFFERENT.values()
    )
    messages = collect_messages(
        [lambda matmul=matmul: multiply(mesh, **matmul) for matmul in local_matmuls]
    )
    for message, pattern in zip(messages, DIFFERENT, strict=True):
        assert re.match(rf"CollectiveMismatchError: .*ranks \[0\] in .*{pattern}", message), message


@on_ranks(2)
def test_gradients_of_different_operands() -> None:
    """Rank 0 needs the gradient of w, and rank 1 the gradient of x. Both raise a mismatch error."""
    mesh = make_mesh((2,))
    x, w = draw("x", (6, 4), mesh, (S0,)).sharded, draw("w", (4, 8), mesh, (S1,)).sharded
    x, w = (x.detach(), w) if dist.get_rank() == 0 else (x, w.detach())
    y = tpkernels.sharded_matmul(x, w, [S0])
    (message,) = collect_messages([lambda: y.backward(y.detach())])
    pattern = r"CollectiveMismatchError: .*ranks \[0\] in .*\[4, 6\].*ranks \[1\] in .*\[6, 8\]"
    assert re.match(pattern, message), message


@on_ranks(4)
def test_a_cached_matmul_is_not_compared_again() -> None:
    """Count the exchanges after each matmul, with a cache of two entries. All ranks evict the same
    entries, even if they run matmuls without communication in different orders."""
    with (
        mock.patch.object(agreement, "_MAX_CACHED", 2),
        mock.patch.object(
            Group, "lock_and_exchange", autospec=True, side_effect=Group.lock_and_exchange
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
def test_peers_of_a_rank_without_memory_raise_promptly() -> None:
    """Rank 1 runs out of memory in its local matmul while rank 0 waits for its rows."""
    mesh = make_mesh((2,))
    out_of_memory = mock.patch.object(torch, "matmul", side_effect=MemoryError("none left"))
    begin = time.monotonic()
    with out_of_memory if dist.get_rank() else nullcontext():
        # A local matmul, followed by a gather of the rows.
        (message,) = collect_messages([lambda: multiply(mesh, (S0,), (R,), "M")])
    pattern = "MemoryError: none left$" if dist.get_rank() else "PeerLostError: .*rank 1"
    assert re.match(pattern, message), message
    assert time.monotonic() - begin < PROMPT


@pytest.mark.parametrize(("world", "shape"), [(2, (2,)), (4, (2, 2))])
@on_ranks()
def test_a_workspace_without_memory(shape: tuple[int, ...]) -> None:
    """No rank of the group can grow the workspace of a matmul, and the matmul raises. On a 1-D mesh
    the next matmul succeeds. On a 2-D mesh it raises, because groups along the second dim cannot
    see the reason and break."""
    mesh, replicated = make_mesh(shape), (R,) * (len(shape) - 1)
    out_of_memory = mock.patch.object(
        torch, "matmul", side_effect=WorkspaceMemoryError("none left")
    )
    strategy = ",".join(["M", *["none"] * len(replicated)])

    def message() -> str:
        return collect_messages(
            [lambda: multiply(mesh, (S0, *replicated), (R, *replicated), strategy)]
        )[0]

    with out_of_memory:
        first = message()
    again = message()
    assert first == "WorkspaceMemoryError: none left"
    assert again.startswith("GroupBrokenError" if len(shape) > 1 else "nothing"), again


@on_ranks(2)
def test_a_cached_and_a_new_matmul() -> None:
    """Rank 0 runs a matmul that both ranks have cached, and rank 1 a new matmul. Both raise a
    mismatch error."""
    mesh = make_mesh((2,))
    multiply(mesh, (R,), (S1,), "N")
    begin, strategy = time.monotonic(), ("N", "none")[dist.get_rank()]
    (message,) = collect_messages([lambda: multiply(mesh, (R,), (S1,), strategy)])
    calls = ["all_gather\\(", "a new sharded_matmul"][:: 1 if dist.get_rank() == 0 else -1]
    pattern = rf"sharded_matmul\(.*'{strategy}'(?s:.*)is in .*{calls[0]}(?s:.*)is in .*{calls[1]}"
    assert re.match(f"CollectiveMismatchError: {pattern}", message), message
    assert time.monotonic() - begin < PROMPT


def cached_job(
    timeout: float, odd: int, first: dict[str, Any], second: dict[str, Any]
) -> tuple[str, float]:
    """Run ``first`` on rank ``odd`` and ``second`` on the remaining ranks, after all ranks cached
    both matmuls. Return the error and the seconds until it is raised."""
    with mock.patch.object(meshes, "TIMEOUT", timeout):
        mesh = make_mesh((2, 2))
    for matmul in (first, second):
        assert multiply(mesh, **matmul) is None
    begin, matmul = time.monotonic(), first if dist.get_rank() == odd else second
    (message,) = collect_messages([lambda: multiply(mesh, **matmul)])
    return message, time.monotonic() - begin


def test_cached_matmuls_with_a_common_group(ranks: RanksFixture) -> None:
    """Ranks 0 to 2 run a step along mesh dim 1, where rank 2 detects the mismatch with rank 3, then
    a step along mesh dim 0. All ranks raise promptly."""
    both = {"x": (R, R), "w": (S1, S1), "strategy": "N,N"}
    for rank, (message, seconds) in enumerate(ranks(4).run(cached_job, TIMEOUT, 3, ALONG_1, both)):
        kind = "CollectiveMismatchError" if rank in (2, 3) else "PeerLostError"
        strategy = "none,N" if rank == 3 else "N,N"
        assert re.match(rf"{kind}: sharded_matmul\(.*'{strategy}'", message), (rank, message)
        assert seconds < PROMPT


def test_cached_matmuls_without_a_common_group(ranks: RanksFixture) -> None:
    """Rank 0 waits for rank 2, which has already returned, and rank 1 waits for rank 0. The first
    rank that gives up reports its matmul to its peer. Messages contain group ranks."""
    results = ranks(4).run(cached_job, 2.0, 0, ALONG_0, ALONG_1)
    pattern = r"(CollectiveTimeout|PeerLost)Error: sharded_matmul\(.*strategy '{}'(?s:.*)rank {}"
    for (message, seconds), strategy, peer in zip(
        results, ("N,none", "none,N"), (1, 0), strict=False
    ):
        assert re.match(pattern.format(strategy, peer), message), message
        assert seconds < PROMPT
    assert [message for message, _ in results[2:]] == ["nothing", "nothing"]
