"""``auto`` tries algorithms in the first calls of a problem; planning/trials.py decides which."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tpkernels.call import Call
from tpkernels.planning.choose import is_worth_trying
from tpkernels.planning.contest import Sample
from tpkernels.planning.trials import ELIGIBLE, Trial, is_eligible
from tpkernels.tuning.together import FLOAT64, exchanged, other_extent

_MOST_TRIALS = 1024  # of one group


def tried(call: Call, plan: Callable[[str], Call]) -> Call:
    """Return the call as ``auto`` makes it: one that takes part in a trial, unless there is none
    for its problem or it is over. All ranks plan the same problems in the same order, and so have
    the same trials.

    Args:
        call: what is planned without a trial.
        plan: plans the same call with a given algorithm; ``NotImplementedError`` if that cannot
            run.
    """
    group, problem = call.group, call.problem
    if group.autotune is False or problem.device != "cpu":  # whose times are not read for this
        return call
    if not is_eligible(problem, group.shared_memory, group.tuned(problem.device)):
        return call
    key, calls = problem.tuning_key, {}
    assert key is not None  # it is eligible
    for name in ELIGIBLE:
        if name != call.plan.algorithm and not is_worth_trying(problem, name):
            continue
        try:
            calls[name] = plan(name)
        except NotImplementedError:
            continue
    chosen = call.plan.algorithm
    if len(calls) < 2 or chosen not in calls:
        return call
    trial = group.measured.trials.get((*key, *calls))
    if trial is None:
        if len(group.measured.trials) >= _MOST_TRIALS:
            return call
        trial = group.measured.trials[(*key, *calls)] = Trial(*key, tuple(calls), chosen)
    return call if trial.over else replace(call, function=Tried(trial, calls))


class Tried:
    """The implementation of an op during a trial: runs the algorithm whose turn it is, and measures
    it."""

    def __init__(self, trial: Trial, calls: Mapping[str, Call]) -> None:
        self._trial, self._calls = trial, calls

    def __call__(self, call: Call, x: torch.Tensor, factor: Any, *operands: Any) -> Any:
        """``factor``: a weight, or what has several ``weights``."""
        trial, chosen = self._trial, self._calls[self._trial.algorithm]
        begin = time.perf_counter()
        result = chosen.function(chosen, x, factor, *operands)
        end = time.perf_counter()
        weights = getattr(factor, "weights", factor)
        trial.samples.append(Sample(begin, end, other_extent(x, weights)))
        if trial.stage_over:
            self._end_stage(call)
        return result

    def _end_stage(self, call: Call) -> None:
        trial, group, problem = self._trial, call.group, call.problem
        if trial.begun:
            samples = torch.tensor(trial.samples, **FLOAT64)
            what = f"the times of {len(samples)} calls"
            times = exchanged(group, problem, what, samples)
            trial.advance([[Sample(*each) for each in rank] for rank in times.tolist()])
        else:
            trial.begin()
        if trial.over:
            known = group.tuned(problem.device)
            group.use_times(problem.device, known.extended(trial.measurements))
