"""The CUDA kernels on a CPU: a libcuda.so.1 made for the tests, whose device is the CPU.

``tests/native/emulated`` compiles the sources of ``csrc/cuda`` unchanged, with CPU threads for CUDA
threads and atomics for memory ordering, and serves them behind the driver's functions. So the
extension's launch code, ``tpkernels.cuda``, the kernels' arithmetic and their protocol run between
processes without a GPU. It proves nothing about what only a GPU has: the memory ordering of PTX,
copy engines, multicast.
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
from tests.support.cxx import compiled
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
WORDS, BUFFER_BYTES = 160, 1 << 15
F32, F16, BF16 = DTYPES = torch.float32, torch.float16, torch.bfloat16
# How stores of several words are seen (tests/native/emulated/grid.h): as PTX allows, then wrongly.
TEARINGS = ("between words", "one flag per line", "torn words")


def build(folder: Path, source: str, *flags: str) -> Path:
    """Compile ``source`` of the emulation."""
    headers = [*(ROOT / "csrc" / "cuda").glob("*"), *EMULATED.rglob("*.*")]
    return compiled(folder, SONAME, [*FLAGS, *flags, EMULATED / source], headers)


def build_driver(folder: Path) -> Path:
    """The driver; skips on machines with a GPU, whose real driver would be loaded instead."""
    if torch.cuda.is_available():
        pytest.skip("there is a real CUDA driver here")
    return build(folder, "driver.cpp", "-fPIC", "-shared", f"-Wl,-soname,{SONAME}")


_loaded: list[ctypes.CDLL] = []


def load(path: str) -> None:
    """Make it the CUDA driver of this process: dlopen returns the library that is already loaded
    under that name."""
    if not _loaded:
        if not _C.cuda.architectures():  # any image will do
            image.nvrtc_image = lambda capability: b"an image"
        _loaded.append(ctypes.CDLL(path))


def library() -> ctypes.CDLL:
    """The driver of this process."""
    return _loaded[0]


@contextlib.contextmanager
def driver_that(fails: str = "", code: int = 0, **settings: int) -> Iterator[None]:
    """Change the driver: its settings (tests/native/emulated/driver.cpp), and a function of it that
    fails. The kernels are loaded anew."""
    change = library().emulated_set
    before = {name: change(name.encode(), at) for name, at in settings.items()}
    library().emulated_fail(fails.encode(), code)
    _forget_kernels()
    try:
        yield
    finally:
        for name, at in before.items():
            change(name.encode(), at)
        library().emulated_fail(b"", 0)
        _forget_kernels()


def _forget_kernels() -> None:
    for cached in (image.kernels, image._loads, calls._capability):
        cached.cache_clear()


def count_of(name: str) -> int:
    """What the driver has counted (tests/native/emulated/driver.cpp)."""
    return int(library().emulated_get(name.encode()))


def counts() -> tuple[int, ...]:
    """Of the last launch: barriers, releases at system scope, and ordering atomics that one thread
    did one after the other."""
    return tuple(map(count_of, ("barriers", "releases", "atomics")))


# Tests whose functions assert on every rank, where this driver is loaded.
on_ranks = functools.partial(ranked.on_ranks, driver=True, timeout=240.0)
interpreted = functools.partial(on_ranks, fixture="interpreting")


def space_of(
    timeout: float = 20.0, words: int = WORDS, buffer_bytes: int = BUFFER_BYTES
) -> DeviceWorkspace:
    """On a rank: a workspace of all ranks for the kernels."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group)
    workspace = faults.workspace_of(group)
    space = workspace.device(words, buffer_bytes, "a test of the CUDA kernels")
    space.timeout_ns = int(timeout * 1e9)
    return space


def all_reduce(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Queue one all-reduce."""
    added = bias, residual
    prepared = prepare_all_reduce(space.world, x, out, *added, variants=space.variants, **options)
    prepared.bind(space, signature)(x, out, *added)


def require_none(wrong: Sequence[object], *spaces: DeviceWorkspace) -> None:
    """Fail with what is wrong, and with waits that have failed."""
    found = [one for one in (*wrong, *(s.failure() for s in spaces)) if one is not None]
    assert not found, f"{len(found)} failures: {found[:10]}"


def is_spoilt(results: Sequence[torch.Tensor]) -> bool:
    """Whether a call that gave up has left NaN."""
    return all(bool(x.isnan().all()) for x in results)


def anywhere(count: int) -> int:
    """The sum over all ranks."""
    dist.all_reduce(total := torch.tensor(count))
    return int(total)


def random(count: int, dtype: torch.dtype, seed: int, offset: int = 0) -> torch.Tensor:
    """Sizes so different that the order of a sum matters; ``offset`` elements off alignment."""
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
    """What csrc/host computes."""
    out = torch.empty(partials[0].shape, dtype=out_dtype)
    bias = None if bias is None else bias.float()
    epilogue = Reduction(out_dtype, bias, residual).epilogue()
    wire, addresses = CODES[partials[0].dtype], [p.data_ptr() for p in partials]
    _C.host.sum_partials(out.data_ptr(), addresses, wire, 0, out.numel(), epilogue)
    return out


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    integers = torch.int32 if x.dtype == F32 else torch.int16
    return x.dtype == y.dtype and torch.equal(x.view(integers), y.view(integers))
