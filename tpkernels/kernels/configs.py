"""Block sizes of the tile loop, by architecture, dtype and number of rows.

Those of sm_90 for 16-bit operands were measured on an H200 with Triton 3.6, 2026-11-26
(benchmarks/results/gpu-h200.md); no others. The tests compile them for each architecture, require
tensor core instructions and allow no spills.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.common.integers import ceil_div
from tpkernels.kernels import release_of
from tpkernels.kernels.bound import BoundKernel, WithScratch
from tpkernels.kernels.words import INTERPRETED

_TMA_ALIGNMENT = 16  # bytes, of addresses and strides
_SMALL_M = 64
TRITON = release_of(triton)
_STORING_WARPS = 8  # that a specialized loop must have to store tiles without spills
_SUM_ELEMENTS = 16  # of a sum, in a thread's registers at a time
# Of a block, on the GPUs with TMA that the table is for; and what kernels take besides tiles.
_SHARED_BYTES, _OTHER_SHARED_BYTES = 227 << 10, 2 << 10


class Tiling(NamedTuple):
    """How a kernel's tile loop is cut; known at compile time."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    sum_m: int  # rows of a tile that are summed at a time
    a_tma: bool
    b_tma: str  # "no", "k" or "n": the contiguous dim of b, if TMA loads it
    store_tma: bool  # whether TMA may store the partials of a tile
    specialized: bool  # whether warps have parts of their own in the loop over tiles


@dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """One way to run the tile loop.

    ``programs`` is the size of the persistent grid, 0 for one per multiprocessor. In an all-gather,
    ``fetchers`` of them, at most, bring the peers' rows in pieces of ``piece_bytes``. With
    ``specialize`` four more warps load the operands and multiply, where that is possible.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 0
    fetchers: int = 12
    piece_bytes: int = 128 << 10
    tma: bool = False
    specialize: bool = False

    @property
    def sum_m(self) -> int:
        """Return the rows of a tile that are summed at a time: as many as fit the registers."""
        return max(1, min(self.block_m, 32 * _SUM_ELEMENTS * self.num_warps // self.block_n))

    def operands(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        stored: torch.dtype,
        *,
        waits: bool = False,
    ) -> Operands:
        """Return how the kernels take a [M, K] and b [K, N], and any others of their shapes,
        strides and alignments: as descriptors where TMA can load them. Tiles of the dtype
        ``stored`` go to matrices with aligned rows of n elements. ``waits``: a tile waits for its
        rows."""
        block_m, block_n, block_k = blocks = self.block_m, self.block_n, self.block_k
        a_matrix = b_matrix = None
        b_tma, (k, n) = "no", b.shape
        if self.tma:
            (stride, unit), (k_stride, n_stride) = a.stride(), b.stride()
            if unit == 1 and len(a) > 0 and _aligned(a, stride):
                a_matrix = (len(a), k), (stride, 1), [block_m, block_k]
            if k_stride == 1 and _aligned(b, n_stride):
                b_tma, b_matrix = "k", ((n, k), (n_stride, 1), [block_n, block_k])
            elif n_stride == 1 and _aligned(b, k_stride):
                b_tma, b_matrix = "n", ((k, n), (k_stride, 1), [block_k, block_n])
        a_tma = a_matrix is not None
        store_tma = self.stores_by_tma(8 * a.element_size(), 8 * stored.itemsize, n)
        specialized = not waits and self.specializes(a_tma and b_matrix is not None)
        tiling = Tiling(*blocks, self.group_m, self.sum_m, a_tma, b_tma, store_tma, specialized)
        return Operands(a_matrix, b_matrix, tiling, self.launch(specialized))

    def specializes(self, all_tma: bool) -> bool:
        """Return whether the tile loop has warps that only load, and only multiply. Where threads
        load operands, or four warps store tiles, it would spill. Triton 3.7 crashes where tiles
        wait for rows; older versions were not tried."""
        able = all_tma and self.num_warps == _STORING_WARPS and TRITON >= (3, 7)
        return self.specialize and able

    def stores_by_tma(self, bits: int, stored_bits: int, n: int) -> bool:
        """Return whether TMA may store tiles into a matrix of ``n`` columns of ``stored_bits``
        each: a whole tile must fit shared memory beside the operands, whose elements have
        ``bits``."""
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * bits // 8
        needed = operands + self.block_m * self.block_n * stored_bits // 8 + _OTHER_SHARED_BYTES
        aligned = n * stored_bits // 8 % _TMA_ALIGNMENT == 0
        return self.tma and aligned and needed <= _SHARED_BYTES

    def launch(self, specialized: bool) -> dict[str, int]:
        """Return launch options. A program has a multiprocessor to itself, and may use all its
        registers: without maxnreg, ptxas spills some to fit more programs. With it, Triton does not
        divide the registers among warps that are specialized."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if specialized else options | {"maxnreg": 255}

    def waves(self, rows: int, columns: int) -> int:
        """Return the elements of a result that a program multiplies, whole tiles of them."""
        tiles = ceil_div(self.tiles([rows], columns), self.programs)
        return tiles * self.block_m * self.block_n

    def tiles(self, sizes: Iterable[int], n: int) -> int:
        """Count the tiles in segments of ``sizes`` rows and ``n`` columns."""
        return sum(ceil_div(size, self.block_m) for size in sizes) * ceil_div(n, self.block_n)


def _aligned(x: torch.Tensor, stride: int) -> bool:
    """Return whether TMA can read rows (or columns) of ``x`` that are ``stride`` elements apart."""
    nbytes = stride * x.element_size()
    return nbytes > 0 and nbytes % _TMA_ALIGNMENT == 0 and x.data_ptr() % _TMA_ALIGNMENT == 0


Matrix = tuple[tuple[int, int], tuple[int, int], list[int]]  #: shape, strides, block


class Operands(NamedTuple):
    """How the tile loop takes its operands; ``tiling`` is its compile-time argument."""

    a: Matrix | None  # that TMA loads
    b: Matrix | None
    tiling: Tiling
    launch: dict[str, int]  # options

    def of(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor | Descriptor, ...]:
        """Return the launch arguments for these tensors."""
        a = a if a.stride(1) == 1 else contiguous_rows(a)
        return (
            a if self.a is None else Descriptor(a, *self.a),
            b if self.b is None else Descriptor(b, *self.b),
        )

    def bind(
        self,
        kernel: KernelInterface,
        programs: int,
        args: tuple[Any, ...],
        scratch: torch.Tensor | None = None,
    ) -> Callable[..., None]:
        """Return a launch of a kernel with the tile loop, which takes a, b and the kernel's other
        tensors. ``args``: what it takes between these and `tiling`. ``scratch``: memory for the
        descriptors by which it stores tiles, if it does."""
        bound = BoundKernel(kernel, max(programs, 1), (*args, self.tiling), self.launch)
        stores = self.tiling.store_tma
        launch = bound if scratch is None or not stores else WithScratch(bound, scratch)

        def run(a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor | None) -> None:
            launch(*self.of(a, b), *more)

        return run


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, K], copied if its rows are not contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


class Descriptor(TensorDescriptor):
    """The matrix at ``base`` as TMA loads it, in tiles of ``block``. A kernel that makes its own
    descriptors begins with 16 instructions for each, a fence included, and its launch allocates
    their memory. `MatmulConfig.operands` has checked what `TensorDescriptor` would."""

    def __init__(
        self, base: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int], block: list[int]
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block


_FEW_TMA = MatmulConfig(block_m=64, block_n=64, block_k=128, num_stages=5, tma=True)
_MANY_TMA = MatmulConfig(block_m=128, block_n=256, block_k=64, num_warps=8, tma=True)
# (architecture, bytes of an element, few rows) -> config.
TABLE: dict[tuple[int, int, bool], MatmulConfig] = {
    (80, 2, True): MatmulConfig(block_m=16, block_n=64, block_k=64, num_stages=4),
    (80, 2, False): MatmulConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4),
    (90, 2, True): _FEW_TMA,
    (90, 2, False): _MANY_TMA,
    (100, 2, True): _FEW_TMA,
    (100, 2, False): replace(_MANY_TMA, specialize=True),
}
for _arch in (80, 90, 100):
    TABLE[_arch, 4, True] = MatmulConfig(block_m=16, block_n=64, block_k=16)
    TABLE[_arch, 4, False] = MatmulConfig(block_m=64, block_n=64, block_k=16, num_warps=8)
SMALLER_TILES = MatmulConfig(
    block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=5, tma=True
)
# The smaller tiles are taken if their waves are shorter by more than this: an element of a tile
# takes them 4 to 7 % longer (1024x8192x3584, 4096x3584x8192).
_LONGER = 1.07
INTERPRETER = MatmulConfig(
    block_m=32, block_n=32, block_k=32, group_m=2, num_warps=1, programs=4, fetchers=2,
    piece_bytes=1 << 10, tma=True,
)  # fmt: skip


@functools.lru_cache
def config_for(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> MatmulConfig:
    """Return the config for a product of so many rows and columns: the table's, or one with smaller
    tiles if their last wave leaves fewer multiprocessors idle.

    Raises:
        NotImplementedError: the device is older than sm_80.
    """
    if INTERPRETED:
        return INTERPRETER
    capability, programs = properties_of(device)
    if capability < 80:
        raise NotImplementedError(
            "the Triton kernels need compute capability 8.0 or higher; "
            f"{device} has {capability / 10:.1f}"
        )
    # Devices from 12.0 on have the matrix instructions of 8.0 and, as 8.6 and 8.9, 99 KiB of shared
    # memory for a block; the blocks of 8.0 take 80 at most.
    known = 80 if capability >= 120 else max(arch for arch, _, _ in TABLE if arch <= capability)
    few = rows <= _SMALL_M
    config = TABLE[known, dtype.itemsize, few]
    config = replace(config, programs=config.programs or programs)
    if few or dtype.itemsize != 2 or capability != 90:  # smaller tiles were measured there only
        return config
    smaller = replace(SMALLER_TILES, programs=config.programs)
    shorter = _LONGER * smaller.waves(rows, columns) < config.waves(rows, columns)
    return smaller if shorter else config


def _properties(device: torch.device) -> tuple[int, int]:
    """Return (compute capability, multiprocessors)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


_assumed = ContextVar[tuple[int, int] | None]("assumed", default=None)


def properties_of(device: torch.device) -> tuple[int, int]:
    """Return the (compute capability, multiprocessors) that configs are chosen for."""
    return _assumed.get() or _properties(device)


@contextmanager
def assuming(capability: int, multiprocessors: int) -> Iterator[None]:
    """Choose configs as for a GPU with these: for ranks that share one, or where there is none."""
    token = _assumed.set((capability, multiprocessors))
    config_for.cache_clear()
    try:
        yield
    finally:
        _assumed.reset(token)
        config_for.cache_clear()
