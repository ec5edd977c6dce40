"""Run the benchmark stages on one GPU, the most valuable first."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.one_gpu import cache, report
from benchmarks.one_gpu.stages import Result, Stage, run_stage

_ROOT = Path(__file__).parents[2]
TOTAL_S = 530.0
_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # one hardware queue per virtual rank
STAGES = (
    Stage("facts", 17, 40),
    Stage("virtual", 45, 170, case_limit=100, env=_QUEUES),
    Stage("tiles", 11, 95, case_limit=25),
    Stage("overlap", 11, 60, case_limit=25, env=_QUEUES),
    Stage("latency", 16, 45, case_limit=15, env=_QUEUES),
    Stage("host", 14, 40, case_limit=35),
    Stage("sanitize", 44, 110, env=_QUEUES),
    Stage("pair", 106, 180, case_limit=600),
)
COMPILED = ("virtual", "tiles", "overlap", "sanitize")  #: stages whose kernels the stub compiles
_REHEARSAL_FACTOR = 10.0  # time limits of a dry run relative to a GPU
_STUB_S = 1800.0


def run(stages: Sequence[Stage], kind: str, out: Path, total: float = TOTAL_S) -> list[Result]:
    """Run stages within ``total`` seconds; write the report after each stage."""
    begin, results = time.monotonic(), [Result(stage.name) for stage in stages]
    files = out.with_name(f"{out.name}-stages")
    files.mkdir(exist_ok=True)
    for i, stage in enumerate(stages):
        seconds = min(stage.limit, total - (time.monotonic() - begin))
        num_kernels = cache.kernels()
        results[i] = run_stage(stage, kind, files, environment(kind), seconds)
        results[i].compiled = cache.kernels() - num_kernels
        report.write(results, kind, out)
        print(f"== {stage.name}: {results[i].ended}, {results[i].seconds} s", flush=True)
    return results


def environment(kind: str) -> dict[str, str]:
    """Return the environment of the stages."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    if kind == "rehearsal":
        return env | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return env | {"TRITON_CACHE_DIR": str(cache.FOLDER)}


def fill_cache(stages: Sequence[Stage], libcuda: Path, out: Path) -> list[Result]:
    """Compile the kernels of the stages, on all cores."""
    cores = os.cpu_count() or 1
    env = {**environment("stub"), "TRITON_LIBCUDA_PATH": str(libcuda.resolve().parent)}
    env["TRITON_STORE_BINARY_ONLY"] = "1"

    def share(stage: Stage, first: int) -> Result:
        folder = out / f"stub-{first}"
        folder.mkdir(parents=True, exist_ok=True)
        return run_stage(stage, "stub", folder, env, _STUB_S, (first, cores))

    chosen = [replace(stage, case_limit=_STUB_S) for stage in stages if stage.name in COMPILED]
    with ThreadPoolExecutor(cores) as threads:
        jobs = [(stage, first) for stage in chosen for first in range(cores)]
        return list(threads.map(share, *zip(*jobs, strict=True)))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, print the summary; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--rehearse", action="store_true", help="dry run on CPUs")
    mode.add_argument("--stub", type=Path, metavar="LIBCUDA", help="fill the Triton cache")
    parser.add_argument("--only", default="", help="stages, comma-separated")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="time budget of all stages (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    stage_names = [stage.name for stage in STAGES]
    names = arguments.only.split(",") if arguments.only else stage_names
    if unknown := set(names).difference(stage_names):
        parser.error(
            f"--only has unknown stages: {', '.join(unknown)}; expected {', '.join(stage_names)}"
        )
    names += ["facts"]  # provides the card name for the file names
    stages = [stage for stage in STAGES if stage.name in names]
    out = Path(os.environ.get("OUT") or cache.SCRATCH / "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin, num_kernels, relocated = time.monotonic(), cache.kernels(), cache.relocate()
    print(f"Triton cache {cache.FOLDER}: {num_kernels} kernels, {relocated} relocated", flush=True)
    if arguments.stub is not None:
        results = fill_cache(stages, arguments.stub, out)
        compiled = cache.kernels() - num_kernels
        print(f"{compiled} kernels compiled in {time.monotonic() - begin:.0f} s")
    elif arguments.rehearse:
        slow = [
            replace(
                stage,
                limit=stage.limit * _REHEARSAL_FACTOR,
                case_limit=stage.case_limit * _REHEARSAL_FACTOR,
            )
            for stage in stages
        ]
        results = run(slow, "rehearsal", out, TOTAL_S * _REHEARSAL_FACTOR)
    else:
        results = run(stages, "gpu", out, arguments.seconds)
    print(report.summary(results))
    return 1 if any(result.bad or result.ended != "done" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
