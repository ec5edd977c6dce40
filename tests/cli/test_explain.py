"""``tpkernels explain --model``, and the rates measured by ``tpkernels tune --machine``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.cli.test_cli import LAYERS, invoke
from tpkernels.bench import probes
from tpkernels.cli.explain import layer_costs
from tpkernels.launch import Ranks
from tpkernels.planning import store
from tpkernels.planning.cost import Profile, get_preset
from tpkernels.planning.machine import Machine
from tpkernels.timing import Samples

SMOLLM = "explain --model smollm2-135m --tp 2 --machine this"


def parse_layers(command: str) -> dict[tuple[str, int], dict[str, Any]]:
    layers = json.loads(invoke(*command.split(), "--json").stdout)["layers"]
    return {(layer["phase"], layer["tp"]): layer for layer in layers}


def test_a_layer_on_several_world_sizes() -> None:
    output = " ".join(invoke(*LAYERS.split()).output.split())
    assert "One layer of llama3-70b on NVIDIA H200 SXM, rows: prefill 8192 and decode 64" in output
    assert output.count("no gain") >= 2  # a single rank, in both phases
    assert "prefill 8 1 204 MiB 2.24 1.36 3.60 2.66 1.35x" in output
    layers = parse_layers(LAYERS)
    assert len(layers) == 14
    single = layers["prefill", 1]
    assert single["communication"] == 0 and single["overlapped"] == single["matmul"]
    for (phase, tp), layer in layers.items():
        assert layer["unfused"] == pytest.approx(layer["matmul"] + layer["communication"])
        assert layer["matmul"] <= layer["overlapped"] <= layer["unfused"] * (1 + 1e-9)
        assert layer["matmul"] >= single["matmul"] / tp or phase == "decode"
    # The network is slower than the links within a node.
    step = layers["prefill", 16]["communication"] - layers["prefill", 8]["communication"]
    assert step > layers["prefill", 8]["communication"] - layers["prefill", 4]["communication"]


def test_copies_on_a_core_do_not_overlap_matmuls() -> None:
    layer = layer_costs("smollm2-135m", 2, 64, True, get_preset("zen4-core"), 2)
    assert layer["overlapped"] >= 0.98 * layer["unfused"]


def measure_fake_machine() -> tuple[Machine, Profile]:
    """Measure rates with fake times: rank 1 is twice as slow as rank 0, and the first of two
    repetitions twice as slow as the second."""
    size, slowdown = 64, 1 + dist.get_rank()

    def measure(variants: Iterable[str], **_: object) -> dict[str, Samples]:
        seconds = {
            "local_matmul": slowdown * 2 * size**3 / 2e9,
            "matmul": slowdown * 2 * size**3 / 1e9,
            "copy": slowdown * 2 * (1 << 20) / 2e10,
            "small": slowdown * 1e-5,
            "large": slowdown * 1e-5 + 8e-3,
        }
        return {name: Samples((2 * seconds[name], seconds[name]), 1, 1) for name in variants}

    with (
        mock.patch.object(probes, "measure", measure),
        mock.patch.object(probes, "last_level_cache_bytes", lambda _: 1 << 18),
        mock.patch.dict(probes._SIZE, {"cpu": size}),
    ):
        return probes.measure_machine("cpu", "2026-11-22")


def test_machine_this_uses_the_measured_rates(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (machine, profile), rank_1_result = ranks(2).run(measure_fake_machine)
    assert (machine, profile) == rank_1_result
    # rates of the slowest rank
    assert profile.flops == pytest.approx((1e9,) * 3) and profile.bandwidth == pytest.approx(1e10)
    assert profile.within.call == 2e-5
    assert profile.within.bandwidth == pytest.approx((8 << 20) / 8e-3)
    store.save_profile(machine, profile)
    layer = parse_layers(f"{SMOLLM} --decode 1")["decode", 2]
    weights = 576 * 480 + 288 * 576 + 576 * 1536 + 768 * 576  # elements per rank
    elements = weights + (576 + 480) + (288 + 576) + (576 + 1536) + (768 + 576)
    assert layer["weight_bytes"] == 2 * weights
    assert layer["matmul"] == pytest.approx(2 * weights / 1e9 + 2 * elements / 1e10)


@pytest.mark.slow
def test_tune_measures_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned = invoke("tune", "--machine", "--tp", "2")
    assert tuned.exit_code == 0 and "TFLOP/s" in tuned.output, tuned.output
    assert "2 ranks x 1 thread" in " ".join(invoke(*SMOLLM.split()).output.split())
