"""Block sizes of the tile loop, by architecture, dtype and number of rows.

Only the 16-bit sizes for sm_90 were measured: H200, Triton 3.6, 2026-11-26
(benchmarks/results/gpu-h200.md). The tests compile every config for its architecture. They require
tensor core instructions and reject spills.
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
from tpkernels.kernels import major_minor
from tpkernels.kernels.bound import BoundKernel, WithScratch
from tpkernels.kernels.signals import INTERPRETED

_TMA_ALIGNMENT = 16  # bytes, for addresses and strides
SMALL_M = 64  # max rows of the configs for small M
TRITON = major_minor(triton)
_STORING_WARPS = 8  # warps that a specialized loop needs to store tiles without spills
_SUM_ELEMENTS = 16  # elements of a reduction that a thread keeps in registers
# Shared memory per block on the TMA GPUs of the table, and the amount used for non-tile data.
_SHARED_BYTES, _OTHER_SHARED_BYTES = 227 << 10, 2 << 10


class Tiling(NamedTuple):
    """Compile-time tiling of the tile loop."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    sum_m: int  # tile rows reduced per step
    a_tma: bool
    b_tma: str  # contiguous dim of b if TMA loads b: "k" or "n"; else "no"
    store_tma: bool  # whether TMA may store the partials of a tile
    specialized: bool  # whether the loop over tiles is warp-specialized


@dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """Configuration of the tile loop.

    ``programs`` is the size of the persistent grid; 0 means one program per multiprocessor. In an
    all-gather, up to ``copy_programs`` of them copy the rows of the peers in chunks of
    ``chunk_bytes``. ``specialize`` requests warp specialization: four additional warps load the
    operands and multiply.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 0
    copy_programs: int = 12
    chunk_bytes: int = 128 << 10
    tma: bool = False
    specialize: bool = False

    @property
    def sum_m(self) -> int:
        """Return the number of tile rows to reduce per step, limited by the registers."""
        return max(1, min(self.block_m, 32 * _SUM_ELEMENTS * self.num_warps // self.block_n))

    def plan_operands(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        stored: torch.dtype,
        *,
        waits: bool = False,
    ) -> OperandPlan:
        """Return the operand plan for a [M, K] and b [K, N]: TMA descriptors if TMA can load them.
        The plan is valid for all tensors of the same shapes, strides and alignments.

        Args:
            stored: dtype of the stored tiles. The matrices that they are stored to have N columns
                and start at an aligned address.
            waits: whether a tile waits for its rows.
        """
        block_m, block_n, block_k = blocks = self.block_m, self.block_n, self.block_k
        a_descriptor = b_descriptor = None
        b_tma, (k, n) = "no", b.shape
        if self.tma:
            (stride, a_k_stride), (b_k_stride, b_n_stride) = a.stride(), b.stride()
            if a_k_stride == 1 and len(a) > 0 and _aligned(a, stride):
                a_descriptor = (len(a), k), (stride, 1), [block_m, block_k]
            if b_k_stride == 1 and _aligned(b, b_n_stride):
                b_tma, b_descriptor = "k", ((n, k), (b_n_stride, 1), [block_n, block_k])
            elif b_n_stride == 1 and _aligned(b, b_k_stride):
                b_tma, b_descriptor = "n", ((k, n), (b_k_stride, 1), [block_k, block_n])
        a_tma = a_descriptor is not None
        store_tma = self.stores_by_tma(8 * a.element_size(), 8 * stored.itemsize, n)
        specialized = not waits and self.specializes(a_tma and b_descriptor is not None)
        tiling = Tiling(*blocks, self.group_m, self.sum_m, a_tma, b_tma, store_tma, specialized)
        return OperandPlan(a_descriptor, b_descriptor, tiling, self.launch(specialized))

    def specializes(self, all_tma: bool) -> bool:
        """Return whether the tile loop is warp-specialized. It would spill if threads load operands
        or if four warps store tiles. Triton 3.7 crashes if tiles wait for rows; older versions were
        not tried."""
        supported = all_tma and self.num_warps == _STORING_WARPS and TRITON >= (3, 7)
        return self.specialize and supported

    def stores_by_tma(self, bits: int, stored_bits: int, n: int) -> bool:
        """Return whether TMA can store tiles into a matrix with ``n`` columns. A full tile of
        ``stored_bits`` per element must fit in shared memory, in addition to the operands of
        ``bits`` per element."""
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * bits // 8
        needed = operands + self.block_m * self.block_n * stored_bits // 8 + _OTHER_SHARED_BYTES
        aligned = n * stored_bits // 8 % _TMA_ALIGNMENT == 0
        return self.tma and aligned and needed <= _SHARED_BYTES

    def launch(self, specialized: bool) -> dict[str, int]:
        """Return the launch options. A multiprocessor runs one program at a time, so a program may
        use all its registers. Without maxnreg, ptxas spills registers to fit more programs. With
        maxnreg, Triton does not divide the registers among specialized warps."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if specialized else options | {"maxnreg": 255}

    def max_work(self, rows: int, columns: int) -> int:
        """Return the output elements of the busiest program, counted in full tiles."""
        tiles = ceil_div(self.tiles([rows], columns), self.programs)
        return tiles * self.block_m * self.block_n

    def tiles(self, sizes: Iterable[int], n: int) -> int:
        """Count the tiles in segments of ``sizes`` rows and ``n`` columns."""
        return sum(ceil_div(size, self.block_m) for size in sizes) * ceil_div(n, self.block_n)


def _aligned(x: torch.Tensor, stride: int) -> bool:
    """Return whether TMA can read rows or columns of ``x`` with this stride in elements."""
    nbytes = stride * x.element_size()
    return nbytes > 0 and nbytes % _TMA_ALIGNMENT == 0 and x.data_ptr() % _TMA_ALIGNMENT == 0


DescriptorArgs = tuple[tuple[int, int], tuple[int, int], list[int]]  #: shape, strides, block shape


class OperandPlan(NamedTuple):
    """How the tile loop of a launch reads its operands, and its launch options."""

    a: DescriptorArgs | None  # descriptor of a if TMA loads it
    b: DescriptorArgs | None
    tiling: Tiling  # compile-time argument
    launch: dict[str, int]  # launch options

    def arguments(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor | Descriptor, ...]:
        """Return the launch arguments for ``a`` and ``b``."""
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
        """Return a function that launches a tile-loop kernel with (a, b, *extra_tensors).

        Args:
            args: kernel arguments between the tensors and `tiling`.
            scratch: device memory for the TMA descriptors of stored tiles.
        """
        bound = BoundKernel(kernel, max(programs, 1), (*args, self.tiling), self.launch)
        stores = self.tiling.store_tma
        launch = bound if scratch is None or not stores else WithScratch(bound, scratch)

        def run(a: torch.Tensor, b: torch.Tensor, *extra_tensors: torch.Tensor | None) -> None:
            launch(*self.arguments(a, b), *extra_tensors)

        return run


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, K], copied if its rows are not contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


class Descriptor(TensorDescriptor):
    """A TMA descriptor of the matrix at ``base`` with tiles of shape ``block``.

    It is created on the host. A kernel that creates descriptors spends 16 instructions on each,
    including a fence, and its launch allocates memory for them. `MatmulConfig.plan_operands` has
    already performed the checks of `TensorDescriptor`."""

    def __init__(
        self, base: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int], block: list[int]
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block


_FEW_TMA = MatmulConfig(block_m=64, block_n=64, block_k=128, num_stages=5, tma=True)
_MANY_TMA = MatmulConfig(block_m=128, block_n=256, block_k=64, num_warps=8, tma=True)
# (architecture, bytes per element, whether M is small) -> config.
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
# Smaller tiles cost 4 to 7 % more time per element (1024x8192x3584, 4096x3584x8192). They are
# selected only if they reduce the work of the busiest program by more than this factor.
_SMALL_TILE_COST = 1.07
INTERPRETER = MatmulConfig(
    block_m=32, block_n=32, block_k=32, group_m=2, num_warps=1, programs=4, copy_programs=2,
    chunk_bytes=1 << 10, tma=True,
)  # fmt: skip


@functools.lru_cache
def config_for(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> MatmulConfig:
    """Return the config for a matmul with an output of [rows, columns]. Smaller tiles replace the
    tiles of the table if that leaves clearly fewer multiprocessors idle in the last wave.

    Raises:
        NotImplementedError: the device is older than sm_80.
    """
    if INTERPRETED:
        return INTERPRETER
    capability, programs = device_properties(device)
    if capability < 80:
        raise NotImplementedError(
            "the Triton kernels need compute capability 8.0 or higher; "
            f"{device} has {capability / 10:.1f}"
        )
    # Devices of 12.0 and later use the matrix instructions of 8.0. Like 8.6 and 8.9, they have
    # 99 KiB of shared memory per block; the configs of 8.0 need at most 80 KiB.
    base_arch = 80 if capability >= 120 else max(arch for arch, _, _ in TABLE if arch <= capability)
    small = rows <= SMALL_M
    config = TABLE[base_arch, dtype.itemsize, small]
    config = replace(config, programs=config.programs or programs)
    if small or dtype.itemsize != 2 or capability != 90:  # smaller tiles were measured on 9.0 only
        return config
    smaller = replace(SMALLER_TILES, programs=config.programs)
    shorter = _SMALL_TILE_COST * smaller.max_work(rows, columns) < config.max_work(rows, columns)
    return smaller if shorter else config


def _query_properties(device: torch.device) -> tuple[int, int]:
    """Return the (compute capability, multiprocessors) of a device."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


_assumed = ContextVar[tuple[int, int] | None]("assumed", default=None)


def device_properties(device: torch.device) -> tuple[int, int]:
    """Return the (compute capability, multiprocessors) used to select configs."""
    return _assumed.get() or _query_properties(device)


@contextmanager
def assume_device(capability: int, multiprocessors: int) -> Iterator[None]:
    """Select configs as if for a GPU with these properties. Used when ranks share a GPU, and to
    compile kernels without a GPU."""
    token = _assumed.set((capability, multiprocessors))
    config_for.cache_clear()
    try:
        yield
    finally:
        _assumed.reset(token)
        config_for.cache_clear()
