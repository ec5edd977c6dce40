"""Ranks in different products that all know find out while they wait."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.mesh.test_agreement import ALONG_0, ALONG_1, AT_ONCE, multiply
from tests.support import meshes
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, R, make_mesh
from tests.support.ranked import apart, messages_of
from tpkernels.mesh import agreement


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
    ("together", "behind"),
    [
        (True, 0),
        pytest.param(False, 3, marks=pytest.mark.thorough),
    ],
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


def slow_job() -> list[str | None]:
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
    return wrong


@pytest.mark.thorough
def test_a_late_rank_is_in_the_same_products(ranks: RanksFixture) -> None:
    assert ranks(2).run(slow_job) == [[None] * 9] * 2


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
