"""Checks and measurements on a machine with an NVIDIA GPU: ``python -m benchmarks.gpu_suite``.

Runs stages, each with a time budget; the first check results, the later ones measure. Prints a
table and writes it as JSON and Markdown, with device, driver, versions and date. Needs only torch,
triton and this package. ``--device cpu`` rehearses the stages under Triton's interpreter, at sizes
too small to measure speed. ``--only sanitize`` repeats the small checks under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_cuda, gpu_link, gpu_nccl, gpu_stages, gpu_tune
from benchmarks.gpu_stages import Result, Setting

STAGES: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "matmul_check": gpu_stages.matmul_check,
    "fused_check": gpu_stages.fused_check,
    "graph": gpu_stages.graph,
    "cuda_check": gpu_cuda.cuda_check,
    "nccl_check": gpu_nccl.nccl_check,
    "gpu_tests": gpu_nccl.gpu_tests,
    "queued_check": gpu_cuda.queued_check,
    "paced_copy": gpu_cuda.paced_copy,
    "paced_link": gpu_link.paced_link,
    "matmul_speed": gpu_stages.matmul_speed,
    "fused_speed": gpu_stages.fused_speed,
    "symm_mem": gpu_tune.symm_mem,
    "tune": gpu_tune.tune,
    "sanitize": gpu_stages.sanitize,
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


def run_stage(name: str, setting: Setting) -> list[Result]:
    """Runs one stage; an exception or an exhausted budget is also a result."""
    begin = time.monotonic()
    print(f"== {name} (budget {setting.budget_s:g} s)", flush=True)
    results: list[Result] = []
    try:
        for result in STAGES[name](setting):
            print(f"   {result}", flush=True)
            results.append(result)
            if time.monotonic() - begin > setting.budget_s:
                results.append(Result(name, "budget exhausted: the rest was not run", ok=None))
                break
    except Exception as error:  # the later stages still run
        text = f"{type(error).__name__}: {error}"
        print(text, flush=True)
        results.append(Result(name, text.splitlines()[0][:300], ok=False))
    print(f"   {time.monotonic() - begin:.1f} s", flush=True)
    return results


def markdown(report: dict[str, Any], command: str) -> str:
    """The report as Markdown."""
    lines = [f"# {report['environment']['device']}, {report['environment']['date']}", ""]
    lines += [f"`{command}`", ""]
    lines += [f"- {name}: {value}" for name, value in report["environment"].items()]
    lines += ["", "| stage | what | value | right |", "|---|---|---|---|"]
    for row in report["results"]:
        right = {True: "yes", False: "NO", None: ""}[row["ok"]]
        lines.append(f"| {row['stage']} | {row['what']} | {row['value']} | {right} |")
    missing = [name for name in STAGES if name not in report["stages"]]
    lines += ["", f"Not run: {', '.join(missing) or 'nothing'}.", ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    by_default = [name for name in STAGES if name not in ON_REQUEST]
    parser.add_argument(
        "--only", help=f"stages out of {','.join(STAGES)}; default: {','.join(by_default)}"
    )
    parser.add_argument("--budget-s", type=float, default=120.0, help="seconds for each stage")
    parser.add_argument("--out", type=Path, help="folder for gpu_suite.json and gpu_suite.md")
    parser.add_argument("--small", action="store_true", help="the sizes of a rehearsal")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args(arguments)
    stages = given.only.split(",") if given.only else by_default
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {', '.join(unknown)}; choose from {', '.join(STAGES)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu rehearses the stages")
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    setting = Setting(given.device, given.budget_s, given.small or given.device == "cpu")
    results = [result for name in stages for result in run_stage(name, setting)]
    report = {
        "environment": environment(given.device),
        "stages": stages,
        "results": [asdict(result) for result in results],
    }
    command = f"python -m benchmarks.gpu_suite {' '.join(arguments or sys.argv[1:])}".strip()
    text = markdown(report, command)
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "gpu_suite.json").write_text(json.dumps(report, indent=1))
        (given.out / "gpu_suite.md").write_text(text)
    return 1 if any(result.ok is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
