"""The GPU of the stages, or its replacement.

In a dry run ("rehearsal") the tensors are on the CPU. The Triton interpreter runs the Triton
kernels, and the emulated driver of the tests runs the kernels of csrc/cuda. With the stub, Triton
compiles for a GPU without having one, and launches have no effect.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.one_gpu.cache import SCRATCH
from tpkernels.planning.qualification import Failure
from tpkernels.qualification import checks, virtual
from tpkernels.qualification.checks import CheckedCall
from tpkernels.qualification.op_case import Operands
from tpkernels.qualification.virtual import Launch, Results, VirtualRanks

# About 6 ms. The GPU sleeps while the host queues all launches, so it never waits for the host.
_AHEAD_CYCLES = 10_000_000
_STUB = 90, 132  # compute capability and multiprocessors of the compile target


class Machine:
    """A GPU, or its replacement.

    Args:
        kind: "gpu", "rehearsal" or "stub".
        seconds: time budget of this process.
    """

    def __init__(self, kind: str, seconds: float) -> None:
        self.kind, self._end = kind, time.monotonic() + seconds
        self.is_gpu = kind == "gpu"
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self.multiprocessors = _STUB[1]
        if self.is_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
            properties = torch.cuda.get_device_properties(self.device)
            self.multiprocessors = properties.multi_processor_count

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the parent ends this process."""
        return self._end - time.monotonic()

    def choose(self, full: Any, rehearsed: Any) -> Any:
        """Return ``full``, or in a dry run the smaller ``rehearsed``."""
        return rehearsed if self.kind == "rehearsal" else full

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        """Return normally distributed bf16 values."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).bfloat16()

    def empty(self, *shape: int) -> torch.Tensor:
        """Return a bf16 tensor full of NaN."""
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def microseconds(
        self, run: Callable[[], object], repeats: int = 10, before: Callable[[], object] = int
    ) -> float:
        """Return the median time of ``run``. ``before`` runs untimed before each repetition.

        Without a GPU the times are meaningless.
        """
        if not self.is_gpu:
            before()
            begin = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - begin)
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        for _ in range(3 + repeats):
            before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        self.synchronize()
        return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs[3:])

    def mm(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        """Return the baseline `torch.mm`, or with the stub a call without effect."""
        return int if self.kind == "stub" else partial(torch.mm, x, w, out=out)

    def relative_error(self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
        """Return ``norm(out - x @ w) / norm(x @ w)``, or 0 with the stub."""
        if self.kind == "stub":
            return 0.0
        expected = x.float() @ w.float()
        return float((out.float() - expected).norm() / expected.norm())

    def recover(self) -> None:
        """Free memory after a failed case. Raises if the CUDA context is unusable."""
        gc.collect()
        self.synchronize()
        if self.is_gpu:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def open_virtual_ranks(
    machine: Machine,
    variant: str,
    call: CheckedCall,
    world: int,
    timeout: float = virtual.TIMEOUT_S,
) -> Iterator[tuple[VirtualRanks, list[Launch], list[Operands]]]:
    """Yield virtual ranks, and their loaded launches and operands of ``call``."""
    with virtual.sharing(machine.device, world), checks.force_copy_engines(variant):
        ranks = virtual.create_ranks(variant, machine.device, world, [call])
        for workspace in ranks.workspaces if machine.is_gpu else ():
            workspace.set_timeout(timeout)
        operands, launches = ranks.prepare(call, variant)
        yield ranks, launches, operands


def run_once(ranks: VirtualRanks, launches: Sequence[Launch], operands: Sequence[Operands]) -> str:
    """Run the launches of all ranks once. Returns an error message, or ""."""
    failure = ranks.run(
        launches, lambda rank, results: checks.compare_results(operands[rank], results, [])
    )
    return failed_wait(ranks) or str(failure or "")


def failed_wait(ranks: VirtualRanks) -> str:
    """Return the rank and description of the failed wait, or ""."""
    failed = ranks.failed_wait()
    return "" if failed is None else f"rank {failed[0]}: {failed[1]}"


class UncheckedRanks(VirtualRanks):
    """Virtual ranks on a driver without launches.

    `load` calls every launch once to compile it. `run` reports every skipped wait as detected.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "forked": False})

    def load(self, launches: Sequence[Launch]) -> None:
        """Compile the kernels."""
        for launch in launches:
            launch()

    def run(self, *_: object, late: bool = False, **__: object) -> Failure | None:
        """Skip the checks."""
        return Failure("wrong", "a call without waits") if late else None

    def capture(self, *_: object, **__: object) -> Callable[[], list[Results]]:
        """Return a replay without effect."""
        return list


@contextlib.contextmanager
def opened(kind: str, seconds: float) -> Iterator[Machine]:
    """Yield the machine of this process. Installs the replacement of the GPU first."""
    with contextlib.ExitStack() as stack:
        if kind == "rehearsal":
            from tests.support import emulated

            emulated.load(str(emulated.build_driver(SCRATCH)))
        if kind == "stub":
            stack.enter_context(_compiling())
        yield Machine(kind, seconds)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Compile without a GPU. Virtual ranks skip their checks."""
    from tpkernels.cuda import image
    from tpkernels.kernels import configs

    ctypes.CDLL(os.environ["TRITON_LIBCUDA_PATH"] + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class Stub(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: divmod(_STUB[0], 10)

    driver.set_active(Stub())
    cpu = torch.device("cpu")
    with (
        configs.assume_device(*_STUB),
        mock.patch.object(image, "nvrtc_image", lambda capability: b"an image"),
        mock.patch.object(virtual, "VirtualRanks", UncheckedRanks),
        mock.patch.object(virtual, "rank_device", lambda device: cpu),
        mock.patch.dict(virtual._EPOCHS, cpu=0),
    ):
        yield
