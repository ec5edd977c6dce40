"""Checks of a communicator's arguments, made before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import dtypes

CTA_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}


def options(
    timeout: float, cta_policy: str | None, min_ctas: int | None, max_ctas: int | None
) -> dict[str, int | None]:
    """The options as the extension takes them.

    Raises:
        ValueError: one is out of range.
    """
    if not 0 < timeout <= 86400:
        raise ValueError(f"timeout must be in (0, 86400] seconds, not {timeout}")
    if cta_policy is not None and cta_policy not in CTA_POLICIES:
        raise ValueError(
            f"cta_policy is {cta_policy!r}; it must be one of {', '.join(CTA_POLICIES)}"
        )
    for name, value in (("min_ctas", min_ctas), ("max_ctas", max_ctas)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if min_ctas is not None and max_ctas is not None and min_ctas > max_ctas:
        raise ValueError(f"min_ctas is {min_ctas}, which is more than max_ctas, {max_ctas}")
    policy = None if cta_policy is None else CTA_POLICIES[cta_policy]
    return {"cta_policy": policy, "min_ctas": min_ctas, "max_ctas": max_ctas}


def tensor(x: torch.Tensor, what: str, device: torch.device) -> None:
    """Checks that NCCL can read or write ``x`` in place.

    Raises:
        TypeError: ``x`` is not a tensor.
        NotImplementedError: its dtype is not supported.
        ValueError: it is on another device, or not contiguous.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{what} is a {type(x).__name__}, not a tensor")
    dtypes.check_supported(x.dtype, what)
    if x.device != device:
        raise ValueError(f"{what} is on {x.device}, but the communicator is on {device}")
    if not x.is_contiguous():
        raise ValueError(
            f"{what} of shape {list(x.shape)} and strides {list(x.stride())} is not contiguous; "
            "pass the result of .contiguous()"
        )


def pair(x: torch.Tensor, out: torch.Tensor, device: torch.device) -> None:
    """Checks an input and its output as `tensor` does, and that their dtypes are equal."""
    tensor(x, "x", device)
    tensor(out, "out", device)
    if x.dtype != out.dtype:
        raise TypeError(f"x is {dtypes.name(x.dtype)} but out is {dtypes.name(out.dtype)}")


def elements(count: int, expected: int, what: str, why: str) -> None:
    """Checks the number of elements of ``what``; ``why`` says where the expected one comes from."""
    if count != expected:
        raise ValueError(f"{what} has {count} elements; {why} needs {expected}")


def has_rows(x: torch.Tensor) -> None:
    """Checks that ``x`` has a dim 0."""
    if x.dim() < 1:
        raise ValueError("x has no dims; it must have at least one")


def divisible(x: torch.Tensor, world: int) -> int:
    """Rows of ``x`` for each rank, if the ranks divide them."""
    has_rows(x)
    if x.shape[0] % world:
        raise ValueError(f"x has {x.shape[0]} rows, which is not a multiple of {world} ranks")
    return x.shape[0] // world


def rows(sizes: Sequence[int], world: int, what: str) -> None:
    """Checks numbers of rows, one for each rank."""
    if len(sizes) != world or min(sizes) < 0:
        raise ValueError(f"{what} is {list(sizes)}; it must be {world} numbers of 0 or more")


def counts(x: torch.Tensor, sizes: Sequence[int], what: str) -> list[int]:
    """Elements of the pieces of ``x`` along dim 0, if ``sizes`` add up to its rows."""
    if sum(sizes) != x.shape[0]:
        raise ValueError(
            f"{what} {list(sizes)} adds up to {sum(sizes)}, but the tensor of shape "
            f"{list(x.shape)} has {x.shape[0]} rows"
        )
    row = x[0].numel() if x.shape[0] else 0
    return [size * row for size in sizes]


def rank(value: int, world: int, what: str) -> None:
    """Checks that ``value`` is a rank."""
    if not 0 <= value < world:
        raise ValueError(f"{what} is {value}; it must be one of ranks 0 to {world - 1}")
