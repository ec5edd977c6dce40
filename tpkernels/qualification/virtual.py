"""Virtual ranks: all ranks of a group in one process, on one GPU.

Problem: two processes that share a GPU run in time slices of about 2 ms. Their kernels never run
concurrently, and each wait lasts a time slice.

Algorithm: each rank has a separate region, workspace and stream in one address space. A kernel
uses at most 1/world of the multiprocessors. The kernels of all ranks are therefore resident
together and wait for each other as on several GPUs. The algorithms are unchanged: a `VirtualRank`
replaces the group and its memory.

Loading: CUDA may wait for an idle device before it loads a kernel or maps memory. Therefore `load`
first runs every call with aborted waits, one rank at a time.

Coverage: virtual ranks validate signals, epochs, parity, acquire and release on real hardware.
They do not validate ordering and latency of a link, or multicast. In a dry run on CPU tensors each
rank is a fork of this process.
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
from tpkernels.ops.problems import make_problem
from tpkernels.ops.registration import get_executor, make_argument_parser
from tpkernels.ops.tuner import capture_graph
from tpkernels.planning.choose import Capabilities, choose
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import COPY_ENGINES, Failure
from tpkernels.qualification.checks import (
    DELAY_US,
    TOP_K,
    CheckedCall,
    StageFailed,
    StageReport,
    accumulate_in_float32,
    collect_report,
    compare_results,
    force_copy_engines,
    get_shapes,
    make_calls,
    make_failure,
)
from tpkernels.qualification.op_case import Operands
from tpkernels.symm.device import FAILED, DeviceWorkspace, kernel_error, region_bytes
from tpkernels.symm.gpu_memory import GpuSegments
from tpkernels.symm.streams import SideStreams
from tpkernels.torch_private import get_schema, gpu_sleep

Results = list[torch.Tensor]
Launch = Callable[[], Results]

WORLDS = (2, 4, 8)
# Streams that share a hardware queue run in launch order, so a wait in one stream would block the
# signal of a second stream. A GPU has at most 32 queues. Ranks that copy use 4 streams each.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  #: environment of the process
_MAX_COPYING_RANKS = 4
TIMEOUT_S = 4.0  # timeout of a wait on a GPU
_CPU_TIMEOUT_S = 60.0
_EPOCHS = {"cpu": 2, "cuda": 8}  # epochs per call, with new values in each
_CONTROLS = 3  # attempts to detect skipped waits
_GATE_CYCLES = 500_000  # about 0.25 ms; the host queues the launch of a rank in this time
_LATE_CYCLES, _LATE_S = 10_000_000, 3.0  # delay between the starts of two ranks, GPU and CPU
_SLACK_BYTES = 1 << 20


class VirtualRank:
    """A rank as seen by the algorithms. It replaces the group, the workspace and the GPU memory."""

    node = None
    name = "virtual"
    numerics: str | None = None

    def __init__(self, workspace: DeviceWorkspace, device: torch.device) -> None:
        self.rank, self.world, self.workspace = workspace.rank, workspace.world, self
        self.current, self.cuda_workspaces = workspace, {device: self}
        self.segments, self.side_streams = GpuSegments(), SideStreams(device)

    def cuda_workspace(
        self, device: torch.device, signals: int, buffer_bytes: int, description: str
    ) -> VirtualRank:
        """Return the GPU memory of a call. ``RuntimeError`` if it is too small."""
        if not self.current.holds(signals, buffer_bytes):
            workspace = self.current
            raise RuntimeError(
                f"{description} needs {signals} signals and {buffer_bytes} buffer bytes; "
                f"virtual ranks have {workspace.signals} signals and {workspace.buffer_bytes} bytes"
            )
        return self

    def unsupported_kernels(self, *_: object) -> None:
        """Return None: all ranks are in this process and support the same kernels."""

    def __enter__(self) -> VirtualRank:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class VirtualRanks:
    """The ranks of a group in this process.

    Args:
        device: the GPU, or "cpu" for a dry run.
        nbytes: size of the largest communicated tensor.
        variants: variants of `direct` and `fused` that calls may use.
        forked: whether each rank is a fork of this process. Default: only on CPU tensors.
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
        signals, buffer_bytes = layouts.ll_signals(nbytes, nbytes), 4 * nbytes + _SLACK_BYTES
        size = region_bytes(world, signals, buffer_bytes)
        regions = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(world)]
        if self._forked:
            regions = [region.share_memory_() for region in regions]
        self._regions, addresses = regions, [region.data_ptr() for region in regions]
        limits = signals, buffer_bytes, _CPU_TIMEOUT_S if self._forked else TIMEOUT_S
        self.workspaces = [
            DeviceWorkspace(addresses, region, rank, *limits) for rank, region in enumerate(regions)
        ]
        for workspace in self.workspaces:
            workspace.use_variants(variants)
            if self._forked:  # the parent reads what its children write
                workspace.state.share_memory_()
                workspace.control.share_memory_()
                address = workspace.control.data_ptr() + FAILED * workspace.control.itemsize
                workspace._failed = ctypes.c_int64.from_address(address)
        self.ranks = [VirtualRank(workspace, device) for workspace in self.workspaces]
        self._streams = [torch.cuda.Stream(device) for _ in range(world) if self._on_gpu]
        self._first = 0  # rank whose launch is queued first; changes with every call
        self._synchronize()

    def prepare(self, call: CheckedCall, variant: str) -> tuple[list[Operands], list[Launch]]:
        """Return the operands and the loaded launches of a call, one per rank."""
        operands = [call.operands(rank, self.world, self.device) for rank in range(self.world)]
        launches = [self.bind(item, variant.partition("/")[0]) for item in operands]
        self.load(launches)
        return operands, launches

    def bind(self, operands: Operands, algorithm: str) -> Launch:
        """Return a function that runs a call on the rank of the operands. It returns results like
        `Operands.run`."""
        rank = self.ranks[operands.rank]
        schema = get_schema(getattr(torch.ops.tpkernels, operands.case.op).default)
        options = {"group": rank.name, "algorithm": algorithm, **operands.options}
        arguments = make_argument_parser(schema, operands.spec)
        args = arguments.to_named_tuple(tuple(operands.tensor_args), options)
        if isinstance(getattr(args, "weights", None), torch.Tensor):
            args = args._replace(weights=[args.weights])
        problem = make_problem(operands.case.op, cast(Any, rank), args)
        problem = replace(problem, device="cuda")  # also for CPU tensors, in a dry run
        plan = choose(problem, Capabilities(shared_memory=True), requested=algorithm)
        function = backends.implementation(problem, plan)
        call = Call(cast(Any, rank), problem, plan, function, 0)
        execute = get_executor(OPS[operands.case.op])

        def launch() -> Results:
            results = execute(call, args)
            if isinstance(results, torch.Tensor):
                return [results]
            first, second, *_ = results
            if isinstance(second, list):  # all-gather: the matmul results
                return second
            return [second, first] if operands.spec.normed else list(results)

        return launch

    def load(self, launches: Sequence[Launch]) -> None:
        """Run the launches one at a time, with aborted waits. This compiles and loads the kernels,
        and the allocator maps memory for each stream, before launches wait for each other."""
        if self._forked:
            return
        for rank, launch in enumerate(launches):
            self.workspaces[rank].abort(0)
            with torch.cuda.stream(self._streams[rank] if self._on_gpu else None):
                launch()
            self._synchronize()
        for workspace, region in zip(self.workspaces, self._regions, strict=True):
            for memory in (region, workspace.state, workspace.control):
                memory.zero_()
        self._synchronize()

    def queue(self, launches: Sequence[Launch], late: bool = False) -> list[Results]:
        """Queue the launches of all ranks on a GPU, also during graph capture. They start together
        or, with ``late``, with a delay between two ranks."""
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
        for each rank. Return the first failure. ``late``: see `queue`."""

        def run_and_check(rank: int) -> Failure | None:
            time.sleep(rank * _LATE_S if late else 0)
            return check(rank, launches[rank]())

        if self._forked:
            return _run_in_forks([partial(run_and_check, rank) for rank in range(self.world)])
        results = self.queue(launches, late) if replay is None else replay()
        self._synchronize()
        return next(filter(None, map(check, range(self.world), results)), None)

    def capture(self, launches: Sequence[Launch], calls: int = 1) -> Callable[[], list[Results]]:
        """Capture ``calls`` calls on all ranks in a CUDA graph. Return a function that replays it
        and returns the last results. Not on CPUs."""
        results: list[list[Results]] = []
        replay = capture_graph(lambda: results.append(self.queue(launches)), calls)

        def run() -> list[Results]:
            replay()
            return results[-1]

        return run

    def set_chaos(self, max_delay_us: int, **broken: bool) -> None:
        """See `DeviceWorkspace.set_chaos`."""
        for workspace in self.workspaces:
            workspace.set_chaos(workspace.rank, max_delay_us, **broken)

    def failed_wait(self) -> tuple[int, TpkernelsError] | None:
        """Return the first rank with a failed wait, and the error. None if no wait failed."""
        for workspace in self.workspaces:
            if (failure := workspace.failure()) is not None:
                where, timeout = f"virtual ranks, {workspace.world}", workspace.timeout_ns / 1e9
                error = kernel_error(failure, where=where, rank=workspace.rank, timeout=timeout)
                return workspace.rank, error
        return None

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)


@contextmanager
def sharing(device: torch.device, world: int) -> Iterator[None]:
    """Limit the kernels of each rank to 1/world of the multiprocessors."""
    from tpkernels.kernels import configs, signals

    if signals.INTERPRETED:  # interpreted kernels have only a few programs
        yield
        return
    capability, count = configs.device_properties(device)
    blocks = layouts.MAX_BLOCKS
    layouts.MAX_BLOCKS = max(1, min(blocks, count // world))
    try:
        with configs.assume_device(capability, count // world):
            yield
    finally:
        layouts.MAX_BLOCKS = blocks


def _run_in_forks(jobs: Sequence[Callable[[], Failure | None]]) -> Failure | None:
    """Run each job in a fork of this process. Return the first failure."""
    children = []
    for rank, job in enumerate(jobs):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                torch.set_num_threads(1)
                failure = job()
            except BaseException as error:  # a child must not continue in the code of the parent
                failure = make_failure(error, "a CPU dry run", rank)
            with open(writer, "wb") as pipe:
                pickle.dump(failure, pipe)
            os._exit(0)
        os.close(writer)
        children.append((pid, reader))
    failures = []
    for rank, (pid, reader) in enumerate(children):
        with open(reader, "rb") as pipe:
            message = pipe.read()
        status = os.waitpid(pid, 0)[1]
        crash = Failure("crash", "a CPU dry run", rank, text=f"the process ended: status {status}")
        failures.append(pickle.loads(message) if message else crash)
    return next(filter(None, failures), None)


def check(variant: str, device: str, repeats: int = 1) -> StageReport:
    """Check a variant on 2, 4 and 8 virtual ranks, with integer data: over several epochs, without
    and with random delays, and in replayed graphs. Then check that a run without waits gives wrong
    results (control)."""
    accumulate_in_float32()
    copies = variant.startswith("pipelined/") or variant == f"fused/{COPY_ENGINES}"
    with collect_report() as report:
        torch_device = rank_device(device)
        for world in WORLDS[:1] if device == "cpu" else WORLDS:
            if copies and world > _MAX_COPYING_RANKS:
                continue
            with sharing(torch_device, world), force_copy_engines(variant):
                calls = list(_make_integer_calls(variant, device, world, repeats))
                ranks = create_ranks(variant, torch_device, world, calls)
                for call in calls:
                    report.call = str(call)
                    _check_call(ranks, call, variant)
                    report.checks += 1
        report.call = f"{variant} without waits"
        with sharing(torch_device, WORLDS[0]), force_copy_engines(variant):
            typical = _make_integer_calls(variant, device, WORLDS[1], 1)
            _check_control(variant, torch_device, next(call for call in typical if call.delayed))
    return report


def _make_integer_calls(
    variant: str, device: str, world: int, repeats: int
) -> Iterator[CheckedCall]:
    """Yield the calls on integers. With more than two ranks, yield only one shape and dtype."""
    for call in make_calls(variant, device, repeats):
        typical = call.shape == get_shapes(device)[1] and call.dtype == torch.bfloat16
        if call.exact and (world == WORLDS[0] or typical):
            yield call


def create_ranks(
    variant: str, device: torch.device, world: int, calls: Sequence[CheckedCall]
) -> VirtualRanks:
    """Create virtual ranks with memory for these calls. The calls use only ``variant``."""
    algorithm, _, name = variant.partition("/")
    sizes = (m * max(n, k) * call.dtype.itemsize for call in calls for m, n, k in [call.shape])
    rows = TOP_K if name == "routed" else 1
    variants = frozenset({name} if algorithm in ("direct", "fused") else ())
    return VirtualRanks(world, device, rows * max(sizes), variants)


def _check_call(ranks: VirtualRanks, call: CheckedCall, variant: str) -> None:
    """Run a call in several epochs, with new values in each. Raise `StageFailed` if a result is
    wrong."""
    ranks.set_chaos(DELAY_US if call.delayed else 0)
    operands, launches = ranks.prepare(call, variant)
    replay = ranks.capture(launches) if call.replayed else None
    previous: list[Results] = [[] for _ in operands]
    for epoch in range(_EPOCHS[ranks.device.type]):
        refilled = [item.refill(call.seed + 1000 * epoch) for item in operands]
        failure = ranks.run(launches, partial(_compare, refilled, previous), replay=replay)
        if (failed := ranks.failed_wait()) is not None:
            rank, error = failed
            failure = make_failure(error, str(call), rank)
        if failure is not None:
            raise StageFailed(failure)


def _compare(
    operands: Sequence[Operands], previous: list[Results], rank: int, results: Results
) -> Failure | None:
    return compare_results(operands[rank], results, previous[rank])


def _check_control(variant: str, device: torch.device, call: CheckedCall) -> None:
    """Run a call without waits, with late ranks, until its results are wrong. Raise `StageFailed`
    if they stay correct."""
    for _ in range(_CONTROLS):
        ranks = create_ranks(variant, device, WORLDS[0], [call])
        ranks.set_chaos(DELAY_US, skip_waits=True)
        operands, launches = ranks.prepare(call, variant)
        check = partial(_compare, operands, [[] for _ in operands])
        failure = ranks.run(launches, check, late=True)
        if failure is not None and failure.kind == "wrong" and ranks.failed_wait() is None:
            return
    message = f"correct results in {_CONTROLS} runs without waits: the checks miss a removed wait"
    raise StageFailed(Failure("error", f"{call}, without waits", 0, text=message))
