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
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.paths import NATIVE, ROOT
from tpkernels import _C, groups
from tpkernels.algorithms.reduction import Reduction
from tpkernels.cuda import image
from tpkernels.dtypes import CODES
from tpkernels.symm.device import DeviceWorkspace

EMULATED = NATIVE / "emulated"
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread"]
FLAGS += [f"-I{EMULATED}", f"-I{ROOT / 'csrc'}"]
SONAME = "libcuda.so.1"
WORDS, BUFFER_BYTES = 160, 1 << 15
F32, F16, BF16 = DTYPES = torch.float32, torch.float16, torch.bfloat16
# How stores of several words are seen (tests/native/emulated/grid.h): as PTX allows, then wrongly.
TEARINGS = ("between words", "one flag per line", "torn words", "torn lines", "lines that stay")


def compiler() -> list[str]:
    """The C++ compiler; skips where there is none."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        pytest.skip(f"no C++ compiler: {command[0]}")
    return command


def build(folder: Path, source: str, *flags: str) -> Path:
    """Compiles ``source`` of the emulation, unless the folder has the result already."""
    command = [*compiler(), *FLAGS, *flags, str(EMULATED / source)]
    state = hashlib.sha256(" ".join(command).encode())
    for path in sorted([*(ROOT / "csrc" / "cuda").glob("*"), *EMULATED.rglob("*.*")]):
        state.update(path.read_bytes())
    target = folder / state.hexdigest()[:16] / SONAME
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.rename(target)
    return target


def build_driver(folder: Path) -> Path:
    """The driver; skips on machines with a GPU, whose real driver would be loaded instead."""
    if torch.cuda.is_available():
        pytest.skip("there is a real CUDA driver here")
    return build(folder, "driver.cpp", "-fPIC", "-shared", f"-Wl,-soname,{SONAME}")


@functools.cache
def load(path: str) -> ctypes.CDLL:
    """Makes it the CUDA driver of this process: dlopen returns the library that is already loaded
    under that name."""
    if not _C.cuda.architectures():  # any image will do
        image.nvrtc_image = lambda capability: b"an image"
    return ctypes.CDLL(path)


@contextlib.contextmanager
def new_kernels(path: str) -> Iterator[ctypes.CDLL]:
    """A driver that the block may have refuse calls; the kernels are loaded anew in it."""
    library = load(path)
    image.kernels.cache_clear()
    try:
        yield library
    finally:
        library.emulated_streams_write(True)
        library.emulated_captures_writes(True)
        library.emulated_fail(b"", 0)
        image.kernels.cache_clear()


def space_of(
    driver: str, timeout: float = 20.0, words: int = WORDS, buffer_bytes: int = BUFFER_BYTES
) -> DeviceWorkspace:
    """On a rank: loads the driver, and makes a workspace of all ranks for its kernels."""
    load(driver)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    tpkernels.init(group)
    workspace = groups.get(group.group_name).workspace
    assert workspace is not None
    space = workspace.device(words, buffer_bytes, "a test of the CUDA kernels")
    space.timeout_ns = int(timeout * 1e9)
    space.multicast = 1 << 60  # tests/native/emulated/grid.h
    return space


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


def failures(space: DeviceWorkspace) -> list[str]:
    """The failed wait, if there is one."""
    return [] if space.failure() is None else [str(space.failure())]


def counts(library: ctypes.CDLL) -> tuple[int, ...]:
    """Of the last launch: barriers, releases at system scope, and ordering atomics that one thread
    did one after the other."""
    found = (ctypes.c_int * 3)()
    library.emulated_counts(found)
    return tuple(found)
