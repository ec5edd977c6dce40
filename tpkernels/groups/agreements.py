"""What the ranks of a group agree on between calls: measured times, numerics, what rank 0 says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from tpkernels.errors import TpkernelsError
from tpkernels.groups.endings import Endings
from tpkernels.groups.numerics import CudaNumerics
from tpkernels.groups.tuning import Tuning
from tpkernels.planning import store
from tpkernels.planning.machine import this_machine
from tpkernels.planning.problem import ORDERED, Problem
from tpkernels.planning.table import Series, Table, are_alike
from tpkernels.planning.trials import Trial
from tpkernels.symm import capture
from tpkernels.symm.exchange import exchange


class Agreements(Endings):
    """The part of a `Group` that holds what its ranks have agreed on."""

    rank: int
    world: int
    hosts: int
    gpu_timeout: float
    notices: list[str]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cuda_sums = CudaNumerics()
        self.times: dict[str, Table] = {}  #: rank 0's and of trials, by device type; see `tuned`
        self.trials: dict[Hashable, Trial] = {}  #: see ops/_trial.py
        self.tuning: Tuning | None = None  #: on the spot; see ops/_autotune.py
        #: The algorithms that failed when a problem was tuned, and why; empty if none did.
        self.left_out: dict[tuple[Series, int], dict[str, str]] = {}
        self._known: dict[str, str] = {}  # what `from_rank_0` has returned
        self.on_meshes: dict[Hashable, Any] = {}  #: what a mesh's ranks agreed on; see mesh/

    @property
    def shared_memory(self) -> bool:
        """Whether all ranks map each other's memory."""
        return self.workspace is not None

    def by_gloo(self, device: str) -> bool:
        """Whether gloo, which moves the host's memory, has the group's tensors of a device type."""
        raise NotImplementedError

    def has_times(self, device: str) -> bool:
        """Whether measured times apply to tensors of a device type: those of GPUs are taken with
        NCCL."""
        return not (device == "cuda" and self.by_gloo("cuda"))

    def timeout_on(self, device: str) -> float:
        """Seconds that a wait in a call on tensors of a device type may take."""
        return self.gpu_timeout if device == "cuda" else self.timeout

    def tuned(self, device: str) -> Table:
        """The times that rank 0 finds in its cache for tensors of a device type: what each rank
        found by itself might differ, and with it the choices. Collective at the first call."""
        if self.world > 1 and device not in self.times:
            with self.together():
                if device not in self.times:  # another thread was first
                    self.times[device] = self._tuned_by_rank_0(device)
        return self.times.get(device, Table())

    def use_times(self, device: str, table: Table) -> None:
        """Plans calls by these times from now on. All ranks use the same, from the same call on."""
        with self.lock:
            self.times[device] = table
            self.forget_calls()

    def tune_by(self, tuning: Tuning | None) -> None:
        """Plans calls anew, and tunes what they meet from now on; None: no longer. All ranks do so
        from the same call on."""
        with self.lock:
            self.tuning = tuning
            self.forget_calls()

    def _tuned_by_rank_0(self, device: str) -> Table:
        found, ignored = Table(), ""
        if self.rank == 0:
            machine = this_machine(device, self.world, self.hosts, self.shared_memory)
            found, ignored = store.load(machine)
        say, seconds = {"table": store.to_json(found)}, self.timeout_on(device)
        said = self.exchange(f"the first call on {device}", say, seconds)
        if ignored:
            self.notices.append(ignored)
        return store.from_json(said[0]["table"])

    def cuda_numerics(self) -> str:
        """How a reduction of CUDA tensors sums; the same on all ranks. Collective at the first call
        and after each change of torch's flag."""
        if self.world == 1 or self.by_gloo("cuda"):  # the host sums in order at no extra cost
            return ORDERED
        sums = self.cuda_sums
        if not sums.settled:
            with self.together(ValueError):
                if not sums.settled:  # another thread was first
                    say = {"numerics": sums.wanted}
                    said = self.exchange("numerics", say, self.timeout_on("cuda"))
                    sums.settle(self.rank, [each["numerics"] for each in said])
        return sums.agreed

    def left_out_of(self, problem: Problem) -> dict[str, str] | None:
        """The algorithms that failed when the problem, or one of nearly the same extent, was tuned
        on the spot, and why; None: none was."""
        key = problem.tuning_key if self.left_out else None
        if key is None:
            return None
        found = [
            names
            for (series, extent), names in self.left_out.items()
            if series == key[0] and are_alike(extent, key[1])
        ]
        return {name: why for names in found for name, why in names.items()} if found else None

    def is_met_in_capture(self, device: torch.device) -> bool:
        """Whether a problem is planned while a graph is captured, where nothing is tuned. It is
        planned again after the capture."""
        captured = capture.is_captured(device)
        self.untuned_in_capture = self.untuned_in_capture or captured
        return captured

    def forget_stale_calls(self, problem: Problem, device: torch.device) -> None:
        """Forgets the calls on CUDA tensors if this one would be planned otherwise now: torch's
        flag has changed, or the problem was met in a capture, where nothing is tuned."""
        if self.untuned_in_capture and not capture.is_captured(device):
            self.untuned_in_capture = False
            self.forget_calls()
        if problem.spec.reduces and self.cuda_sums.changed:
            self.forget_calls()

    def from_rank_0(self, purpose: str, make: Callable[[], str]) -> str:
        """What rank 0's ``make`` returns at the first call for a purpose; collective then."""
        if purpose not in self._known:
            with self.together():
                if purpose not in self._known:  # another thread was first
                    text = make()
                    if self.world > 1:
                        text = self.exchange(purpose, {"text": text}, self.timeout)[0]["text"]
                    self._known[purpose] = text
        return self._known[purpose]

    def known_from_rank_0(self, purpose: str) -> str | None:
        """What `from_rank_0` has returned for a purpose, if it has been called."""
        return self._known.get(purpose)

    def numbers_of_all(self, purpose: str, mine: Sequence[int], device: str) -> list[list[int]]:
        """A few numbers below 2^53 of each rank, in rank order. Collective."""
        seconds = self.timeout_on(device)
        with self.together():
            if self.workspace is not None:
                with self.workspace.waiting(seconds):
                    return self.workspace.numbers_of_all(purpose, mine)
            said = self.exchange(purpose, {"numbers": list(mine)}, seconds)
        return [each["numbers"] for each in said]

    def statements(self, purpose: str, say: dict[str, Any], device: str) -> list[dict[str, Any]]:
        """The statements of all ranks, in rank order. Collective, in turn with the calls."""
        with self.together():
            return self.exchange(purpose, say, self.timeout_on(device))

    def exchange(self, purpose: str, say: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """The statements of all ranks, in rank order, within ``seconds``. Collective."""
        if self.workspace is not None:
            with self.workspace.waiting(seconds):
                return self.workspace.exchange(purpose, say)
        return exchange(self.participant(seconds), purpose, say)

    @contextlib.contextmanager
    def together(self, *alike: type[Exception]) -> Iterator[None]:
        """What all ranks do together beside the calls of `backends.run`, in turn with them: an
        error breaks the group, unless it is one of ``alike``, which all ranks raise."""
        try:
            with self.turn():
                try:
                    self.check_kernels("a step that all ranks take together")
                    yield
                except alike:
                    raise
                except BaseException as error:
                    self.mark_broken(error)
                    self.tell_outside_calls(error)
                    raise
        except BaseException as error:  # also of a signal handler, in the wait for the turn
            if not isinstance(error, (TpkernelsError, *alike)):
                self.break_between_calls(error)
            raise
