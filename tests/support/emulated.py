"""CUDA kernels on a CPU: a libcuda.so.1 for tests, whose device is the CPU.

``tests/native/emulated`` compiles the sources of ``csrc/cuda`` unchanged and launches them through
the functions of the driver API. CPU threads emulate CUDA threads, and atomics emulate memory
ordering. So the launch code, ``tpkernels.cuda``, the arithmetic of the kernels and their protocol
run between processes without a GPU. The emulation proves nothing about the memory ordering of PTX,
copy engines or multicast.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults, ranked
from tests.support.cxx import compile_cached
from tests.support.paths import NATIVE, ROOT
from tpkernels import _C
from tpkernels.algorithms.reduction import Reduction
from tpkernels.common.dtypes import CODES
from tpkernels.cuda import calls, image, prepare_all_reduce
from tpkernels.symm.device import DeviceWorkspace

EMULATED = NATIVE / "emulated"
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread"]
FLAGS += [f"-I{EMULATED}", f"-I{ROOT / 'csrc'}"]
SONAME = "libcuda.so.1"
SIGNALS, BUFFER_BYTES = 160, 1 << 15
F32, F16, BF16 = DTYPES = torch.float32, torch.float16, torch.bfloat16
# Visibility of multi-word stores (tests/native/emulated/grid.h): legal, then two violations.
TEARINGS = ("between words", "one flag per line", "torn words")


def build(folder: Path, source: str, *flags: str) -> Path:
    """Compile a source file of the emulation."""
    headers = [*(ROOT / "csrc" / "cuda").glob("*"), *EMULATED.rglob("*.*")]
    return compile_cached(folder, SONAME, [*FLAGS, *flags, EMULATED / source], headers)


def build_driver(folder: Path) -> Path:
    """Build the driver. Skip on machines with a GPU, which would load their real driver."""
    if torch.cuda.is_available():
        pytest.skip("there is a real CUDA driver here")
    return build(folder, "driver.cpp", "-fPIC", "-shared", f"-Wl,-soname,{SONAME}")


_loaded: list[ctypes.CDLL] = []


def load(path: str) -> None:
    """Load the library as the CUDA driver of this process.

    A later dlopen returns the library that is loaded under this name.
    """
    if not _loaded:
        if not _C.cuda.architectures():  # any image will do
            image.nvrtc_image = lambda capability: b"an image"
        _loaded.append(ctypes.CDLL(path))


def library() -> ctypes.CDLL:
    """Return the driver of this process."""
    return _loaded[0]


@contextlib.contextmanager
def configure_driver(fails: str = "", code: int = 0, **settings: int) -> Iterator[None]:
    """Change the driver settings, let one driver function fail, and reload the kernels.

    Settings: tests/native/emulated/driver.cpp.
    """
    change = library().emulated_set
    previous = {name: change(name.encode(), value) for name, value in settings.items()}
    library().emulated_fail(fails.encode(), code)
    _clear_kernel_caches()
    try:
        yield
    finally:
        for name, value in previous.items():
            change(name.encode(), value)
        library().emulated_fail(b"", 0)
        _clear_kernel_caches()


def _clear_kernel_caches() -> None:
    for function in (image.kernels, image._loads, calls._capability):
        function.cache_clear()


def get_counter(name: str) -> int:
    """Return a counter of the driver (tests/native/emulated/driver.cpp)."""
    return int(library().emulated_get(name.encode()))


def launch_counters() -> tuple[int, ...]:
    """Return counters of the last launch, each the maximum over its threads.

    Returns:
        The barriers, the releases at system scope, and the ordering atomics of a thread.
    """
    return tuple(map(get_counter, ("barriers", "releases", "atomics")))


# Decorators of tests that run on every rank, with this driver loaded.
on_ranks = functools.partial(ranked.on_ranks, driver=True, timeout=240.0)
interpreted = functools.partial(on_ranks, fixture="interpreter_ranks")


def make_workspace(
    timeout: float = 20.0, signals: int = SIGNALS, buffer_bytes: int = BUFFER_BYTES
) -> DeviceWorkspace:
    """Create a kernel workspace of all ranks. Collective."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group)
    host_workspace = faults.get_workspace(group)
    workspace = host_workspace.device_workspace(signals, buffer_bytes, "a test of the CUDA kernels")
    workspace.timeout_ns = int(timeout * 1e9)
    return workspace


def all_reduce(
    workspace: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Queue one all-reduce."""
    epilogue_args = bias, residual
    prepared = prepare_all_reduce(
        workspace.world, x, out, *epilogue_args, variants=workspace.variants, **options
    )
    prepared.bind(workspace, signature)(x, out, *epilogue_args)


def require_no_failures(results: Sequence[object], *workspaces: DeviceWorkspace) -> None:
    """Fail with the given failures, and with failed waits of the workspaces."""
    failures = [
        result for result in (*results, *(s.failure() for s in workspaces)) if result is not None
    ]
    assert not failures, f"{len(failures)} failures: {failures[:10]}"


def is_all_nan(results: Sequence[torch.Tensor]) -> bool:
    """Return True if all results are NaN, as after an abandoned call."""
    return all(bool(x.isnan().all()) for x in results)


def sum_over_ranks(count: int) -> int:
    """Return the sum over all ranks. Collective."""
    dist.all_reduce(total := torch.tensor(count))
    return int(total)


def random(count: int, dtype: torch.dtype, seed: int, offset: int = 0) -> torch.Tensor:
    """Draw values whose magnitudes differ so much that the order of a sum matters.

    ``offset``: elements by which the tensor is misaligned.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + offset, generator=generator, dtype=torch.float64)
    size = 10.0 ** torch.randint(-2, 3, (count + offset,), generator=generator)
    return (values * size).to(dtype)[offset:]


def host_sum(
    partials: list[torch.Tensor],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce partial sums with csrc/host."""
    out = torch.empty(partials[0].shape, dtype=out_dtype)
    bias = None if bias is None else bias.float()
    epilogue = Reduction(out_dtype, bias, residual).epilogue()
    wire, addresses = CODES[partials[0].dtype], [p.data_ptr() for p in partials]
    _C.host.sum_partials(out.data_ptr(), addresses, wire, 0, out.numel(), epilogue)
    return out


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    integers = torch.int32 if x.dtype == F32 else torch.int16
    return x.dtype == y.dtype and torch.equal(x.view(integers), y.view(integers))
