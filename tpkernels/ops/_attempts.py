"""What all ranks do on a second group, which a failure may break: see `_autotune.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpkernels.errors import CollectiveMismatchError, PeerLostError, TpkernelsError
from tpkernels.groups.group import Group
from tpkernels.ops._together import FLOAT64, exchanged
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.problem import Problem
from tpkernels.text import of_error


class Failed(Exception):
    """An algorithm is to be left out, on all ranks."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


class Attempts:
    """The attempts of one problem. ``group`` is the real one, whose turn the caller has."""

    def __init__(self, group: Group, problem: Problem) -> None:
        self._group, self._problem = group, problem

    def agree(self) -> None:
        """Checks that all ranks tune the same problem. Collective."""
        seconds = self._group.timeout_on(self._problem.device)
        texts = self._group.exchange("tuning", {"problem": str(self._problem)}, seconds)
        for rank, said in enumerate(texts):
            if said["problem"] != str(self._problem):
                raise CollectiveMismatchError(
                    f"rank {self._group.rank} tunes {self._problem}, but rank {rank} "
                    f"{said['problem']}. The group is broken: make a new one.",
                    peer=rank,
                )

    def exchanged(self, what: str, *mine: float) -> list[list[float]]:
        """The numbers of all ranks, in rank order. Collective."""
        numbers = torch.tensor(mine, **FLOAT64)
        found: list[list[float]] = exchanged(self._group, self._problem, what, numbers).tolist()
        return found

    def make(
        self, name: str, second: Group, run: Callable[[], Sequence[float]], count: int = 0
    ) -> list[list[float]] | None:
        """What all ranks do on the second group for an algorithm: the ``count`` numbers that each
        returns, in rank order; None: it cannot run, on any rank. `Failed` if it fails on one. No
        rank goes on before all have left it."""
        numbers: Sequence[float] = [0.0] * count
        supported, error = True, None
        try:
            numbers = run()
        except NotImplementedError:  # on all ranks
            supported = False
        except Exception as failure:  # whatever it is, the others go on without
            second.mark_broken(failure)
            if self._group.workspace is None:  # its calls go through the one process group
                raise
            error = failure
        try:
            everyone = self.exchanged(f"'{name}'", float(error is not None), *numbers)
            if any(failed for failed, *_ in everyone):
                raise self._failure(name, error)
        finally:
            error = None  # it has this frame, and what failed in it, in its traceback
        return [theirs for _, *theirs in everyone] if supported else None

    def _failure(self, name: str, error: Exception | None) -> Exception:
        """An algorithm has failed on one rank or more: why, or what is to be raised if it cannot be
        left out."""
        # What a peer's failure has caused does not say why.
        own = error is not None and not isinstance(error, TpkernelsError)
        say = {"why": "" if error is None else of_error(error), "own": own}
        seconds = self._group.timeout_on(self._problem.device)
        said = self._group.exchange("a failure while tuning", say, seconds)
        culprit = max(
            range(len(said)), key=lambda rank: (said[rank]["own"], said[rank]["why"] != "", -rank)
        )
        why = f"rank {culprit}: {said[culprit]['why']}"
        if ALGORITHMS[name].needs_shared_memory:
            return Failed(name, why)
        text = f"{self._problem} by '{name}', which was tuned, failed on {why}"
        return error or PeerLostError(text, peer=culprit)
