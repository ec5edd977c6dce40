"""``tpkernels plan``, and ``tpkernels tune --machine``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_cli import LAYERS, PRODUCT, invoke
from tpkernels.bench.probes import MachineReport, profile_of
from tpkernels.bench.sweep import MODELS
from tpkernels.cli.plan import layer_times
from tpkernels.planning import store
from tpkernels.planning.cost import Rates, machine_named
from tpkernels.planning.machine import this_machine


def test_a_product() -> None:
    text = " ".join(invoke(*PRODUCT.split()).output.split())
    assert "[8192, 8192] S0,R @ [8192, 28672] S1,R on a mesh of 2 x 4, NVIDIA H200 SXM" in text
    assert "the fastest: hides" in text and "computes 8x as long" in text
    data = json.loads(invoke(*PRODUCT.split(), "--json").output)
    plans = data["plans"]
    assert data["machine"] == "NVIDIA H200 SXM"
    assert [each["seconds"] for each in plans] == sorted(each["seconds"] for each in plans)
    for each in plans:
        assert each["result"] == "R,R" and each["memory_bytes"] > 0 and each["reason"]
        assert each["exposed_seconds"] == pytest.approx(each["seconds"] - each["product_seconds"])
    least = min(plans, key=lambda each: each["bytes"])
    assert least is not plans[0]  # time decides, not bytes
    gathered = (8192 * 8192 + 8192 * 28672) * 2 * 4  # all ranks but one half each, 8 ranks
    assert least["bytes"] == gathered


def test_partials_in_fp32() -> None:
    product = "plan --m 64 --k 64 --n 64 --mesh 2 --x S1 --w S0 --out S0 --machine h200 --json"
    narrow, wide = (
        next(plan for plan in json.loads(shown.output)["plans"] if plan["strategy"] == "K")
        for shown in (invoke(*product.split(), *more) for more in ((), ("--wire-dtype", "fp32")))
    )
    assert (narrow["bytes"], wide["bytes"]) == (2 * 64 * 64, 4 * 64 * 64)
    assert wide["memory_bytes"] == narrow["memory_bytes"] + 2 * 64 * 64


def test_a_product_on_this_machine() -> None:
    product = "plan --m 64 --k 64 --n 64 --mesh 2 --x S1 --w S0 --dtype fp32"
    shown = invoke(*product.split())
    assert shown.exit_code == 0 and "on a mesh of 2," in shown.output
    apart = invoke(*PRODUCT.replace("8192", "400000").split())
    assert "needs more than the device's 141 GB" in " ".join(apart.output.split())


def test_layers() -> None:
    text = " ".join(invoke(*LAYERS.split()).output.split())
    assert text.count("no gain") >= 2  # one rank, in both phases
    assert re.search(r"prefill 8 1 [^a-z]* 1\.\d\dx", text)  # there overlap helps
    assert "decode 64 8 " in text
    data = json.loads(invoke(*LAYERS.split(), "--json").output)
    layers = {(each["phase"], each["tp"]): each for each in data["layers"]}
    assert len(layers) == 14
    alone = layers["prefill", 1]
    assert alone["communication"] == 0 and alone["overlapped"] == alone["product"]
    for each in layers.values():
        unfused = each["product"] + each["communication"]
        assert each["product"] <= each["overlapped"] <= unfused * (1 + 1e-9)
        assert each["product"] >= alone["product"] / each["tp"] or each["phase"] == "decode"
    # The network is slower than the links of a node.
    step = layers["prefill", 16]["communication"] - layers["prefill", 8]["communication"]
    assert step > layers["prefill", 8]["communication"] - layers["prefill", 4]["communication"]


def test_a_core_that_copies_does_not_multiply() -> None:
    machine, phases = machine_named("zen4-core"), {"prefill": 64, "decode": 1}
    for layer in layer_times(MODELS["smollm2-135m"], [1, 2], machine, phases, 2):
        assert layer.overlapped >= 0.98 * (layer.product + layer.communication)


def test_a_mixture_is_split_by_width_or_by_experts() -> None:
    """Few tokens are as many rows on all ranks only by width; of many, experts move fewer bytes."""
    command = "plan --model mixtral-8x7b --tp 1,2,8 --machine h100 --decode 1"
    shown = invoke(*command.split()).output
    assert "imbalance" in shown and "experts" in shown
    phases = {"prefill": 8192, "decode": 1}
    layers = layer_times(MODELS["mixtral-8x7b"], [1, 8], machine_named("h100"), phases, 2)
    found = {(layer.phase, layer.tp, layer.split): layer for layer in layers}
    assert len(found) == 6
    for phase in phases:
        width, experts = (found[phase, 8, split] for split in ("width", "experts"))
        assert 1 == width.imbalance < experts.imbalance <= 8
        assert width.product < experts.product < found[phase, 1, "width"].product
    many, few = (
        found[phase, 8, "width"].communication / found[phase, 8, "experts"].communication
        for phase in phases
    )
    assert many > 1 > few


def report(flops: float, small: float) -> MachineReport:
    rates = Rates(flops=flops, torch_flops=flops, copy_bytes=10 * flops, copy_over_cache=8.0)
    machine = this_machine("cpu", 2, 1, True, threads=1)
    large = (small + 8e-3, small + 9e-3)
    return MachineReport(machine, (rates,) * 3, (small, 2 * small), large)


def test_this_machine_is_what_tune_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reports = [report(2e9, 1e-5), report(1e9, 2e-5)]
    profile = profile_of(reports, "2026-11-22")
    assert profile.flops == (1e9,) * 3 and profile.bandwidth == 1e10  # the slowest rank's
    assert profile.within.call == 2e-5
    assert profile.within.bandwidth == pytest.approx((8 << 20) / 8e-3)
    store.save_profile(reports[0].machine, profile)
    product = "plan --m 1000 --k 1000 --n 1000 --mesh 2 --x S0 --machine this --json"
    (best, *_) = json.loads(invoke(*product.split()).output)["plans"]
    elements = 500 * 1000 + 1000 * 1000 + 500 * 1000
    assert best["seconds"] == pytest.approx(2 * 500 * 1000 * 1000 / 1e9 + 2 * elements / 1e10)


@pytest.mark.slow
def test_tune_measures_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned = invoke("tune", "--machine", "--tp", "2")
    assert tuned.exit_code == 0 and "TFLOP/s" in tuned.output, tuned.output
    product = "plan --m 64 --k 64 --n 64 --mesh 2 --x S0 --machine this"
    assert "2 ranks x 1 thread" in " ".join(invoke(*product.split()).output.split())
