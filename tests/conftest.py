"""Fixtures and markers that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_nccl import Build, make_build
from hypothesis import settings

from tpkernels.launch import Ranks, fork_server

# An example may run a job on several processes: its time says nothing about the code under test.
settings.register_profile("tpkernels", deadline=None)
settings.load_profile("tpkernels")


class RankPools:
    """``ranks(world)``: open ranks, kept from test to test, one set per world size."""

    def __init__(self, **env: str) -> None:
        self._env = env
        self._pools: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        # Ranks that a test left at work, or with a member dead, would disturb the next test.
        for size in [size for size, pool in self._pools.items() if not pool.healthy]:
            self._pools.pop(size).close()
        if world not in self._pools:
            self._pools[world] = Ranks(world, env=self._env)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Imports what test modules import once, instead of in every rank's first job. The compiler
    and DTensor take seconds."""
    compiler = ["torch._dynamo", "torch._inductor.pattern_matcher"]
    fork_server(preload=["pytest", "hypothesis", "torch.distributed.tensor.parallel", *compiler])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Rank processes for a test: ``ranks(4).run(function, ...)``."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def interpreting() -> Iterator[RankPools]:
    """The same, where Triton kernels run under their interpreter."""
    pools = RankPools(TRITON_INTERPRET="1")
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``fake_nccl(without=[...])``: a libnccl that the test commands, with state of its own."""
    return make_build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="session")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> str:
    """A CUDA driver whose device is the CPU (tests/emulated.py); kept in pytest's cache."""
    import emulated

    cache = getattr(pytestconfig, "cache", None)
    folder = tmp_path_factory.mktemp("emulated") if cache is None else cache.mkdir("emulated")
    return str(emulated.build_driver(Path(folder)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("gpu"):
        needed = marker.args[0] if marker.args else 1
        present = torch.cuda.device_count()
        if present < needed:
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, this machine has {present}")
