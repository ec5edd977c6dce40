"""``auto`` tries algorithms in the first calls of a problem; planning/trials.py decides which."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tpkernels import _C
from tpkernels.call import Call
from tpkernels.local.exactness import layout_of, rows_are_exact
from tpkernels.local.packed import columns_of
from tpkernels.local.product import LocalProduct, Weight
from tpkernels.planning.steps import part_rows
from tpkernels.planning.trials import ELIGIBLE, Sample, Trial, is_eligible

_MOST_TRIALS = 1024  # of one group
# Fewest rows of a part with which a split is tried. With fewer, the time is that of streaming the
# weight, once for each part.
_FEWEST_ROWS = 16
_FLOAT64: Any = {"dtype": torch.float64, "device": "cpu"}


def tried(call: Call, plan: Callable[[str], Call]) -> Call:
    """The call as ``auto`` makes it: one that takes part in a trial, unless there is none for its
    problem or it is over. All ranks plan the same problems in the same order, and so have the same
    trials.

    Args:
        call: what is planned without a trial.
        plan: plans the same call with a given algorithm; ``NotImplementedError`` if that cannot
            run.
    """
    group, problem = call.group, call.problem
    if not group.autotune or problem.device != "cpu":  # whose times are not read for this
        return call
    if not is_eligible(problem, group.shared_memory, group.tuned(problem.device)):
        return call
    key, calls = problem.tuning_key, {}
    assert key is not None  # it is eligible
    for name in ELIGIBLE:
        try:
            calls[name] = plan(name)
        except NotImplementedError:
            continue
    chosen = call.plan.algorithm
    if len(calls) < 2 or chosen not in calls:
        return call
    trial = group.trials.get((*key, *calls))
    if trial is None:
        if len(group.trials) >= _MOST_TRIALS:
            return call
        trial = group.trials[(*key, *calls)] = Trial(*key, tuple(calls), chosen)
    return call if trial.over else replace(call, function=Tried(trial, calls))


class Tried:
    """The implementation of an op during a trial: runs the algorithm whose turn it is, and measures
    it."""

    def __init__(self, trial: Trial, calls: Mapping[str, Call]) -> None:
        self._trial, self._calls = trial, calls

    def __call__(
        self, call: Call, x: torch.Tensor, w: Weight | list[Weight], *operands: Any
    ) -> Any:
        trial, chosen = self._trial, self._calls[self._trial.algorithm]
        begin = time.perf_counter()
        result = chosen.function(chosen, x, w, *operands)
        end = time.perf_counter()
        other = sum(map(columns_of, w)) if isinstance(w, list) else x.shape[-1]
        trial.samples.append(Sample(begin, end, other))
        if trial.stage_over:
            self._end_stage(call, x, w if isinstance(w, list) else [w])
        return result

    def _end_stage(self, call: Call, x: torch.Tensor, weights: list[Weight]) -> None:
        trial, group, device = self._trial, call.group, call.problem.device
        if trial.begun:
            samples = torch.tensor(trial.samples, **_FLOAT64)
            times = _exchanged(call, f"the times of {len(samples)} calls", samples)
            trial.advance([[Sample(*each) for each in rank] for rank in times.tolist()])
        else:
            own = "pipelined" in self._calls and _may_split(call, x, weights)
            exact = _exchanged(call, "the exactness", torch.tensor([float(own)], **_FLOAT64))
            trial.begin(may_split=bool(exact.all()))
        if trial.over:
            group.use_times(device, group.tuned(device).extended(trial.measurements))


def _may_split(call: Call, x: torch.Tensor, weights: list[Weight]) -> bool:
    """Whether `pipelined` gives the bits of the other algorithms, on this rank. What it would make
    of fewer rows than `_FEWEST_ROWS` is not worth trying."""
    problem = call.problem
    parts = part_rows(problem, call.workspace.usable_bytes)
    if min(parts) < _FEWEST_ROWS:
        return False
    gathers = problem.op == "all_gather_matmul"
    columns, wire = x.shape[-1], x.dtype if gathers else problem.dtype
    return all(
        rows_are_exact(
            tuple(sorted(parts)),
            (problem.rows, columns, columns_of(w)),
            layout_of(w),
            x.dtype,
            wire,
        )
        for w in weights
        if not isinstance(w, LocalProduct)  # which promises it
    )


def _exchanged(call: Call, what: str, mine: torch.Tensor) -> torch.Tensor:
    """A tensor of float64 of each rank, in rank order: [W, ...]."""
    world = call.problem.world
    text = f"{what} of {call.problem}"
    everyone = torch.empty((world, *mine.shape), **_FLOAT64)
    workspace, signature = call.workspace, zlib.crc32(text.encode()) or 1
    collective = _C.calls.Collective(workspace.channel, workspace.segments, signature, text)
    collective.all_gather(mine, everyone, _C.host.ShardLayout(1, mine.numel(), (1,) * world))
    return everyone
