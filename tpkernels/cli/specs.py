"""The cases that a command's options name."""

from __future__ import annotations

from tpkernels import dtypes
from tpkernels.cli.cases import MATMUL_OPS, Spec
from tpkernels.cli.options import UsageError, dtype_named, ops_named, shape_of, sizes_of


def specs_of(
    ops: list[str], shapes: list[str], sizes: str, dtype_name: str, world: int
) -> list[Spec]:
    """Each matmul op with each (M, N, K), each collective alone with each size in bytes.

    Raises:
        UsageError: one of them cannot be, or cannot be split over ``world`` ranks.
    """
    dtype, specs = dtype_named(dtype_name), []
    for op in ops_named(ops):
        if op in MATMUL_OPS:
            specs += [
                _fitting(Spec(op, shape_of(text), dtype), world) for text in dict.fromkeys(shapes)
            ]
            continue
        for nbytes in dict.fromkeys(sizes_of(sizes)):
            if nbytes % dtype.itemsize:
                raise UsageError(f"{nbytes} bytes are no whole number of {dtypes.name(dtype)}")
            specs.append(Spec(op, (nbytes // dtype.itemsize,), dtype))
    return specs


def _fitting(spec: Spec, world: int) -> Spec:
    """``spec``, if its weights can be split evenly over the ranks."""
    name = "N" if spec.op == "all_gather_matmul" else "K"
    if spec.other % world:
        raise UsageError(
            f"{name} of {','.join(map(str, spec.shape))} is {spec.other}: {spec.op} splits it over "
            f"{world} ranks, which do not divide it"
        )
    return spec
