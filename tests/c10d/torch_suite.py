"""Run the distributed tests that torch ships on several backends, and list the differences.

    python -m tests.c10d.torch_suite --backends gloo tpkernels --ranks 2 3 4 --start fork spawn

The tests are ``torch.testing._internal.distributed.distributed_test.DistributedTest``. Each test
runs on new processes, in about 0.3 s per test with ``--start fork`` and several seconds with
``--start spawn``. A test that exceeds the time limit fails, and its processes are killed.

Many tests compare the name of the backend with "gloo" or "mpi". With ``--open-names`` (default)
those tests also accept the backend under test. Gloo then also runs the tests for MPI. It fails the
tests of ``all_to_all`` with lists. With ``--profiling`` the tests also expect an asynchronous
profiler event "<backend>:<collective>" for each collective.

Tests for GPUs are skipped on CPUs. A test that requires 4 or 8 ranks is skipped with fewer. The
exit status is 1 if a test fails on a backend but not on the first backend.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

Record = dict[str, Any]  # of one test: test, outcome, reason, seconds, and of a failure the output


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the tests: a backend, a number of ranks and a method to start them."""

    backend: str
    ranks: int = 2
    start: str = "fork"
    pattern: str = ""  #: regular expression that matches part of the names; empty: all tests
    module: str = "tpkernels"  #: the module that registers the backend
    open_names: bool = True
    profiling: bool = False
    limit: int = 90  #: seconds per test

    @property
    def title(self) -> str:
        return f"{self.backend} {self.ranks} ranks {self.start}"


def run_tests(run: Run) -> Generator[Record]:
    """Run the tests in a new process and yield a record per test."""
    options = asdict(run) | {"module": "" if run.backend == "gloo" else run.module}
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            **os.environ,
            "BACKEND": run.backend,
            "WORLD_SIZE": str(run.ranks),
            "INIT_METHOD": "file://",  # read by decorators; the tests set the path
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(run.limit),
            "TMPDIR": folder,  # the tests leave files
            "TORCH_SUITE": json.dumps(options),
        }
        command = [sys.executable, "-m", "tests.c10d.torch_case"]
        with subprocess.Popen(
            command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield from map(json.loads, process.stdout)
            except BaseException:
                process.terminate()  # kills the running test
                raise
    if process.returncode:
        raise RuntimeError(f"{run.title}: the tests ended with status {process.returncode}")


def worst_records(records: Sequence[Record]) -> dict[str, Record]:
    """Return the worst record of each test: failed before passed before skipped."""
    order = ["skipped", "passed", "failed"]
    worst: dict[str, Record] = {}
    for record in records:
        previous = worst.setdefault(record["test"], record)
        if order.index(record["outcome"]) > order.index(previous["outcome"]):
            worst[record["test"]] = record
    return worst


def find_differences(first: Sequence[Record], second: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return (test, first outcome, second outcome) for the tests with different outcomes."""
    theirs, ours = worst_records(first), worst_records(second)
    return [
        (name, *(f"{r['outcome']} {r['reason']}".strip() for r in (theirs[name], ours[name])))
        for name in theirs
        if name in ours and theirs[name]["outcome"] != ours[name]["outcome"]
    ]


def print_summary(run: Run, records: Sequence[Record]) -> None:
    counts = Counter(record["outcome"] for record in records)
    seconds = sum(record["seconds"] for record in records)
    numbers = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"\n{run.title}: {numbers} in {seconds:.0f} s")
    reasons = Counter(r["reason"] for r in records if r["outcome"] == "skipped")
    for reason, count in reasons.most_common():
        print(f"  {count:4} skipped: {reason}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.c10d.torch_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--backends", nargs="+", default=["gloo", "tpkernels"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--start", nargs="+", choices=["fork", "spawn"], default=["fork"])
    parser.add_argument("--repeat", type=int, default=1, help="number of runs of each test")
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for names")
    parser.add_argument("--limit", type=int, default=90, help="seconds per test")
    parser.add_argument("--open-names", action=flag, default=True, help="run tests of gloo, MPI")
    parser.add_argument("--profiling", action=flag, default=False, help="expect profiler events")
    parser.add_argument("--import", dest="module", default="tpkernels", help=argparse.SUPPRESS)
    parser.add_argument("-v", dest="verbose", action="store_true", help="print the tracebacks")
    parser.add_argument("--json", type=Path, help="write all records to this file")
    return parser.parse_args(arguments)


def run_repeatedly(run: Run, repeat: int, verbose: bool, all_records: list[Record]) -> list[Record]:
    """Run the tests ``repeat`` times. Print failures at once, and a summary at the end."""
    fields = {"backend": run.backend, "ranks": run.ranks, "start": run.start}
    records: list[Record] = []
    for i in range(repeat):
        with contextlib.closing(run_tests(run)) as results:
            for record in results:
                records.append(record)
                all_records.append(fields | record)
                if record["outcome"] == "failed":
                    error = record["error"] if verbose else record["reason"]
                    print(f"{run.title}: {record['test']} failed: {error}", flush=True)
        print(f"{run.title}: {i + 1} of {repeat}", flush=True)
    print_summary(run, records)
    return records


def run_all(args: argparse.Namespace, options: dict[str, Any], all_records: list[Record]) -> bool:
    """Run the tests on all backends. Return whether one fails that does not fail on the first
    backend."""
    first, *others = args.backends
    failed = False
    for start, ranks in itertools.product(args.start, args.ranks):
        by_backend = {
            backend: run_repeatedly(
                Run(backend=backend, ranks=ranks, start=start, **options),
                args.repeat,
                args.verbose,
                all_records,
            )
            for backend in args.backends
        }
        for backend in others:
            differences = find_differences(by_backend[first], by_backend[backend])
            print(f"\n{ranks} ranks {start}: {len(differences)} differences", flush=True)
            for name, expected, got in differences:
                failed |= got.startswith("failed")
                print(f"  {name}\n    {first}: {expected}\n    {backend}: {got}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    option_names = ("pattern", "module", "open_names", "profiling", "limit")
    options = {name: getattr(args, name) for name in option_names}
    all_records: list[Record] = []
    try:
        return int(run_all(args, options, all_records))
    finally:
        if args.json is not None:
            args.json.write_text(json.dumps(all_records, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
