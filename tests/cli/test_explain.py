"""``tpkernels explain --model``, and rates that ``tpkernels tune --machine`` measured."""

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
from tpkernels.planning.cost import Profile, machine_named
from tpkernels.planning.machine import Machine
from tpkernels.timing import Samples

SMOLLM = "explain --model smollm2-135m --tp 2 --machine this"


def layers_of(command: str) -> dict[tuple[str, int], dict[str, Any]]:
    layers = json.loads(invoke(*command.split(), "--json").stdout)["layers"]
    return {(layer["phase"], layer["tp"]): layer for layer in layers}


def test_a_layer_on_several_numbers_of_ranks() -> None:
    text = " ".join(invoke(*LAYERS.split()).output.split())
    assert "One layer of llama3-70b on NVIDIA H200 SXM, rows: prefill 8192 and decode 64" in text
    assert text.count("no gain") >= 2  # one rank, in both phases
    assert "prefill 8 1 204 MiB 2.24 1.36 3.60 2.66 1.35x" in text
    layers = layers_of(LAYERS)
    assert len(layers) == 14
    alone = layers["prefill", 1]
    assert alone["communication"] == 0 and alone["overlapped"] == alone["matmul"]
    for (phase, tp), layer in layers.items():
        assert layer["unfused"] == pytest.approx(layer["matmul"] + layer["communication"])
        assert layer["matmul"] <= layer["overlapped"] <= layer["unfused"] * (1 + 1e-9)
        assert layer["matmul"] >= alone["matmul"] / tp or phase == "decode"
    # The network is slower than the links of a node.
    step = layers["prefill", 16]["communication"] - layers["prefill", 8]["communication"]
    assert step > layers["prefill", 8]["communication"] - layers["prefill", 4]["communication"]


def test_a_core_that_copies_does_not_multiply() -> None:
    layer = layer_costs("smollm2-135m", 2, 64, True, machine_named("zen4-core"), 2)
    assert layer["overlapped"] >= 0.98 * layer["unfused"]


def measured_in_turn() -> tuple[Machine, Profile]:
    """On a rank: what is measured if rank 1 takes twice as long as rank 0, and every other
    repetition twice as long as the shortest."""
    size, slower = 64, 1 + dist.get_rank()

    def measure(variants: Iterable[str], **_: object) -> dict[str, Samples]:
        seconds = {
            "local_matmul": slower * 2 * size**3 / 2e9,
            "matmul": slower * 2 * size**3 / 1e9,
            "copy": slower * 2 * (1 << 20) / 2e10,
            "small": slower * 1e-5,
            "large": slower * 1e-5 + 8e-3,
        }
        return {name: Samples((2 * seconds[name], seconds[name]), 1, 1) for name in variants}

    with (
        mock.patch.object(probes, "measure", measure),
        mock.patch.object(probes, "last_level_cache_bytes", lambda _: 1 << 18),
        mock.patch.dict(probes._SIZE, {"cpu": size}),
    ):
        return probes.measure_machine("cpu", "2026-11-22")


def test_this_machine_is_what_tune_measured(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (machine, profile), other = ranks(2).run(measured_in_turn)
    assert (machine, profile) == other
    # The slowest rank's.
    assert profile.flops == pytest.approx((1e9,) * 3) and profile.bandwidth == pytest.approx(1e10)
    assert profile.within.call == 2e-5
    assert profile.within.bandwidth == pytest.approx((8 << 20) / 8e-3)
    store.save_profile(machine, profile)
    layer = layers_of(f"{SMOLLM} --decode 1")["decode", 2]
    weights = 576 * 480 + 288 * 576 + 576 * 1536 + 768 * 576  # elements on a rank
    elements = weights + (576 + 480) + (288 + 576) + (576 + 1536) + (768 + 576)
    assert layer["weight_bytes"] == 2 * weights
    assert layer["matmul"] == pytest.approx(2 * weights / 1e9 + 2 * elements / 1e10)


@pytest.mark.slow
def test_tune_measures_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned = invoke("tune", "--machine", "--tp", "2")
    assert tuned.exit_code == 0 and "TFLOP/s" in tuned.output, tuned.output
    assert "2 ranks x 1 thread" in " ".join(invoke(*SMOLLM.split()).output.split())
