"""The files of a run: JSON, CSV, pictures, a page that needs no network."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.damage import invoke
from tpkernels.bench import inputs, roofline
from tpkernels.bench.report import unsupported
from tpkernels.bench.results import load
from tpkernels.bench.roofline import Rates
from tpkernels.cli import bench as command
from tpkernels.terminal import UsageError

SWEEP = (
    *("bench", "--op", "all_gather_matmul,matmul_reduce_scatter,all_reduce", "--tp", "2"),
    *("--model", "smollm2-135m", "--projection", "qkv,down", "--m", "2,64", "--bytes", "4K"),
    *("--algorithm", "auto,unfused", "--repeat", "6", "--dtype", "fp32"),
)


def valid(path: Path) -> dict[str, Any]:
    """The JSON in a file, which must be valid."""
    load(path)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def quick_rates(dtype: torch.dtype, device: str) -> Rates:
    """On a rank: rates of small operands, which say little. It has a small cache."""
    for module in (roofline, inputs):
        module.last_level_cache_bytes = lambda _: 1 << 20
    with mock.patch.dict(roofline._SIZE, {device: 64}):
        return roofline.measure_rates(dtype, device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that writes everything."""
    out = tmp_path_factory.mktemp("bench") / "new" / "folder"
    with mock.patch.object(command, "measure_rates", quick_rates):
        result = invoke(*SWEEP, "--out", str(out))
    assert result.exit_code == 0, result.output
    for shown in ("64, 576, 1536", "smollm2-135m down", "4 KiB", "Roofline, measured in this run"):
        assert shown in result.output
    return out


@pytest.mark.thorough
def test_the_json_of_a_run(folder: Path) -> None:
    report = valid(folder / "bench.json")
    assert report["complete"]
    assert len(report["results"]) == len(report["cases"]) == 5
    assert [each["case"] for each in report["results"]] == report["cases"]
    first = report["results"][0]
    assert (first["op"], first["shape"], first["tp"]) == ("all_gather_matmul", [2, 960, 576], 2)
    assert first["labels"] == ["smollm2-135m qkv"]
    assert set(first["times"]) == {"auto", "unfused", "torch", "matmul", "local_matmul"}
    for time in first["times"].values():
        assert len(time["samples"]) == time["iterations"] == 6
        assert 0 < time["min"] <= time["median"] <= time["p95"] <= time["max"]
    assert first["times"]["local_matmul"]["gb_per_s"] is None
    assert report["results"][-1]["times"]["auto"]["tflops"] is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda report: report.pop("environment"), "has no 'environment'"),
        (lambda report: report["results"][0].update(op=None), r"results\[0\].op is None, not of"),
        (lambda report: report["results"][0].update(other=1), "has an unknown 'other'"),
        (lambda report: report["results"][0]["times"].update(magic={}), "times.magic has no"),
    ],
)
def test_what_is_of_another_type_is_refused(
    folder: Path, tmp_path: Path, change: Any, what: str
) -> None:
    report = json.loads((folder / "bench.json").read_text())
    change(report)
    (tmp_path / "bench.json").write_text(json.dumps(report))
    with pytest.raises(UsageError, match=rf"is damaged: \$.*{what}"):
        load(tmp_path / "bench.json")


def test_the_csv_holds_every_variant_and_the_environment(folder: Path) -> None:
    lines = list(csv.DictReader((folder / "bench.csv").read_text().splitlines()))
    report = load(folder / "bench.json")
    assert len(lines) == sum(len(case["times"]) for case in report["results"])
    line = next(line for line in lines if line["variant"] == "auto" and line["N"] == "960")
    assert float(line["median"]) == report["results"][0]["times"]["auto"]["median"]
    assert line["right"] == "True" and line["over_unfused_low"]
    for name, value in report["environment"].items():
        assert line[f"environment.{name}"] == str(value)
    assert line["run.command"] and line["sweep.cold"] == "True"


@pytest.mark.parametrize("name", ["speedup", "overlap", "split"])
def test_pictures_are_not_blank(folder: Path, name: str) -> None:
    if unsupported():
        pytest.skip("needs matplotlib")
    image = pytest.importorskip("PIL.Image").open(folder / f"{name}.png").convert("RGB")
    colors = image.getcolors(maxcolors=1 << 24)
    background = max(count for count, _ in colors) / (image.width * image.height)
    assert image.width > 500 and image.height > 300
    assert 0.5 < background < 0.99
    saturated = sum(count for count, rgb in colors if max(rgb) - min(rgb) > 60)
    assert saturated > 200  # lines or bars, not only axes and text


def test_the_page_asks_for_nothing(folder: Path) -> None:
    """Only its own data."""
    page = (folder / "report.html").read_text()
    assert not re.search(r"<(script|link|iframe|object)\b", page)
    assert "@import" not in page and "url(" not in page
    sources = re.findall(r'\b(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith("data:image/") for source in sources)


def rendered(page: Path, profile: Path) -> str:
    """The page as loaded by a browser without network, with the sizes of its pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    probe = page.with_name("probe.html")
    probe.write_text(
        page.read_text().replace(
            "</body>",
            "<script>onload = () => {const seen = [...document.images].map(i => [i.id, "
            "i.complete, i.naturalWidth]); document.body.dataset.images = JSON.stringify(seen); "
            "document.body.dataset.height = document.querySelector('#results').offsetHeight"
            "}</script></body>",
        )
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
    done = subprocess.run(
        [browser, *options, *offline, f"--user-data-dir={profile}", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_browser_without_network_shows_plots_and_table(folder: Path, tmp_path: Path) -> None:
    page = rendered(folder / "report.html", tmp_path)
    data = dict(re.findall(r'data-(images|height)="([^"]*)"', page))
    images = json.loads(data["images"].replace("&quot;", '"'))
    assert {name for name, _, _ in images} == {"speedup", "overlap", "split"}
    assert all(complete and width > 300 for _, complete, width in images), images
    assert int(data["height"]) > 200


@pytest.mark.slow
def test_without_matplotlib_the_rest_is_there(folder: Path, tmp_path: Path) -> None:
    """In a process that cannot import it. One line says what is missing."""
    command = [sys.executable, "-c", "import importlib.util as u, sys\nfind = u.find_spec\n"]
    command[-1] += "u.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)"
    command[-1] += "\nfrom tpkernels.cli import main\nmain()"
    shutil.copy(folder / "bench.json", tmp_path / "bench.json")
    done = subprocess.run(
        [*command, *SWEEP, "--resume", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("matplotlib is missing (pip install 'tpkernels[plots]')") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.csv", "report.html"}
    assert "<p>No plots: " in (tmp_path / "report.html").read_text()
    assert 'id="results"' in (tmp_path / "report.html").read_text()
