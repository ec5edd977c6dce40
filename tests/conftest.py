"""Fixtures and markers of all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from hypothesis import settings

from tests.support import faults
from tests.support.fake_nccl import Build, make_build
from tpkernels.kernels import interpreter_unsupported
from tpkernels.launch import Ranks, fork_server

# An example may run a job on several processes. Its duration does not measure the code under test.
settings.register_profile("tpkernels", deadline=None)
settings.load_profile("tpkernels")

# Shells start background jobs with SIGINT ignored. Tests of Ctrl-C and their child processes would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_groups() -> None:
    """Destroy the process groups of this rank, except the default group. Abandon a group that waits
    for a peer."""
    groups = [group for group in list(c10d._world.pg_map) if group is not dist.group.WORLD]

    def end() -> None:
        for group in groups:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)

    worker = threading.Thread(target=end, daemon=True)
    worker.start()
    worker.join(2.0)


def require_interpreter() -> None:
    """Skip the test if the Triton interpreter is not usable."""
    if (reason := interpreter_unsupported()) is not None:
        pytest.skip(reason)


class RankPools:
    """Running ranks that tests share, one set per world size: ``ranks(world)``."""

    def __init__(self, **env: str) -> None:
        self._env = env
        self._pools: dict[int, Ranks] = {}
        self._used: set[int] = set()

    def __call__(self, world: int) -> Ranks:
        # Ranks that still work on a job of a test, or that lost a process, would disturb the next
        # test.
        for size in [size for size, pool in self._pools.items() if not pool.healthy]:
            self._pools.pop(size).close()
        if world not in self._pools:
            self._pools[world] = Ranks(world, env=self._env, timeout=60.0)
        self._used.add(world)
        return self._pools[world]

    def end_groups(self) -> None:
        """Destroy the groups that a test has left. A gloo group polls a hundred times per second
        until it is destroyed."""
        for pool in [self._pools[world] for world in self._used if world in self._pools]:
            if pool.healthy:
                pool.run(end_groups)
        self._used.clear()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@pytest.fixture(scope="session", autouse=True)
def _fork_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import the modules of the tests once in the fork server, not in the first job of every rank.
    A temporary cache folder hides tuning results of this machine."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    modules = ["pytest", "hypothesis", "torch.distributed.tensor.parallel", "networkx"]
    modules += ["transformers.models.llama.modeling_llama"]
    fork_server(preload=["tests.support.preloaded", *modules])


@pytest.fixture(scope="session")
def _pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def _interpreter_pools() -> Iterator[RankPools]:
    require_interpreter()
    pools = RankPools(TRITON_INTERPRET="1")
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools: RankPools) -> Iterator[RankPools]:
    """Rank processes for a test: ``ranks(4).run(function, ...)``."""
    yield _pools
    _pools.end_groups()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], Ranks]]:
    """Rank processes for a single test: ``fresh_ranks(4)``."""
    with contextlib.ExitStack() as stack:
        yield lambda world: stack.enter_context(faults.watched_ranks(world))


@pytest.fixture
def interpreter_ranks(_interpreter_pools: RankPools) -> Iterator[RankPools]:
    """Rank processes that run Triton kernels under the interpreter: ``interpreter_ranks(4)``."""
    yield _interpreter_pools
    _interpreter_pools.end_groups()


@pytest.fixture(scope="session")
def cxx_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Folder that caches the compiled C++ code of the tests (support/cxx.py)."""
    cache = getattr(pytestconfig, "cache", None)
    return tmp_path_factory.mktemp("cxx") if cache is None else Path(cache.mkdir("cxx"))


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory, cxx_cache: Path) -> Build:
    """``fake_nccl(without=[...])``: a libnccl that the test controls, with separate state."""
    return make_build(tmp_path_factory.mktemp("nccl"), cxx_cache)


@pytest.fixture(scope="session")
def cuda_driver(cxx_cache: Path) -> str:
    """A CUDA driver whose device is the CPU (support/emulated.py)."""
    from tests.support import emulated

    return str(emulated.build_driver(cxx_cache))


@pytest.fixture
def change_owner(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Give a file to a different user. Without root, pretend to be a different user instead."""
    nobody = 65534

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, nobody, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: nobody)

    return give


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("gpu"):
        needed = marker.args[0] if marker.args else 1
        present = torch.cuda.device_count()
        if present < needed:
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, this machine has {present}")
