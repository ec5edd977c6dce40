"""Checks of every variant on virtual ranks (`tpkernels.qualification.virtual`), including detection
of skipped waits. The qualification report of the machine stores the outcomes, so the stage `pair`
does not repeat these checks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import date
from functools import partial

from benchmarks.one_gpu.machine import Machine
from benchmarks.one_gpu.stages import Case, Row
from tpkernels.planning import qualification
from tpkernels.planning.qualification import QualificationReport, StageOutcome
from tpkernels.qualification import virtual
from tpkernels.qualification.run import make_outcome
from tpkernels.qualification.schedule import VIRTUAL

_DIRECT = ("two_shot", "one_shot", "ll", "ll_two_shot", "routed")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# Variants that `qualify` checks on one GPU, the most valuable first.
VARIANTS = (
    *(f"direct/{name}" for name in _DIRECT),
    *(f"{algorithm}/{kind}" for algorithm in ("fused", "pipelined") for kind in _KINDS),
    "fused/copy_engines",
)
_REHEARSED = ("direct/two_shot", "direct/routed", "fused/reduce_scatter")


def cases(machine: Machine) -> Iterator[Case]:
    """Yield a case for each variant of an algorithm."""
    variants = [name for name in VARIANTS if machine.kind != "stub" or name.startswith("fused/")]
    for variant in machine.choose(variants, _REHEARSED):
        yield variant, partial(_check, machine, variant)


def _check(machine: Machine, variant: str) -> Row:
    begin = time.monotonic()
    result = virtual.check(variant, "cpu" if machine.kind == "rehearsal" else "cuda")
    checks, failure = result.checks, result.failure
    if machine.is_gpu:
        seconds = round(time.monotonic() - begin, 1)
        _save(variant, make_outcome([] if failure is None else [failure], checks, seconds))
    row = {"bad": failure is not None, "calls": checks}
    return row if failure is None else row | {"error": str(failure)}


def _save(variant: str, outcome: StageOutcome) -> None:
    """Add an outcome to the qualification report, like `tpkernels qualify --tp 2`."""
    saved, _ = qualification.load("cuda")
    new = QualificationReport(date.today().isoformat(), litmus={"2": {VIRTUAL + variant: outcome}})
    with contextlib.suppress(OSError, RuntimeError):  # no folder for it: `pair` repeats the check
        qualification.save("cuda", (saved or QualificationReport()).extended(new))
