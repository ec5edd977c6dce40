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
import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import (  # noqa: F401  (which have the stages)
    calls,
    cuda,
    faults,
    in_place,
    kernels,
    link,
    models,
    nccl,
    speeds,
)  # fmt: skip
from benchmarks.gpu.stage import STAGES, Result, Setting, Stage, stage
from tpkernels.bench.results import versions

ORDER = (
    *("path_check", "grad_check", "layer_check", "compile_check", "path_speed", "autotune_check"),
    *("cuda_check", "queued_check", "in_place_check", "streams_check", "fault_check"),
    *("matmul_check", "fused_check", "graph", "multimem_check", "model_check", "nccl_check"),
    *("gpu_tests", "paced_copy", "paced_link", "matmul_speed", "fused_speed", "small_speed"),
    *("in_place_speed", "bring_speed", "symm_mem", "tune"),
)
ON_REQUEST = ("sanitize",)  # many times slower than the checks it repeats
_RAISED = 3  # exit code of a stage that raised an exception
_GRACE_S = 30.0  # for a stage to import torch, and to end after its budget
_LOOK_S = 0.2


def environment(device: str) -> dict[str, str]:
    """The environment that the figures depend on."""
    facts = {"date": datetime.date.today().isoformat(), **versions()}
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
    missing = [name for name in (*ORDER, *ON_REQUEST) if name not in report["seconds"]]
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

    def add(self, name: str, ended: Ended) -> None:
        """A stage that did not come to its end counts as not run, but its results are kept."""
        kept = [row for row in self._content["results"] if row["stage"] != name]
        self._content["results"] = kept + [asdict(result) for result in ended.results]
        if ended.complete:
            self._content["seconds"][name] = round(ended.seconds, 1)
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


# A stage has a process of its own: a fault that sticks to a CUDA context, a crash or a hang ends it
# alone. It appends each result to a file as a line of JSON, so a stage that is killed keeps
# those it had. When the time is over it is killed with what it has started; its ranks die with it.


@dataclass(frozen=True)
class Ended:
    """A stage that has ended. ``complete``: it came to its end, in time or at its budget."""

    results: list[Result]
    seconds: float
    complete: bool


def write_results(name: str, run: Stage, setting: Setting, file: Path) -> bool:
    """In the stage's process: runs it within its budget. False: it raised an exception."""
    begin = time.monotonic()
    with file.open("a", buffering=1) as out:

        def write(result: Result) -> None:
            out.write(json.dumps(asdict(result)) + "\n")
            print(f"   {result}", flush=True)

        try:
            for result in run(setting):
                write(result)
                if time.monotonic() - begin > setting.budget_s:
                    write(Result("budget exhausted: the rest was not run", "", None, name))
                    break
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            print(text, flush=True)
            lines = text.splitlines()  # the last one of a RankError is the error of a rank
            write(Result(lines[0][:300], lines[-1][:300] if lines[1:] else "", False, name))
            return False
    return True


def read_results(file: Path) -> list[Result]:
    """The results in a stage's file, without a line that a killed process left unfinished."""
    results = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return results


def run_stage(name: str, arguments: Sequence[str], file: Path, seconds: float) -> Ended:
    """Runs ``benchmarks.gpu_suite --stage`` with these arguments, for at most ``seconds`` and a
    grace."""
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--stage", name, "--into", str(file)]
    begin = time.monotonic()
    process = subprocess.Popen([*command, *arguments], start_new_session=True)
    try:
        while (code := process.poll()) is None and time.monotonic() - begin < seconds + _GRACE_S:
            time.sleep(_LOOK_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # no rank is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    results = read_results(file)
    if code not in (0, _RAISED):
        why = f"took more than {seconds + _GRACE_S:.0f} s" if code is None else f"exit code {code}"
        results.append(Result(f"the stage was lost: {why}", "", False, name))
    return Ended(results, time.monotonic() - begin, code == 0)


@stage()
def sanitize(setting: Setting) -> Iterator[Result]:
    """The small checks under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if setting.rehearsal or tool is None:
        yield Result("needs a GPU and compute-sanitizer", ok=None)
        return
    budget = setting.budget_s / 4
    for check, name in itertools.product(
        ("memcheck", "racecheck"), ("matmul_check", "fused_check")
    ):
        options = ["--tool", check, "--target-processes", "all", "--error-exitcode", "9"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results"
            suite = ["-m", "benchmarks.gpu_suite", "--stage", name, "--into", str(file)]
            suite += ["--small", "--budget-s", str(budget)]
            try:
                ended = subprocess.run(
                    [tool, *options, sys.executable, *suite],
                    capture_output=True, text=True, timeout=budget, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                value = f"not finished in {budget:.0f} s"
                yield Result(f"{check} of {name}", value, ok=None)
                continue
            right = all(result.ok is not False for result in read_results(file))
        reports = [line for line in ended.stdout.splitlines() if line.startswith("=====")]
        right = right and ended.returncode == 0
        yield Result(f"{check} of {name}", reports[-1] if reports else "", right)


def main(arguments: list[str] | None = None) -> int:
    given = _options(arguments)
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    setting = Setting(given.device, given.budget_s, given.small or given.device == "cpu")
    if given.stage:
        whole = write_results(given.stage, STAGES[given.stage], setting, given.into)
        return 0 if whole else _RAISED
    command = f"python -m benchmarks.gpu_suite {' '.join(arguments or sys.argv[1:])}".strip()
    with tempfile.TemporaryDirectory() as scratch:
        facts = environment(given.device) | {"sizes": "small" if setting.small else "full"}
        report = Report(facts, command, given.out or Path(scratch))
        if given.resume:
            report.resume()
        deadline = time.monotonic() + given.total_s
        for name in given.only or ORDER:
            left = deadline - time.monotonic()
            if report.has(name) or left <= 0:
                continue
            budget = min(given.budget_s, left)
            print(f"== {name} (budget {budget:.0f} s)", flush=True)
            options = ["--device", given.device, "--budget-s", str(budget)]
            options += ["--small"] if setting.small else []
            ended = run_stage(name, options, Path(scratch) / f"{name}.jsonl", budget)
            report.add(name, ended)
            print(f"   {ended.seconds:.1f} s", flush=True)
        print(report.text())
        return 1 if report.wrong else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = (*ORDER, *ON_REQUEST)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", help=f"stages out of {','.join(names)}; default: all but {','.join(ON_REQUEST)}"
    )
    parser.add_argument("--budget-s", type=float, default=120.0, help="seconds for each stage")
    parser.add_argument(
        "--total-s", type=float, default=float("inf"), help="seconds for all; no stage begins later"
    )
    parser.add_argument("--out", type=Path, help="folder for gpu_suite.json and gpu_suite.md")
    parser.add_argument("--resume", action="store_true", help="go on with the results in --out")
    parser.add_argument("--small", action="store_true", help="the sizes of a rehearsal")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.only = given.only.split(",") if given.only else None
    unknown = [name for name in given.only or () if name not in names]
    if unknown:
        parser.error(f"unknown stage {', '.join(unknown)}; choose from {', '.join(names)}")
    if given.resume and given.out is None:
        parser.error("--resume needs --out")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu rehearses the stages")
    return given


if __name__ == "__main__":
    sys.exit(main())
