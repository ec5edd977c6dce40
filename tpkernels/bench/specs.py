"""`Spec`: an op on global shapes, and functions that create specs from command line options."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tpkernels.algorithms.backends import unsupported
from tpkernels.common import dtypes
from tpkernels.kernels import NO_GPU
from tpkernels.launch.session import on_one_host
from tpkernels.launch.terminal import UsageError, byte_size, check_known, parse_shape, parse_sizes
from tpkernels.local.scaled import Packing, get_scaling
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Capabilities, unsupported_algorithms
from tpkernels.planning.cost import Cost
from tpkernels.planning.op_spec import (
    NO_OPTIONS,
    OPS,
    GatherOptions,
    OpSpec,
    Options,
    ReduceOptions,
    RoutedOptions,
    Scales,
)
from tpkernels.planning.problem import ORDERED, VENDOR, Problem
from tpkernels.qualification.op_case import NORM_EPS, SCALED_DTYPE

EXPERTS, TOP_K = 8, 2  # number of experts and experts per token, for ops on routed tokens


@dataclass(frozen=True)
class Spec:
    """An op on global data.

    ``shape`` is (M, N, K) for a matmul op and (elements,) for a collective. The elements form a
    matrix if the op normalises or routes rows (`get_matrix_shape`), and for an all-to-all
    (`get_square_shape`). ``dtype`` is the dtype of the result. Scaled operands have
    `SCALED_DTYPE`.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def op_spec(self) -> OpSpec:
        """Return the properties of the op."""
        return OPS[self.op]

    @property
    def extents(self) -> tuple[int, ...]:
        """Return M, N, K of a matmul op, or the shape of the unsharded tensor."""
        if self.op_spec.routed or (self.op_spec.normed and not self.op_spec.has_matmul):
            return get_matrix_shape(self.shape[0])
        return get_square_shape(self.shape[0]) if self.op_spec.exchanges else self.shape

    @property
    def sharded_size(self) -> int:
        """Return the global size of the weight dim that is split over the ranks: N of an
        all-gather, K of a reduction. 0 without a matmul."""
        if not self.op_spec.has_matmul:
            return 0
        _, n, k = self.shape
        return n if self.op_spec.gathers else k

    def problem(self, world: int, device: str = "cpu") -> Problem:
        """Return the problem for planning. Dim 0 is gathered or scattered, as evenly as
        possible."""
        shape, dtype, op = self.extents, self.dtype, self.op_spec
        if op.has_matmul:
            m, n, k = shape
            shape = (m, k) if op.gathers else (m, n)
        options: Options = GatherOptions() if op.gathers else NO_OPTIONS
        if op.reduces:
            x_dtype, norm = SCALED_DTYPE if op.scaled else dtype, (NORM_EPS, dtype)
            options = ReduceOptions(
                x_dtype=x_dtype, out_dtype=dtype, norm=norm if op.normed else None
            )
        elif op.routed:
            options = RoutedOptions(experts=EXPERTS, top_k=TOP_K)
        elif op.scaled:
            x = torch.empty(1, self.shape[2], dtype=SCALED_DTYPE, device="meta")
            scale = torch.empty(1, 1, device="meta")
            scales = Scales(self.shape[2], SCALED_DTYPE, get_scaling(scale).value)
            options = GatherOptions(scales=scales, out_dtype=dtype)
            shape, dtype = (shape[0], Packing.for_rows(x, scale).packed_width), torch.float32
        vendor = device == "cuda" and op.reduces and world > 1 and not op.scaled
        return Problem.evenly_split(
            self.op,
            device=device,
            world=world,
            shape=shape,
            dtype=dtype,
            options=options,
            numerics=VENDOR if vendor else ORDERED,
        )

    def cost(self, world: int) -> Cost:
        """Return the cost of the op on the busiest of ``world`` ranks."""
        cost = Cost.of(self.problem(world), self.sharded_size)
        if not self.op_spec.scaled:
            return cost
        m, n, k = self.shape
        n, k = (n // world, k) if self.op_spec.gathers else (n, k // world)
        operands = (m * k + k * n) * SCALED_DTYPE.itemsize + 4 * (m + n)  # a scale has 4 bytes
        touched = operands + m * n * self.dtype.itemsize + cost.traffic
        return Cost(flops=2 * m * n * k, traffic=cost.traffic, touched=touched)

    def __str__(self) -> str:
        if self.op_spec.has_matmul:
            size = ", ".join(map(str, self.shape))
        else:
            size = byte_size(self.shape[0] * self.dtype.itemsize)
        operands = f"{dtypes.name(SCALED_DTYPE)} to " if self.op_spec.scaled else ""
        return f"{size} {operands}{dtypes.name(self.dtype)}"


def get_matrix_shape(elements: int) -> tuple[int, int]:
    """Return a matrix shape for ops that normalise or route rows: 4096 columns if that divides
    ``elements``."""
    columns = math.gcd(elements, 4096)
    return elements // columns, columns


def get_square_shape(elements: int) -> tuple[int, int]:
    """Return a matrix shape that is close to square. The number of columns is a power of two."""
    columns = 1 << (elements & -elements).bit_length() // 2
    return elements // columns, columns


def make_specs(op: str, shapes: Iterable[str], sizes: str, dtype: torch.dtype) -> list[Spec]:
    """Return a spec for each "M,N,K" in ``shapes`` (matmul op) or each size in ``sizes``, such as
    "64K,1M" (collective). ``UsageError`` if the op is unknown or a value is invalid."""
    check_known("op", [op], OPS)
    if OPS[op].has_matmul:
        return [Spec(op, parse_shape(shape), dtype) for shape in dict.fromkeys(shapes)]
    specs = []
    for nbytes in dict.fromkeys(parse_sizes(sizes)):
        if nbytes % dtype.itemsize:
            raise UsageError(
                f"--bytes {nbytes} is not divisible by the {dtype.itemsize} bytes of a "
                f"{dtypes.name(dtype)} element"
            )
        specs.append(Spec(op, (nbytes // dtype.itemsize,), dtype))
    return specs


def make_spec(op: str, shape: str, sizes: str, dtype: torch.dtype) -> Spec:
    """Return the only spec of `make_specs`. ``UsageError`` if it returns several specs."""
    specs = make_specs(op, [shape], sizes, dtype)
    if len(specs) > 1:
        raise UsageError(f"--bytes {sizes} has {len(specs)} sizes; pass one")
    return specs[0]


def unsupported_kernels(device: str) -> dict[str, str]:
    """Return the algorithms whose kernels cannot run on this machine, with the reasons."""
    if device == "cuda" and not torch.cuda.is_available():
        return {name: NO_GPU for name in ALGORITHMS if ALGORITHMS[name].kernels.get(device)}
    reasons = {name: unsupported(name, device, torch.device(device)) for name in ALGORITHMS}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def check_spec(
    spec: Spec, world: int, algorithms: Iterable[str] = (), *, device: str = "cpu", label: str = ""
) -> None:
    """Raise ``UsageError`` if the ranks cannot split N or K evenly, or if an algorithm is unknown
    or cannot run the spec, as far as this process can tell. Rows may be split unevenly.

    Args:
        label: name of the shape for the message.
    """
    if spec.op_spec.has_matmul and spec.sharded_size % world:
        extent = "N" if spec.op_spec.gathers else "K"
        name = " ".join(filter(None, [",".join(map(str, spec.shape)), label]))
        raise UsageError(
            f"{extent} of {name} is {spec.sharded_size}, which is not divisible by the {world} "
            f"ranks that {spec.op} splits it over"
        )
    problem, missing = spec.problem(world, device), unsupported_kernels(device)
    for name in check_known("algorithm", algorithms, ("auto", *ALGORITHMS)):
        reasons = [
            unsupported_algorithms(problem, Capabilities(shared_memory, unsupported=missing)).get(
                name
            )
            for shared_memory in ([True] if on_one_host(world) else [True, False])
        ]
        if all(reasons):
            raise UsageError(f"algorithm '{name}' cannot run {spec.op}: it {reasons[-1]}")
