"""Checks and measurements on a machine with an NVIDIA GPU: ``python -m benchmarks.gpu_suite``.

Runs stages, the most important checks first and measurements last, each in a process of its own and
with a time budget. Prints a table and writes it as JSON and Markdown after every stage, with
device, driver, versions and date; ``--resume`` runs only the stages that have not ended. Needs only
torch, triton and this package. ``--device cpu`` rehearses the stages on CPU tensors and under
Triton's interpreter, at sizes too small to measure speed. ``--only sanitize`` repeats the small
checks under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import (
    bring,
    cuda,
    faults,
    in_place,
    kernels,
    link,
    models,
    nccl,
    order,
    path,
    small,
    tune,
)
from benchmarks.gpu.runner import RAISED, run_stage, write_results
from benchmarks.gpu.stage import Result, Setting

STAGES: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "path_check": path.path_check,
    "grad_check": path.grad_check,
    "layer_check": models.layer_check,
    "compile_check": path.compile_check,
    "path_speed": path.path_speed,
    "autotune_check": path.autotune_check,
    "cuda_check": cuda.cuda_check,
    "queued_check": cuda.queued_check,
    "in_place_check": in_place.in_place_check,
    "streams_check": order.streams_check,
    "fault_check": faults.fault_check,
    "matmul_check": kernels.matmul_check,
    "fused_check": kernels.fused_check,
    "graph": kernels.graph,
    "multimem_check": order.multimem_check,
    "model_check": models.model_check,
    "nccl_check": nccl.nccl_check,
    "gpu_tests": nccl.gpu_tests,
    "paced_copy": cuda.paced_copy,
    "paced_link": link.paced_link,
    "matmul_speed": kernels.matmul_speed,
    "fused_speed": kernels.fused_speed,
    "small_speed": small.small_speed,
    "in_place_speed": in_place.in_place_speed,
    "bring_speed": bring.bring_speed,
    "symm_mem": tune.symm_mem,
    "tune": tune.tune,
    "sanitize": kernels.sanitize,
}
ON_REQUEST = {"sanitize"}  # many times slower than the checks it repeats


def environment(device: str) -> dict[str, str]:
    """The environment that the figures depend on."""
    import triton

    facts = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if device == "cpu":
        return facts | {"device": "cpu, Triton's interpreter: no figure here is a measurement"}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return facts | {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "driver": driver.stdout.splitlines()[0] if driver.stdout else "unknown",
    }


def markdown(report: dict[str, Any], command: str) -> str:
    """The report as Markdown."""
    lines = [f"# {report['environment']['device']}, {report['environment']['date']}", ""]
    lines += [f"`{command}`", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    lines += ["", "| stage | what | value | right |", "|---|---|---|---|"]
    for row in report["results"]:
        right = {True: "yes", False: "NO", None: ""}[row["ok"]]
        lines.append(
            f"| {row['stage']} | {row['what']} | {row['value'].replace('|', '/')} | {right} |"
        )
    missing = [name for name in STAGES if name not in report["seconds"]]
    lines += ["", f"Not run: {', '.join(missing) or 'nothing'}.", ""]
    return "\n".join(lines)


class Report:
    """The results so far, written to ``folder`` after every stage."""

    def __init__(self, facts: dict[str, str], command: str, folder: Path) -> None:
        self._command, self._folder = command, folder
        self._file = folder / "gpu_suite.json"
        self._content: dict[str, Any] = {"environment": facts, "seconds": {}, "results": []}

    def resume(self) -> None:
        """Takes over the stages that ended in an earlier run on the same machine."""
        if not self._file.exists():
            return
        earlier = json.loads(self._file.read_text())
        same = ("device", "torch", "triton", "sizes")
        facts = self._content["environment"]
        if any(earlier["environment"].get(name) != facts[name] for name in same):
            raise SystemExit(
                f"{self._file} is of another device, version or size; pass another --out"
            )
        self._content |= {name: earlier[name] for name in ("seconds", "results")}

    def has(self, stage: str) -> bool:
        return stage in self._content["seconds"]

    def add(self, name: str, results: list[Result], seconds: float, complete: bool) -> None:
        """A stage that did not come to its end counts as not run, but its results are kept."""
        kept = [row for row in self._content["results"] if row["stage"] != name]
        self._content["results"] = kept + [asdict(result) for result in results]
        if complete:
            self._content["seconds"][name] = round(seconds, 1)
        self._folder.mkdir(parents=True, exist_ok=True)
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps(self._content, indent=1) + "\n")
        written.replace(self._file)
        (self._folder / "gpu_suite.md").write_text(self.text())

    def text(self) -> str:
        return markdown(self._content, self._command)

    @property
    def wrong(self) -> bool:
        return any(row["ok"] is False for row in self._content["results"])


def main(arguments: list[str] | None = None) -> int:
    by_default = [name for name in STAGES if name not in ON_REQUEST]
    given = _options(arguments, by_default)
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    setting = Setting(given.device, given.budget_s, given.small or given.device == "cpu")
    if given.stage:
        ended = write_results(given.stage, STAGES[given.stage], setting, given.into)
        return 0 if ended else RAISED
    command = f"python -m benchmarks.gpu_suite {' '.join(arguments or sys.argv[1:])}".strip()
    with tempfile.TemporaryDirectory() as scratch:
        facts = environment(given.device) | {"sizes": "small" if setting.small else "full"}
        report = Report(facts, command, given.out or Path(scratch))
        if given.resume:
            report.resume()
        deadline = time.monotonic() + given.total_s
        for name in given.only or by_default:
            left = deadline - time.monotonic()
            if report.has(name) or left <= 0:
                continue
            budget = min(given.budget_s, left)
            print(f"== {name} (budget {budget:.0f} s)", flush=True)
            options = ["--device", given.device, "--budget-s", str(budget)]
            options += ["--small"] if setting.small else []
            stage = run_stage(name, options, Path(scratch) / f"{name}.jsonl", budget)
            report.add(name, stage.results, stage.seconds, stage.complete)
            print(f"   {stage.seconds:.1f} s", flush=True)
        print(report.text())
        return 1 if report.wrong else 0


def _options(arguments: list[str] | None, by_default: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", help=f"stages out of {','.join(STAGES)}; default: {','.join(by_default)}"
    )
    parser.add_argument("--budget-s", type=float, default=120.0, help="seconds for each stage")
    parser.add_argument(
        "--total-s", type=float, default=float("inf"), help="seconds for all; no stage begins later"
    )
    parser.add_argument("--out", type=Path, help="folder for gpu_suite.json and gpu_suite.md")
    parser.add_argument("--resume", action="store_true", help="go on with the results in --out")
    parser.add_argument("--small", action="store_true", help="the sizes of a rehearsal")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.only = given.only.split(",") if given.only else None
    unknown = [name for name in given.only or () if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {', '.join(unknown)}; choose from {', '.join(STAGES)}")
    if given.resume and given.out is None:
        parser.error("--resume needs --out")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu rehearses the stages")
    return given


if __name__ == "__main__":
    sys.exit(main())
