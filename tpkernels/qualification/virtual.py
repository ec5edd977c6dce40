"""Virtual ranks: all ranks of a group in one process, on one GPU.

Problem: the processes of two ranks that share a GPU run in time slices of about 2 ms, so their
kernels never run at the same time, and each wait lasts a slice.

Algorithm: each rank has a separate region, workspace and stream in one address space. A kernel
uses at most 1/world of the multiprocessors, so the kernels of all ranks are resident together and
wait for one another as they would on several GPUs. The algorithms run unchanged: a `VirtualRank`
replaces their group and its memory.

Loading: CUDA may wait for an idle device before it loads a kernel, and so may the allocator before
it maps memory. Therefore `load` first runs every call with its waits aborted, one rank at a time.

Virtual ranks prove signals, epochs, parity, acquire and release on real hardware. They prove
neither the order and latency of a link nor multicast. In a rehearsal on CPU tensors each rank is a
fork of this process.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from tpkernels.algorithms import backends
from tpkernels.cuda import layouts
from tpkernels.errors import TpkernelsError
from tpkernels.groups.call import Call
from tpkernels.launch.session import rank_device
from tpkernels.ops.problems import problem_of
from tpkernels.ops.registration import arguments_of, execution_of
from tpkernels.ops.tuner import graph_of
from tpkernels.planning.choose import Means, choose
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import COPY_ENGINES, Failure
from tpkernels.qualification.checks import (
    DELAY_US,
    TOP_K,
    CheckedCall,
    Failed,
    StageReport,
    accumulate_in_float32,
    calls_of,
    compared,
    copying,
    failure_of,
    reporting,
    shapes_on,
)
from tpkernels.qualification.op_case import Operands
from tpkernels.symm.device import FAILED, DeviceWorkspace, kernel_error, region_bytes
from tpkernels.symm.gpu_memory import GpuSegments
from tpkernels.symm.streams import SideStream
from tpkernels.torch_private import gpu_sleep, schema_of

Results = list[torch.Tensor]
Launch = Callable[[], Results]

WORLDS = (2, 4, 8)
# Streams that share a hardware queue run in the order of their launches, so a wait in one blocks
# the signal of the other. There are at most 32 queues. Ranks that copy use 4 streams each.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  #: of the process
_MAX_COPYING_RANKS = 4
TIMEOUT_S = 4.0  # of a wait on a GPU
_CPU_TIMEOUT_S = 60.0
_EPOCHS = {"cpu": 2, "cuda": 8}  # of each call, with new values
_CONTROLS = 3  # attempts to see skipped waits
_GATE_CYCLES = 500_000  # about 0.25 ms, in which the host queues the launch of a rank
_LATE_CYCLES, _LATE_S = 10_000_000, 3.0  # delay between the starts of two ranks, GPU and CPU
_SLACK_BYTES = 1 << 20


class VirtualRank:
    """A rank as algorithms see it: its group, the group's workspace, and the memory on the GPU."""

    node = None
    name = "virtual"

    def __init__(self, space: DeviceWorkspace, device: torch.device) -> None:
        self.rank, self.world, self.workspace = space.rank, space.world, self
        self.current, self.on_gpus = space, {device: self}
        self.segments, self.side = GpuSegments(), SideStream(device)

    def cuda(self, device: torch.device, words: int, nbytes: int, text: str) -> VirtualRank:
        """Return the memory for a call; ``RuntimeError`` if it is too small."""
        if not self.current.holds(words, nbytes):
            space = self.current
            raise RuntimeError(
                f"{text} needs {words} signals and {nbytes} buffer bytes; virtual ranks have "
                f"{space.words} signals and {space.buffer_bytes} bytes"
            )
        return self

    def unsupported_kernels(self, *_: object) -> None:
        """Return None: all ranks are here, and can do what this one can."""

    def __enter__(self) -> VirtualRank:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class VirtualRanks:
    """The ranks of a group in this process.

    Args:
        device: the GPU, or "cpu" for a rehearsal.
        nbytes: of the largest tensor that a call communicates.
        variants: the variants of `direct` and `fused` to choose from.
        forked: whether each rank is a fork of this process; by default on CPU tensors.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        nbytes: int,
        variants: frozenset[str] = frozenset(),
        forked: bool | None = None,
    ) -> None:
        self.world, self.device = world, device
        self._on_gpu = device.type == "cuda"
        self._forked = not self._on_gpu if forked is None else forked
        words, buffer_bytes = layouts.ll_words(nbytes, nbytes), 4 * nbytes + _SLACK_BYTES
        size = region_bytes(world, words, buffer_bytes)
        regions = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        if self._forked:
            regions = [region.share_memory_() for region in regions]
        self._regions, addresses = regions, [region.data_ptr() for region in regions]
        limits = words, buffer_bytes, _CPU_TIMEOUT_S if self._forked else TIMEOUT_S
        self.spaces = [
            DeviceWorkspace(addresses, region, rank, *limits) for rank, region in enumerate(regions)
        ]
        for space in self.spaces:
            space.use_variants(variants)
            if self._forked:  # the parent reads what its children write
                space.state.share_memory_()
                space.control.share_memory_()
                word = space.control.data_ptr() + FAILED * space.control.itemsize
                space._failed = ctypes.c_int64.from_address(word)
        self.ranks = [VirtualRank(space, device) for space in self.spaces]
        self._streams = [torch.cuda.Stream(device) for _ in range(world) if self._on_gpu]
        self._first = 0  # the rank whose launch is queued first, another one each time
        self._synchronize()

    def prepare(self, call: CheckedCall, variant: str) -> tuple[list[Operands], list[Launch]]:
        """Return the operands of a call on all ranks, and its launches, which are loaded."""
        operands = [call.operands(rank, self.world, self.device) for rank in range(self.world)]
        launches = [self.bind(one, variant.partition("/")[0]) for one in operands]
        self.load(launches)
        return operands, launches

    def bind(self, operands: Operands, algorithm: str) -> Launch:
        """Return what makes a call on the rank of its operands: results are as those of
        `Operands.run`."""
        rank = self.ranks[operands.rank]
        schema = schema_of(getattr(torch.ops.tpkernels, operands.of.op).default)
        options = {"group": rank.name, "algorithm": algorithm, **operands.options}
        arguments = arguments_of(schema, operands.spec)
        given = arguments.named(tuple(operands.factors), options)
        if isinstance(getattr(given, "weights", None), torch.Tensor):
            given = given._replace(weights=[given.weights])
        problem = problem_of(operands.of.op, cast(Any, rank), given)
        problem = replace(problem, device="cuda")  # also of CPU tensors, in a rehearsal
        plan = choose(problem, Means(shared_memory=True), requested=algorithm)
        function = backends.implementation(problem, plan)
        call = Call(cast(Any, rank), problem, plan, function, 0)
        execute = execution_of(OPS[operands.of.op])

        def launch() -> Results:
            results = execute(call, given)
            if isinstance(results, torch.Tensor):
                return [results]
            first, second, *_ = results
            if isinstance(second, list):  # an all-gather's: its products
                return second
            return [second, first] if operands.spec.normed else list(results)

        return launch

    def load(self, launches: Sequence[Launch]) -> None:
        """Run every launch by itself, with its waits aborted, so that the kernels are compiled and
        loaded before launches wait for one another. The allocator has memory for each stream."""
        if self._forked:
            return
        for rank, launch in enumerate(launches):
            self.spaces[rank].abort(0)
            with torch.cuda.stream(self._streams[rank] if self._on_gpu else None):
                launch()
            self._synchronize()
        for space, region in zip(self.spaces, self._regions, strict=True):
            for memory in (region, space.state, space.control):
                memory.zero_()
        self._synchronize()

    def queue(self, launches: Sequence[Launch], late: bool = False) -> list[Results]:
        """Queue the launches of all ranks on a GPU, to start together, or each ``late`` after the
        last one; also in a capture."""
        main, results = torch.cuda.current_stream(self.device), dict[int, Results]()
        if not torch.cuda.is_current_stream_capturing():
            gpu_sleep(self.world * _GATE_CYCLES)
        begin = main.record_event()
        for i in range(self.world):
            rank = (self._first + i) % self.world
            stream = self._streams[rank]
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                if late:
                    gpu_sleep(rank * _LATE_CYCLES)
                results[rank] = launches[rank]()
        self._first = (self._first + 1) % self.world
        for stream in self._streams:
            main.wait_stream(stream)
        return [results[rank] for rank in range(self.world)]

    def run(
        self,
        launches: Sequence[Launch],
        check: Callable[[int, Results], Failure | None],
        *,
        replay: Callable[[], list[Results]] | None = None,
        late: bool = False,
    ) -> Failure | None:
        """Run the launches of all ranks, or ``replay`` their graph, then ``check(rank, results)``
        for each; return the first failure. ``late``: each rank starts after the last one."""

        def run_and_check(rank: int) -> Failure | None:
            time.sleep(rank * _LATE_S if late else 0)
            return check(rank, launches[rank]())

        if self._forked:
            return _in_forks([partial(run_and_check, rank) for rank in range(self.world)])
        results = self.queue(launches, late) if replay is None else replay()
        self._synchronize()
        return next(filter(None, map(check, range(self.world), results)), None)

    def capture(self, launches: Sequence[Launch], calls: int = 1) -> Callable[[], list[Results]]:
        """Return what replays a graph of ``calls`` calls on all ranks, and returns the last
        results. Not on CPUs."""
        made: list[list[Results]] = []
        replay = graph_of(lambda: made.append(self.queue(launches)), calls)

        def run() -> list[Results]:
            replay()
            return made[-1]

        return run

    def set_chaos(self, max_delay_us: int, **broken: bool) -> None:
        """See `DeviceWorkspace.set_chaos`."""
        for space in self.spaces:
            space.set_chaos(space.rank, max_delay_us, **broken)

    def failed_wait(self) -> tuple[int, TpkernelsError] | None:
        """Return the first rank of which a wait has failed so far, and the error."""
        for space in self.spaces:
            if (found := space.failure()) is not None:
                where, timeout = f"virtual ranks, {space.world}", space.timeout_ns / 1e9
                error = kernel_error(found, where=where, rank=space.rank, timeout=timeout)
                return space.rank, error
        return None

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)


@contextmanager
def sharing(device: torch.device, world: int) -> Iterator[None]:
    """Give the kernels of each of ``world`` ranks its share of the device's multiprocessors."""
    from tpkernels.kernels import configs, words

    if words.INTERPRETED:  # such kernels have a few programs
        yield
        return
    capability, count = configs.properties_of(device)
    blocks = layouts.MOST_BLOCKS
    layouts.MOST_BLOCKS = max(1, min(blocks, count // world))
    try:
        with configs.assuming(capability, count // world):
            yield
    finally:
        layouts.MOST_BLOCKS = blocks


def _in_forks(jobs: Sequence[Callable[[], Failure | None]]) -> Failure | None:
    """Run each job in a fork of this process; return the first failure."""
    children = []
    for rank, job in enumerate(jobs):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                torch.set_num_threads(1)
                failure = job()
            except BaseException as error:  # a Ctrl-C must not go on in the parent's code
                failure = failure_of(error, "a CPU dry run", rank)
            with open(writer, "wb") as pipe:
                pickle.dump(failure, pipe)
            os._exit(0)
        os.close(writer)
        children.append((pid, reader))
    failures = []
    for rank, (pid, reader) in enumerate(children):
        with open(reader, "rb") as pipe:
            told = pipe.read()
        status = os.waitpid(pid, 0)[1]
        crash = Failure("crash", "a CPU dry run", rank, text=f"the process ended: status {status}")
        failures.append(pickle.loads(told) if told else crash)
    return next(filter(None, failures), None)


def check(variant: str, device: str, repeats: int = 1) -> StageReport:
    """Check a variant on 2, 4 and 8 virtual ranks: exact integers over several epochs, without and
    with random delays, and in replayed graphs. Then skip all waits, which must give wrong
    results."""
    accumulate_in_float32()
    copies = variant.startswith("pipelined/") or variant == f"fused/{COPY_ENGINES}"
    with reporting() as report:
        where = rank_device(device)
        for world in WORLDS[:1] if device == "cpu" else WORLDS:
            if copies and world > _MAX_COPYING_RANKS:
                continue
            with sharing(where, world), copying(variant):
                calls = list(_calls(variant, device, world, repeats))
                ranks = ranks_for(variant, where, world, calls)
                for call in calls:
                    report.call = str(call)
                    _check_call(ranks, call, variant)
                    report.checks += 1
        report.call = f"{variant} without waits"
        with sharing(where, WORLDS[0]), copying(variant):
            typical = _calls(variant, device, WORLDS[1], 1)
            _check_control(variant, where, next(call for call in typical if call.delayed))
    return report


def _calls(variant: str, device: str, world: int, repeats: int) -> Iterator[CheckedCall]:
    """Return the calls on integers; of more than two ranks, those of one shape and dtype."""
    for call in calls_of(variant, device, repeats):
        typical = call.shape == shapes_on(device)[1] and call.dtype == torch.bfloat16
        if call.exact and (world == WORLDS[0] or typical):
            yield call


def ranks_for(
    variant: str, device: torch.device, world: int, calls: Sequence[CheckedCall]
) -> VirtualRanks:
    """Return virtual ranks that hold these calls and use no other variant."""
    algorithm, _, name = variant.partition("/")
    sizes = (m * max(n, k) * call.dtype.itemsize for call in calls for m, n, k in [call.shape])
    rows = TOP_K if name == "routed" else 1
    variants = frozenset({name} if algorithm in ("direct", "fused") else ())
    return VirtualRanks(world, device, rows * max(sizes), variants)


def _check_call(ranks: VirtualRanks, call: CheckedCall, variant: str) -> None:
    """Make a call over several epochs, with new values in each; raise `Failed` if it is wrong."""
    ranks.set_chaos(DELAY_US if call.delayed else 0)
    operands, launches = ranks.prepare(call, variant)
    replay = ranks.capture(launches) if call.replayed else None
    previous: list[Results] = [[] for _ in operands]
    for epoch in range(_EPOCHS[ranks.device.type]):
        renewed = [one.refill(call.seed + 1000 * epoch) for one in operands]
        failure = ranks.run(launches, partial(_compare, renewed, previous), replay=replay)
        if (failed := ranks.failed_wait()) is not None:
            rank, error = failed
            failure = failure_of(error, str(call), rank)
        if failure is not None:
            raise Failed(failure)


def _compare(
    operands: Sequence[Operands], previous: list[Results], rank: int, results: Results
) -> Failure | None:
    return compared(operands[rank], results, previous[rank])


def _check_control(variant: str, device: torch.device, call: CheckedCall) -> None:
    """Skip the waits of a call whose ranks start late, until its results are wrong."""
    for _ in range(_CONTROLS):
        ranks = ranks_for(variant, device, WORLDS[0], [call])
        ranks.set_chaos(DELAY_US, skip_waits=True)
        operands, launches = ranks.prepare(call, variant)
        check = partial(_compare, operands, [[] for _ in operands])
        failure = ranks.run(launches, check, late=True)
        if failure is not None and failure.kind == "wrong" and ranks.failed_wait() is None:
            return
    text = f"correct results in {_CONTROLS} runs without waits: the checks miss a removed wait"
    raise Failed(Failure("error", f"{call}, without waits", 0, text=text))
