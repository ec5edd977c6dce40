"""The GPU that the stages use, or what replaces it.

In a rehearsal the tensors are on the CPU: Triton's interpreter runs the kernels of Triton, and the
tests' emulated driver those of csrc/cuda. With the stub, Triton compiles for a GPU that is not
there, and all launches do nothing.
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

# About 6 ms, in which the host queues the launches: an idle GPU would wait for each of them.
_AHEAD_CYCLES = 10_000_000
_STUB = 90, 132  # compute capability and multiprocessors that are compiled for


class Machine:
    """A GPU, or its replacement.

    Args:
        kind: "gpu", "rehearsal" or "stub".
        seconds: for the cases of this process.
    """

    def __init__(self, kind: str, seconds: float) -> None:
        self.kind, self._end = kind, time.monotonic() + seconds
        self.is_gpu = kind == "gpu"
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self.multiprocessors = _STUB[1]
        if self.is_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
            found = torch.cuda.get_device_properties(self.device)
            self.multiprocessors = found.multi_processor_count

    @property
    def seconds_left(self) -> float:
        """Return the seconds until this process is ended."""
        return self._end - time.monotonic()

    def choose(self, full: Any, rehearsed: Any) -> Any:
        """Return ``full``, or in a rehearsal the smaller ``rehearsed``."""
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
        """Return the median time of ``run``. ``before`` runs first each time, untimed. Without a
        GPU the times mean nothing."""
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
        """Return the baseline, `torch.mm`; with the stub it does nothing."""
        return int if self.kind == "stub" else partial(torch.mm, x, w, out=out)

    def relative_error(self, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
        """Return the norm of ``out - x @ w`` over that of ``x @ w``; 0 for the stub."""
        if self.kind == "stub":
            return 0.0
        want = x.float() @ w.float()
        return float((out.float() - want).norm() / want.norm())

    def recover(self) -> None:
        """Free memory after a failed case. Raises if the CUDA context is unusable."""
        gc.collect()
        self.synchronize()
        if self.is_gpu:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def ranks_of(
    machine: Machine,
    variant: str,
    call: CheckedCall,
    world: int,
    timeout: float = virtual.TIMEOUT_S,
) -> Iterator[tuple[VirtualRanks, list[Launch], list[Operands]]]:
    """Give virtual ranks, their loaded launches of a call, and the call's operands."""
    with virtual.sharing(machine.device, world), checks.copying(variant):
        ranks = virtual.ranks_for(variant, machine.device, world, [call])
        for space in ranks.spaces if machine.is_gpu else ():
            space.set_timeout(timeout)
        operands, launches = ranks.prepare(call, variant)
        yield ranks, launches, operands


def run_once(ranks: VirtualRanks, launches: Sequence[Launch], operands: Sequence[Operands]) -> str:
    """Run the launches of all ranks once; return what is wrong, or ""."""
    failure = ranks.run(
        launches, lambda rank, results: checks.compared(operands[rank], results, [])
    )
    return failed_wait(ranks) or str(failure or "")


def failed_wait(ranks: VirtualRanks) -> str:
    """Return which wait has failed, or ""."""
    failed = ranks.failed_wait()
    return "" if failed is None else f"rank {failed[0]}: {failed[1]}"


class UncheckedRanks(VirtualRanks):
    """Virtual ranks on a driver that launches nothing: `load` makes every launch once, and skipped
    waits are always seen."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "forked": False})

    def load(self, launches: Sequence[Launch]) -> None:
        """Compile the kernels."""
        for launch in launches:
            launch()

    def run(self, *_: object, late: bool = False, **__: object) -> Failure | None:
        """Check nothing."""
        return Failure("wrong", "a call without waits") if late else None

    def capture(self, *_: object, **__: object) -> Callable[[], list[Results]]:
        """Return nothing to replay."""
        return list


@contextlib.contextmanager
def opened(kind: str, seconds: float) -> Iterator[Machine]:
    """Give the machine of this process, after what replaces the GPU has been put in place."""
    with contextlib.ExitStack() as stack:
        if kind == "rehearsal":
            from tests.support import emulated

            emulated.load(str(emulated.build_driver(SCRATCH)))
        if kind == "stub":
            stack.enter_context(_compiling())
        yield Machine(kind, seconds)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Compile for a GPU that is not there; virtual ranks check nothing."""
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
        configs.assuming(*_STUB),
        mock.patch.object(image, "nvrtc_image", lambda capability: b"an image"),
        mock.patch.object(virtual, "VirtualRanks", UncheckedRanks),
        mock.patch.object(virtual, "rank_device", lambda device: cpu),
        mock.patch.dict(virtual._EPOCHS, cpu=0),
    ):
        yield
