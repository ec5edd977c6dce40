"""A stage: a list of cases that run in a process with deadlines.

The process sends a line of JSON at the start of a case, for each row of results and at the end of a
case. The parent writes every row to the file of the stage when it arrives. If the process crashes,
its CUDA context becomes unusable or a case exceeds its limit, the parent adds a bad row, kills the
process group, and continues with the next case in a new process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]
#: Name of a case, and a function that returns its row or an iterator of rows.
Case = tuple[str, Callable[[], Row | Iterator[Row]]]
_POISONED = 3  # exit code of a process whose CUDA context is unusable
_MIN_S = 5.0  # minimum remaining seconds to start a process
_PACKAGE = "benchmarks.one_gpu"


@dataclass(frozen=True)
class Stage:
    """Configuration of a stage. Times are seconds on a GPU.

    Attributes:
        name: name of the module and the files.
        expected: measured time on an H200.
        limit: time limit of the stage.
        case_limit: time limit of a case. A longer case counts as a hang.
        env: additional environment variables of the process.
        module: module with the function `cases(machine)`; default: ``name`` in this package.
        machine: module with the context manager `opened(kind, seconds)`.
    """

    name: str
    expected: float
    limit: float
    case_limit: float = 60.0
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    machine: str = f"{_PACKAGE}.machine"


@dataclass
class Result:
    """Outcome of a stage. ``ended`` is "done", or the reason for an early end."""

    stage: str
    ended: str = "not run"
    seconds: float = 0.0
    compiled: int = 0  #: Triton kernels missing from the cache
    rows: list[Row] = field(default_factory=list)

    @property
    def bad(self) -> list[Row]:
        """Return the rows of failed cases."""
        return [row for row in self.rows if row.get("bad")]


def run_stage(
    stage: Stage,
    kind: str,
    out: Path,
    env: dict[str, str],
    seconds: float,
    share: tuple[int, int] = (0, 1),
) -> Result:
    """Run a stage for at most ``seconds``. ``share`` is the (first, step) of the case indices."""
    result = Result(stage.name)
    begin = time.monotonic()
    first, step = share
    while True:
        left = seconds - (time.monotonic() - begin)
        if left < _MIN_S:
            result.ended = "out of time"
            break
        watched = _Process(stage, kind, out, env, left, (first, step))
        result.ended, next_case = watched.watch(result)
        result.seconds = round(time.monotonic() - begin, 1)
        if next_case is None:
            break
        first = next_case
    result.seconds = round(time.monotonic() - begin, 1)
    return result


class _Process:
    """A process that runs the cases of a stage from ``share[0]`` on."""

    def __init__(
        self,
        stage: Stage,
        kind: str,
        out: Path,
        env: dict[str, str],
        seconds: float,
        share: tuple[int, int],
    ) -> None:
        self._stage, self._step = stage, share[1]
        self._file, self._log = out / f"{stage.name}.json", out / f"{stage.name}.log"
        self._end = time.monotonic() + seconds
        self._case, self._index, self._begun = "the start", share[0] - share[1], time.monotonic()
        self._running = True  # a case is running, or the process is starting
        self._pipe, child_end = os.pipe()
        module = stage.module or f"{_PACKAGE}.{stage.name}"
        command = [sys.executable, "-m", f"{_PACKAGE}.stages", module, stage.machine, kind]
        command += [str(value) for value in (*share, seconds, child_end)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**env, **stage.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child_end],
                start_new_session=True,
            )
        os.close(child_end)

    def watch(self, result: Result) -> tuple[str, int | None]:
        """Collect rows until the process ends or reaches a limit.

        Returns:
            The ending of the stage, and the index of the next case or None to stop.
        """
        try:
            return self._watch(result)
        finally:
            self._kill()
            os.close(self._pipe)

    def _watch(self, result: Result) -> tuple[str, int | None]:
        unread, is_open = b"", True
        while is_open:
            now = time.monotonic()
            hang_time = self._begun + self._stage.case_limit
            if self._running and now > hang_time and hang_time <= self._end:
                where = self._stack()
                error = f"hang: no end after {self._stage.case_limit:.0f} s"
                return self._record_failure(result, error, where)
            if now > self._end:
                return f"out of time in {self._case}", None
            ready, _, _ = select.select([self._pipe], [], [], 0.2)
            ended = self._process.poll() is not None
            if not ready:
                is_open = not ended
                continue
            data = os.read(self._pipe, 1 << 16)
            is_open = bool(data)
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                if self._handle_message(result, json.loads(line)):
                    return "done", None
        code = self._process.wait()
        if not self._running:  # between two cases: the context is unusable
            return "restarted", self._index + self._step
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return self._record_failure(result, f"crash: {cause}", self._last_lines())

    def _handle_message(self, result: Result, message: dict[str, Any]) -> bool:
        """Handle a message. Returns True for the last message."""
        if "begin" in message:
            self._index, self._case = message["begin"], message["case"]
            self._begun, self._running = time.monotonic(), True
        elif "end" in message:
            self._running = False
            return message["end"] is None
        else:
            self._add(result, message["row"])
        return False

    def _record_failure(self, result: Result, error: str, where: str) -> tuple[str, int | None]:
        self._add(result, {"bad": True, "error": error, "where": where})
        if self._case == "the start":
            return error, None
        return "restarted", self._index + self._step

    def _add(self, result: Result, row: Row) -> None:
        """Add a row and write the file."""
        seconds = round(time.monotonic() - self._begun, 2)
        row = {"case": self._case, "bad": False, **row, "seconds": seconds}
        result.rows.append(row)
        content = ",\n".join(json.dumps(saved_row, default=str) for saved_row in result.rows)
        self._file.write_text(f"[\n{content}\n]\n")
        mark = "BAD " if row["bad"] else ""
        print(f"{mark}{self._stage.name}: {json.dumps(row, default=str)[:240]}", flush=True)

    def _stack(self) -> str:
        """Abort the process. Returns the stacks that `faulthandler` prints."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGABRT)
            self._process.wait(2.0)
        return self._last_lines()

    def _last_lines(self, characters: int = 1200) -> str:
        return self._log.read_text(errors="replace")[-characters:].strip()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main(
    module: str, machine_module: str, kind: str, first: str, step: str, seconds: str, pipe: str
) -> None:
    """Run the cases of a stage in this process."""
    faulthandler.enable()
    os.set_inheritable(int(pipe), False)
    opened = importlib.import_module(machine_module).opened
    with os.fdopen(int(pipe), "w", buffering=1) as stream, opened(kind, float(seconds)) as machine:
        cases = enumerate(importlib.import_module(module).cases(machine))
        for index, (name, run) in itertools.islice(cases, int(first), None, int(step)):
            _send(stream, begin=index, case=name)
            failed = False
            try:
                results = run()
                for row in [results] if isinstance(results, dict) else results:
                    _send(stream, row=row)
            except Exception as error:
                failed = True
                _send(stream, row=_error_row(error))
            try:
                machine.recover()
            except Exception as error:  # the next case needs a new process
                if not failed:
                    _send(stream, row=_error_row(error))
                _send(stream, end=index)
                os._exit(_POISONED)
            _send(stream, end=index)
        _send(stream, end=None)


def _error_row(error: Exception) -> Row:
    lines = traceback.format_exc().splitlines(keepends=True)
    print(*lines, sep="", flush=True)
    content = f"{type(error).__name__}: {error}"[:800]
    return {"bad": True, "error": content, "where": "".join(lines[-7:-1])}


def _send(stream: TextIO, **message: Any) -> None:
    stream.write(json.dumps(message, default=str) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
