"""Symmetric tensors are shared with NumPy and CuPy without a copy: through the buffer protocol,
DLPack and, on GPUs, ``__cuda_array_interface__``."""

from __future__ import annotations

import gc

import numpy
import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.ranked import on_ranks

# NumPy does not support bf16: such tensors are viewed as int16.
SHARED_DTYPES = (torch.float32, torch.float16, torch.float64)


CONVERSIONS = (torch.Tensor.numpy, numpy.asarray, numpy.from_dlpack)


@on_ranks(2)
def test_numpy_shares_symmetric_memory() -> list[str]:
    """A rank writes through NumPy. Its peers read the values through an op that reads in place."""
    group = dist.new_group()
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    for convert in CONVERSIONS:
        conversion = convert.__name__
        for dtype in SHARED_DTYPES:
            x = tpkernels.empty(5, 7, dtype=dtype, group=group)
            array = convert(x)
            assert array.ctypes.data == x.data_ptr() and array.shape == (5, 7), (conversion, dtype)
            if not array.flags.writeable:
                wrong.append(f"{conversion} of {dtype} cannot be written")
                continue
            array[:] = rank + 1
            seen = tpkernels.all_gather(x, group)
            expected = torch.arange(1, world + 1).repeat_interleave(5)[:, None].expand(-1, 7)
            assert torch.equal(seen, expected.to(dtype)), (
                f"{conversion} of {dtype}: peers see other values"
            )
        half = tpkernels.empty(4, 4, dtype=torch.bfloat16, group=group)
        assert convert(half.view(torch.int16)).ctypes.data == half.data_ptr(), conversion
    return wrong


@on_ranks(2)
def test_arrays_and_tensors_keep_memory_alive_in_both_directions() -> None:
    """Sum an array that outlives its tensor, pass NumPy memory to an op, and convert a symmetric
    tensor to NumPy and back."""
    group = dist.new_group()
    x = tpkernels.empty(1000, group=group).fill_(3)
    array = numpy.from_dlpack(x)
    del x
    gc.collect()
    tpkernels.empty(1000, group=group).fill_(9)
    rank_values = numpy.full((3, 4), dist.get_rank() + 1, dtype=numpy.float32)
    total = tpkernels.all_reduce(torch.from_dlpack(rank_values), group)
    x = tpkernels.empty(6, group=group)
    back = torch.from_dlpack(numpy.from_dlpack(x)).fill_(5)
    is_shared = back.data_ptr() == x.data_ptr() and bool((x == 5).all())
    assert [float(array.sum()), bool((total == 3).all()), is_shared] == [3000.0, True, True]


@pytest.mark.gpu(1)
def test_cupy_shares_symmetric_memory() -> None:
    """Memory from the symmetric-memory allocator of torch, on one GPU."""
    cupy = pytest.importorskip("cupy")
    import torch.distributed._symmetric_memory as symmetric

    x = symmetric.empty(64, dtype=torch.float32, device="cuda")
    for array in (cupy.asarray(x), cupy.from_dlpack(x)):
        assert array.data.ptr == x.data_ptr()
        array[:] = 3
        torch.cuda.synchronize()
        assert bool((x == 3).all())
        x.fill_(4)
        assert torch.from_dlpack(array).data_ptr() == x.data_ptr()
        assert x.__cuda_array_interface__["data"][0] == array.data.ptr
