"""The distributed tests that torch ships, for the backend that the environment names.

The decorators of the tests read ``BACKEND`` and ``WORLD_SIZE`` when the module is imported, so each
backend and world size needs a new process. `tests.c10d.torch_suite` starts that process, which
imports the tests once and forks a process per test. The process of a test leads a process group of
the operating system that contains its ranks. Killing the group leaves no rank behind.

Environment: ``BACKEND`` and ``WORLD_SIZE``, which torch reads, and ``TORCH_SUITE``, a JSON object
with the other fields of `tests.c10d.torch_suite.Run`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import IO, Any

import torch
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases

BACKEND = os.environ["BACKEND"]
OPTIONS = json.loads(os.environ["TORCH_SUITE"])
NAME = "torch.testing._internal.distributed.distributed_test"
EXIT_CODES = "The exit codes of the ranks are"
LOG_CHARS = 20_000  # the end of the output of a test that is reported
GRACE_SECONDS = 20.0  # from the time limit within the test to the kill: the ranks dump their stacks


def open_names(source: str) -> str:
    """Let tests for gloo and for MPI accept the backend as well."""
    source = re.sub(r'BACKEND != ("gloo"|"mpi")', rf'BACKEND not in (\1, "{BACKEND}")', source)
    source = re.sub(r'BACKEND == ("gloo"|"mpi")', rf'BACKEND in (\1, "{BACKEND}")', source)
    return source.replace('available({"gloo"})', f'available({{"gloo", "{BACKEND}"}})')


def import_tests() -> ModuleType:
    """Import torch's tests, with the backend in the sets of backends that have a feature.

    The tests that need a GPU are still skipped.
    """
    for backends in DistTestCases.backend_feature.values():
        backends.add(BACKEND)
    if not OPTIONS["open_names"]:
        return importlib.import_module(NAME)
    spec = find_spec(NAME)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        code = compile(open_names(file.read()), spec.origin, "exec", dont_inherit=True)
    module = sys.modules[NAME] = module_from_spec(spec)
    exec(code, module.__dict__)
    return module


if OPTIONS["module"]:
    importlib.import_module(OPTIONS["module"])  # registers the backend
_tests: Any = import_tests()
if OPTIONS["profiling"]:
    _tests.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    _tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(BACKEND)


class TorchCase(_tests.TestDistBackend, _tests.DistributedTest._DistTestBase):
    """The tests, each on ``WORLD_SIZE`` new processes."""

    def setUp(self) -> None:
        super().setUp()
        _tests.INIT_METHOD = os.environ["INIT_METHOD"]  # a file that no other test has used
        self._start_processes(torch.multiprocessing.get_context(OPTIONS["start"]).Process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        codes = [process.exitcode for process in self.processes]
        # After TEST_ERROR_EXIT_CODE the exception is known, and the other ranks are terminated.
        if fn not in self.skip_return_code_checks and self.TEST_ERROR_EXIT_CODE not in codes:
            valid = {0, *(skip.exit_code for skip in TEST_SKIPS.values())}
            if len(set(codes)) > 1 or codes[0] not in valid:
                raise RuntimeError(f"{EXIT_CODES} {codes} after {elapsed_time:.0f} s")
        super()._check_return_codes(fn, elapsed_time)

    def tearDown(self) -> None:
        processes = self.processes
        super().tearDown()  # sends SIGTERM
        for process in processes:
            process.join(5.0)


def summarize(error: str) -> str:
    """Return the start of the last exception in a text, and its line in the tests."""
    exceptions = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*(?:\n.*){,2}", error, re.M)
    text = " ".join((exceptions or [error.strip()])[-1].split())[:300]
    lines = re.findall(r'distributed_test.py", line (\d+), in test_', error)
    return f"{text} (distributed_test.py:{lines[-1]})" if lines else text


def run_case(name: str, log: IO[str]) -> dict[str, Any]:
    """Run a test in this process, which it owns. The output of all ranks goes to ``log``."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    result = unittest.TestResult()
    TorchCase(name).run(result)
    if result.skipped:
        return {"outcome": "skipped", "reason": result.skipped[0][1]}
    failures = [*result.failures, *result.errors]
    if not failures:
        return {"outcome": "passed", "reason": ""}
    error = failures[0][1]
    return {"outcome": "failed", "reason": summarize(error.split("\nProcess ")[0]), "error": error}


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run_apart(name: str) -> dict[str, Any]:
    """Run a test in a forked process, and kill that process and its ranks at the end or at the
    time limit."""
    begin = time.monotonic()
    limit = float(os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"]) + GRACE_SECONDS
    with tempfile.TemporaryFile("w+", errors="replace") as log, tempfile.TemporaryFile("w+") as out:
        if (leader := os.fork()) == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                json.dump(run_case(name, log), out)
                out.flush()
            except BaseException:
                traceback.print_exc(file=log)
                log.flush()
            os._exit(0)
        try:
            while not (status := os.waitpid(leader, os.WNOHANG))[0]:
                if time.monotonic() - begin > limit:
                    break
                time.sleep(0.01)
        finally:
            kill_group(leader)
        if not status[0]:
            os.waitpid(leader, 0)
        out.seek(0)
        log.seek(0)
        text, output = out.read(), log.read()[-LOG_CHARS:]
    if text:
        record = json.loads(text)
    else:
        ended = f"ended with status {status[1]}" if status[0] else f"was killed after {limit:.0f} s"
        record = {"outcome": "failed", "reason": f"The process of the test {ended}", "error": ""}
    if EXIT_CODES in record["reason"] and "Traceback" in output:
        record["reason"] += f": {summarize(output)}"
    seconds = round(time.monotonic() - begin, 2)
    return {"test": name, **record, "seconds": seconds, "output": output}


def stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def main() -> None:
    """Run the tests that match the pattern, and print a JSON object per test."""
    signal.signal(signal.SIGTERM, stop)
    matches = re.compile(OPTIONS["pattern"]).search
    for name in filter(matches, unittest.TestLoader().getTestCaseNames(TorchCase)):
        record = run_apart(name)
        if record["outcome"] != "failed":
            del record["output"]
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
