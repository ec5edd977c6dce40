"""The cases that a command's options name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tpkernels import dtypes
from tpkernels.bench.cases import MATMUL_OPS, Spec
from tpkernels.bench.device import unsupported_kernels
from tpkernels.bench.options import UsageError, shape_of, sizes_of
from tpkernels.planning.choose import Means, choose


def specs_of(op: str, shapes: Iterable[str], sizes: str, dtype: torch.dtype) -> list[Spec]:
    """A matmul op with each "M,N,K" of ``shapes``, a collective alone with each of ``sizes``, as in
    "64K,1M". ``UsageError`` where one of them cannot be."""
    if op in MATMUL_OPS:
        return [Spec(op, shape_of(text), dtype) for text in dict.fromkeys(shapes)]
    specs = []
    for nbytes in dict.fromkeys(sizes_of(sizes)):
        if nbytes % dtype.itemsize:
            raise UsageError(f"{nbytes} bytes are no whole number of {dtypes.name(dtype)}")
        specs.append(Spec(op, (nbytes // dtype.itemsize,), dtype))
    return specs


def spec_of(op: str, shape: str, size: str, dtype: torch.dtype) -> Spec:
    """The one case of ``specs_of``. ``UsageError`` where there are several."""
    specs = specs_of(op, [shape], size, dtype)
    if len(specs) > 1:
        raise UsageError(f"--bytes {size} are {len(specs)} sizes; give one")
    return specs[0]


def check_algorithm(spec: Spec, world: int, algorithm: str, device: str = "cpu") -> None:
    """``UsageError`` where an algorithm cannot run a case, as far as this process can tell."""
    problem, missing = spec.problem(world, device), unsupported_kernels(device)
    try:
        choose(problem, Means(shared_memory=True, unsupported=missing), requested=algorithm)
    except NotImplementedError as error:
        raise UsageError(str(error)) from error


def check_split(spec: Spec, world: int, *, label: str = "", uneven: bool = True) -> None:
    """``UsageError`` where the ranks could not split a case.

    Args:
        label: what the user calls its shape, beside the shape.
        uneven: whether some ranks may have a row more.
    """
    if spec.op not in MATMUL_OPS:
        return
    m = spec.shape[0]
    name = " ".join(filter(None, [",".join(map(str, spec.shape)), label]))
    if spec.other % world:
        split = "N" if spec.op == "all_gather_matmul" else "K"
        raise UsageError(
            f"{split} of {name} is {spec.other}: {spec.op} splits it over {world} ranks, which do "
            "not divide it"
        )
    if m % world and "all_reduce" not in spec.op and not uneven:
        raise UsageError(
            f"M of {name} is {m}: {spec.op} splits it over {world} ranks, which do not divide it; "
            "--uneven gives some a row more"
        )
