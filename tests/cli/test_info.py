"""``tpkernels info``: available features, and the reasons why features are unavailable."""

from __future__ import annotations

import errno
import importlib
import json
import os

import pytest
import torch

import tpkernels
from tests.cli.test_cli import invoke
from tpkernels import _C, cuda, nccl
from tpkernels.planning.op_spec import OPS


def test_info_shows_available_features() -> None:
    shown = invoke("info").output
    for expected in (tpkernels.__version__, torch.__version__, "CUDA kernels", "CUDA driver", *OPS):
        assert expected in shown
    assert (
        "pipelined overlaps communication with a matmul, but this op does not contain a matmul"
        in " ".join(shown.split())
    )
    first = [line.split()[0] for line in shown.splitlines()[:6]]
    assert first == ["tpkernels", "torch", "processor", "cores", "memory", "GPUs"]
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["vector_unit"]["in_use"] in facts["vector_unit"]["available"]
    assert facts["devices"]["usable_cores"] == sorted(os.sched_getaffinity(0))
    assert {"calls.Collective", "cuda.Kernels"} <= set(facts["extension"]["holds"])
    assert set(facts["local_matmul"].values()) <= {"native", "converted"}
    assert facts["cuda"]["kernels"].startswith(("embedded: sm_", "NVRTC ", "none: "))
    assert facts["cuda"]["driver"]
    cpu_algorithms = facts["algorithms"]["cpu"]
    assert set(cpu_algorithms) == set(OPS)
    obstacles = cpu_algorithms["all_gather_matmul"]
    usable = [name for name in obstacles if obstacles[name] is None]
    assert usable == ["unfused", "ring", "direct", "pipelined"]
    assert "TRITON_INTERPRET=1" in obstacles["fused"]
    assert "overlaps communication with a matmul" in cpu_algorithms["all_reduce"]["pipelined"]


def test_info_shows_shared_memory_support(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(invoke("info", "--json").stdout)["shared_memory"] is None
    assert "available between ranks of one user" in " ".join(invoke("info").output.split())

    def refuse(pid: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(_C.host, "open_pidfd", refuse)
    shown = " ".join(invoke("info").output.split())
    assert "none: this process cannot share memory: pidfd_open: Operation not permitted" in shown


def test_info_shows_the_nccl_library(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"path": "/a/libnccl.so.2", "version": "2.18.5", "origin": "from a wheel"}
    monkeypatch.setattr(nccl, "facts", lambda: facts)
    shown = " ".join(invoke("info").output.split())
    assert "2.18.5, from a wheel: /a/libnccl.so.2" in shown
    assert json.loads(invoke("info", "--json").stdout)["nccl"] == facts
    monkeypatch.setattr(nccl, "facts", lambda: {"unsupported": "no NCCL: nobody has one"})
    assert "no NCCL: nobody has one" in " ".join(invoke("info").output.split())


def test_remedies_are_not_interpreted_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would interpret the extra of a `pip install` as markup."""
    remedy = "pip install 'tpkernels[cu13]' (or [cu12])"
    monkeypatch.setattr(cuda, "image_status", lambda: f"none: {remedy}")
    for name in ("tpkernels.algorithms.backends", "tpkernels.bench.specs"):
        module = importlib.import_module(name)
        monkeypatch.setattr(
            module, "unsupported", lambda algorithm, *_: remedy if algorithm == "fused" else None
        )
    shown = " ".join(invoke("info").output.split())
    assert f"none: {remedy}" in shown and f"fused {remedy}" in shown
    problem = ["--op", "matmul_all_reduce", "--m", "64", "--n", "64", "--k", "64"]
    assert remedy in invoke("explain", *problem).output
