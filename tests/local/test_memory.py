"""Large tensors on the CPU get huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tpkernels.local.memory import empty

MIB = 1 << 20


def asks_for_huge_pages(x: torch.Tensor) -> bool:
    """Return True if huge pages were requested (flag "hg") in the middle of the memory of x."""
    middle = x.data_ptr() + x.nbytes // 2
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        begin, end = (int(bound, 16) for bound in mapping.split(" ", 1)[0].split("-"))
        if begin <= middle < end:
            return " hg" in mapping.rsplit("VmFlags:", 1)[1]
    raise AssertionError(f"{middle:x} is not mapped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors_get_huge_pages(dtype: torch.dtype) -> None:
    x = empty((1024, 64 * MIB // 1024 // dtype.itemsize), dtype, torch.device("cpu"))
    assert x.dtype == dtype and x.is_contiguous() and x.untyped_storage().resizable()
    assert asks_for_huge_pages(x)
    assert not asks_for_huge_pages(torch.empty(64 * MIB, dtype=torch.uint8))  # negative control


def test_shapes_that_torch_refuses_are_refused() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        empty((-1, 8 * MIB), torch.float32, torch.device("cpu"))
