"""The pool's limit, from the environment."""

from __future__ import annotations

import pytest
import torch

from tests.support.processes import python
from tpkernels import _C, defaults
from tpkernels.launch import Ranks
from tpkernels.local.memory import empty


def limit_job() -> tuple[dict[str, int], bool]:
    """The pool while a result is in use, and whether the result is torch's own memory."""
    x = empty([4 << 20], torch.float32, torch.device("cpu"))
    return _C.calls.result_pool(), x.untyped_storage().resizable()


def test_the_limit_is_read_from_the_environment() -> None:
    for limit, in_use in ((0, 0), (20_000_000, 16 << 20)):
        with Ranks(1, env={"TPKERNELS_RESULT_POOL_BYTES": str(limit)}) as ranks:
            pool = {"limit": limit, "idle": 0, "in_use": in_use}
            assert ranks.run(limit_job) == [(pool, in_use == 0)]


@pytest.mark.parametrize("limit", ["", "-1", "1.5", "256M", "1_000", "9" * 19, "\u0663"])
def test_a_malformed_limit_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("TPKERNELS_RESULT_POOL_BYTES", limit)
    with pytest.raises(
        ValueError, match=r"TPKERNELS_RESULT_POOL_BYTES is '.*'; set it to a number"
    ):
        defaults.result_pool_bytes()


@pytest.mark.thorough
def test_tensors_may_outlive_the_interpreter() -> None:
    code = (
        "import torch, tpkernels; from tpkernels.local.memory import empty;"
        "torch.kept = empty([4 << 20], torch.float32, torch.device('cpu'))"
    )
    ended = python("-c", code, TPKERNELS_RESULT_POOL_BYTES="100000000")
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
