"""An explicit-state model checker for the synchronisation of the fused communication kernels.

Every rank has a region of shared memory: a buffer and signal words, both doubled by the parity of
the epoch (the number of the call). A word is the epoch. It is pushed into the region of the rank
that waits for it, at [parity][phase][source], and the waiter compares for equality. A buffer has
one slot and one result slot per source; "pull" takes all of it as one buffer of its owner.

A rank is a list of atomic steps; writing or reading data takes two, begin and end. `check` visits
all interleavings breadth first, without any reduction: a failure comes with a shortest trace.

Steps are sequentially consistent here. The kernels have only release and acquire, but these order
data (writes and reads) before the word published after it. A word has one writer and each wait
accepts one value of it, so that a stale view of a word only means a longer wait. What the ranks
observe is therefore some order of these steps, unless there is a data race, which is a bad read
here.

Not in the model: the blocks of one rank. They count as one thread, so no block may enter an epoch
before all have finished the previous one, and none may wait for a block that cannot start until it
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

EMPTY = 1  # the rank without rows in the calls "push-empty" and "two-shot-empty"
MIXED = 255  # data of two writers at once; otherwise twice the epoch, plus 1 while being written
BREAKS = (
    "single_buffer",  # the buffer is not doubled
    "single_words",  # the words are not doubled
    "no_wait",  # waits return at once
    "no_final_wait",  # rank EMPTY does not wait for `entered` at the end of push and two-shot
    "never_final_wait",  # no rank does
    "silent_empty",  # rank EMPTY publishes nothing
)
ENTERED, TILE, RESULT = PHASES = range(3)
PHASE_NAMES = ("entered", "tile", "result")


class Step(NamedTuple):
    action: str  # "begin" or "end" of a write, "post" or "wait" for a word, "read"
    start: int  # the bytes of the state that it concerns
    stop: int
    data: bytes  # to be put there, or expected there
    text: str


class Verdict(NamedTuple):
    failure: str  # "", "bad read" or "deadlock"
    states: int  # visited
    trace: list[tuple[int, str]]  # (rank, step), up to the failure

    def __str__(self) -> str:
        lines = [f"{self.failure or 'right'}, {self.states} states"]
        return "\n".join(lines + [f"  rank {rank}: {text}" for rank, text in self.trace])


class Program:
    """The steps of one rank. A state is bytes: program counters, then buffers, then words."""

    def __init__(self, rank: int, world: int, calls: Sequence[str], broken: str) -> None:
        self.rank, self.world, self.broken = rank, world, broken
        self.peers = [(rank + i) % world for i in range(1, world)]
        self.epoch = 0
        self.steps: list[Step] = []
        for kind in calls:
            self._call(kind)

    def _add(self, action: str, start: int, size: int, value: int, text: str) -> None:
        data = bytes([value]) * size
        self.steps.append(Step(action, start, start + size, data, f"epoch {self.epoch}: {text}"))

    def _buffer(self, owner: int) -> int:
        parity = 0 if self.broken == "single_buffer" else self.epoch & 1
        return self.world + (owner * 2 + parity) * 2 * self.world

    def _word(self, owner: int, phase: int, source: int) -> int:
        parity = 0 if self.broken == "single_words" else self.epoch & 1
        index = ((owner * 2 + parity) * len(PHASES) + phase) * self.world + source
        return self.world + 4 * self.world**2 + index

    def _place(self, owner: int, source: int | None, result: bool) -> tuple[int, int, str]:
        if source is None:
            return self._buffer(owner), 2 * self.world, f"buffer of {owner}"
        start = self._buffer(owner) + result * self.world + source
        return start, 1, f"{'result ' * result}slot of {source} at {owner}"

    def write(self, owner: int, source: int | None = None, result: bool = False) -> None:
        start, size, name = self._place(owner, source, result)
        torn = 2 * self.epoch + 1
        self._add("begin", start, size, torn, f"begins to write {name}")
        self._add("end", start, size, torn, f"has written {name}")

    def read(self, owner: int, source: int | None = None, result: bool = False) -> None:
        start, size, name = self._place(owner, source, result)
        complete = 2 * self.epoch
        self._add("read", start, size, complete, f"begins to read {name}")
        self._add("read", start, size, complete, f"has read {name}")

    def post(self, phase: int, to: int) -> None:
        text = f"posts `{PHASE_NAMES[phase]}` to {to}"
        self._add("post", self._word(to, phase, self.rank), 1, self.epoch, text)

    def wait(self, phase: int, source: int) -> None:
        if self.broken != "no_wait":
            text = f"has waited for `{PHASE_NAMES[phase]}` of {source}"
            self._add("wait", self._word(self.rank, phase, source), 1, self.epoch, text)

    def _call(self, kind: str) -> None:
        """One epoch: "pull", "push", "two-shot", or one of the last two with "-empty"; or
        "ll", whose words are the data: a reader of the wrong word waits."""
        self.epoch += 1
        first = len(self.steps)
        if kind == "pull":
            self._pull()
        elif kind == "ll":
            self._ll()
        else:
            self._push(kind.startswith("two-shot"), EMPTY if kind.endswith("-empty") else None)
        if self.broken == "silent_empty" and self.rank == EMPTY:
            self.steps[first:] = [s for s in self.steps[first:] if s.action in ("wait", "read")]

    def _pull(self) -> None:
        self.write(self.rank)
        for peer in self.peers:
            self.post(ENTERED, peer)
        for peer in self.peers:
            self.wait(ENTERED, peer)
            self.read(peer)

    def _ll(self) -> None:
        for peer in self.peers:
            self.post(ENTERED, peer)
        for peer in self.peers:
            self.post(TILE, peer)
        for peer in self.peers:
            self.wait(TILE, peer)
        if self.broken != "never_final_wait":
            for peer in self.peers:
                self.wait(ENTERED, peer)

    def _push(self, two_shot: bool, empty: int | None) -> None:
        for peer in self.peers:
            self.post(ENTERED, peer)
        all_or_none = self.peers if self.rank != empty else []
        with_rows = [peer for peer in self.peers if peer != empty]
        self._exchange(TILE, with_rows, all_or_none)
        if two_shot:
            self._exchange(RESULT, all_or_none, with_rows)
        skips = self.broken == "no_final_wait" and self.rank == EMPTY
        if self.broken != "never_final_wait" and not skips:
            for peer in self.peers:
                self.wait(ENTERED, peer)

    def _exchange(self, phase: int, to: list[int], sources: list[int]) -> None:
        for peer in to:
            self.write(peer, self.rank, phase == RESULT)
            self.post(phase, peer)
        for peer in sources:
            self.wait(phase, peer)
            self.read(self.rank, peer, phase == RESULT)


def advance(state: bytes, rank: int, step: Step) -> bytes | None:
    """The state after the step; None if a wait blocks or a read finds other data."""
    action, start, stop, data, _ = step
    matches = state[start:stop] == data
    if action in ("wait", "read"):
        if not matches:
            return None
    else:
        if action == "end":
            # Another rank that wrote since our begin may have left its data among ours, or ours
            # among its own.
            data = bytes([data[0] - 1 if matches else MIXED]) * len(data)
        state = state[:start] + data + state[stop:]
    return state[:rank] + bytes([state[rank] + 1]) + state[rank + 1 :]


def check(calls: Sequence[str], world: int, broken: str = "") -> Verdict:
    """Runs the calls, one per epoch, in all interleavings of the ranks, until one fails."""
    assert broken in ("", *BREAKS)
    steps = [Program(rank, world, calls, broken).steps for rank in range(world)]
    start = bytes(world + (4 + 2 * len(PHASES)) * world**2)
    parents: dict[bytes, bytes] = {start: b""}

    def trace(state: bytes) -> list[tuple[int, str]]:
        taken = []
        while parent := parents[state]:
            rank = next(r for r in range(world) if state[r] != parent[r])
            taken.append((rank, steps[rank][parent[rank]].text))
            state = parent
        return taken[::-1]

    queue = deque([start])
    while queue:
        state = queue.popleft()
        running = [rank for rank in range(world) if state[rank] < len(steps[rank])]
        blocked = 0
        for rank in running:
            step = steps[rank][state[rank]]
            after = advance(state, rank, step)
            if after is None and step.action == "read":
                last = (rank, f"BAD: {step.text}, {list(state[step.start : step.stop])}")
                return Verdict("bad read", len(parents), [*trace(state), last])
            if after is None:
                blocked += 1
            elif after not in parents:
                parents[after] = state
                queue.append(after)
        if running and blocked == len(running):
            stuck = [(r, f"STUCK before {steps[r][state[r]].text}") for r in running]
            return Verdict("deadlock", len(parents), trace(state) + stuck)
    return Verdict("", len(parents), [])
