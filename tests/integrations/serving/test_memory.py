"""The memory of a rank of ``tpkernels serve``, whose batches have any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpkernels
from tpkernels.launch import Ranks
from tpkernels.local.packed import packed_product

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")


def growth_job() -> tuple[float, float]:
    """MiB by which a rank grows in products of 300 numbers of rows, by four weights; and in the
    same again, with as many rows."""
    weights = [tpkernels.pack(torch.ones(32, n)) for n in (48, 64, 96, 128)]
    sizes = [_resident()]
    for _ in range(2):
        for rows in range(1, 301):
            for w in weights:
                packed_product(torch.ones(rows, 32), w)
        sizes.append(_resident())
    return sizes[1] - sizes[0], sizes[2] - sizes[1]


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_batches_of_all_sizes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpkernels.integrations.transformers.serving.server import limits

    for name in limits():
        monkeypatch.delenv(name, raising=False)
    grown = {}
    for what, env in (("unbounded", {}), ("bounded", limits())):
        with Ranks(1, env=env) as ranks:
            grown[what], again = ranks.run(growth_job, timeout=120)[0]
            assert again < 0.2 * grown[what] + 4, (what, grown, again)
    if grown["unbounded"] < 50:
        pytest.skip(f"this oneDNN keeps little: {grown}")
    assert grown["bounded"] < 0.5 * grown["unbounded"], grown


def test_the_user_sets_other_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpkernels.integrations.transformers.serving.server import limits

    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert limits()["LRU_CACHE_CAPACITY"] == "7"
