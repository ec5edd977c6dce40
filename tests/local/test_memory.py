"""Memory of large tensors: it comes back from the pool, and never while anything refers to it."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.faults import together
from tpkernels import _C
from tpkernels.local.memory import empty

MIB = 1 << 20
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIMIT = 64 * MIB


def large(value: float, mib: int = 4) -> torch.Tensor:
    return empty((mib, MIB // 4), torch.float32, CPU).fill_(value)


def pooled(x: torch.Tensor) -> bool:
    """torch's own storages can be resized."""
    return not x.untyped_storage().resizable()


@pytest.fixture(autouse=True)
def pool() -> Iterator[Callable[[str], int]]:
    """The pool without idle blocks; `pool("in_use")` counts from here."""
    before = _C.calls.result_pool()
    _C.calls.limit_result_pool(0)
    _C.calls.limit_result_pool(LIMIT)
    yield lambda name: _C.calls.result_pool()[name] - (before[name] if name == "in_use" else 0)
    _C.calls.limit_result_pool(before["limit"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_an_ordinary_tensor(dtype: torch.dtype, pool: Callable[[str], int]) -> None:
    shape = (3, 1001, 7, 4 * MIB // 20000)
    x = empty(shape, dtype, CPU)
    assert pooled(x) and x.nbytes < pool("in_use") <= x.nbytes * 9 / 8
    assert x.shape == torch.Size(shape) and x.dtype == dtype and x.device == CPU
    assert x.stride() == torch.empty(shape, device="meta").stride() and x.is_contiguous()
    assert x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes
    assert x._version == 0 and x.is_leaf and not x.requires_grad and not x.is_inference()
    assert not x.is_pinned() and not x.is_shared()
    x.fill_(1).add_(1)
    assert x._version == 2 and (x == 2).all()
    with torch.inference_mode():
        assert empty(shape, dtype, CPU).is_inference()


def test_the_same_memory_comes_back(pool: Callable[[str], int]) -> None:
    x, y = large(1), large(2)
    address = x.data_ptr()
    assert address != y.data_ptr()
    del x
    assert large(3, mib=8).data_ptr() != address
    again = empty((2, MIB // 4), torch.float64, CPU)
    assert again.data_ptr() == address and (again.view(torch.float32) == 1).all()
    assert (y == 2).all() and pool("in_use") == 8 * MIB


def test_small_tensors_and_other_dtypes_are_from_torch(pool: Callable[[str], int]) -> None:
    tensors = [
        empty((4 * MIB // 4 - 1,), torch.float32, CPU),
        empty([0, 8 * MIB], torch.float32, CPU),
        empty((8 * MIB,), torch.int8, CPU),
    ]
    assert not any(map(pooled, tensors)) and pool("in_use") == 0
    assert tensors[1].shape == (0, 8 * MIB)
    with pytest.raises(RuntimeError, match="negative dimension"):
        empty((-1, 8 * MIB), torch.float32, CPU)
    with pytest.raises(RuntimeError, match="overflow"):
        empty((1 << 62, 8), torch.float32, CPU)


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return scale * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return grads[0] * x.min() * x.max(), None


class Graph:
    """A graph that has saved the tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.scale = torch.ones((), requires_grad=True)
        self.out = Saves.apply(self.scale, x)

    def read(self) -> torch.Tensor:
        (grad,) = torch.autograd.grad(self.out, self.scale)
        return grad


class Thread:
    """A thread that has the only reference."""

    def __init__(self, x: torch.Tensor) -> None:
        self.go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.seen: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        threading.Thread(target=self.run, args=[[x]]).start()

    def run(self, only: list[torch.Tensor]) -> None:
        x = only.pop()
        self.go.get(timeout=60)
        seen = torch.stack([x.min(), x.max()])
        del x
        self.seen.put(seen)

    def read(self) -> torch.Tensor:
        self.go.put(None)
        return self.seen.get(timeout=60)


# What refers to the memory of a tensor of ones, and how to read it there.
HOLDERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "the tensor": (lambda x: x, lambda x: x),
    "a row": (lambda x: x[-1], lambda row: row),
    "an element": (lambda x: x[1, 2], lambda element: element),
    "a transposed view": (lambda x: x.t()[::3], lambda view: view),
    "a view as bytes": (lambda x: x.view(torch.uint8), lambda view: view.view(torch.float32)),
    "the storage": (torch.Tensor.untyped_storage, lambda storage: torch.empty(0).set_(storage)),
    "what is detached": (torch.Tensor.detach, lambda x: x),
    "a parameter": (torch.nn.Parameter, torch.Tensor.detach),
    "a NumPy array": (lambda x: x.numpy()[1:], torch.from_numpy),
    "a memoryview": (lambda x: memoryview(x.numpy()), np.asarray),
    "NumPy by DLPack": (np.from_dlpack, torch.from_numpy),
    "torch by DLPack": (torch.from_dlpack, lambda x: x),
    "a DLPack capsule": (torch.Tensor.__dlpack__, torch.utils.dlpack.from_dlpack),
    "an autograd graph": (Graph, Graph.read),
    "another thread": (Thread, Thread.read),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_memory_in_use_is_never_handed_out(name: str, pool: Callable[[str], int]) -> None:
    hold, read = HOLDERS[name]
    x = large(1)
    address = x.data_ptr()
    held = hold(x)
    del x
    assert pool("in_use") == 4 * MIB
    others = [large(2) for _ in range(3)]
    for _ in range(3):  # new blocks, and blocks that come back
        others[0] = large(3)
        assert others[0].data_ptr() != address
    assert (read(held) == 1).all()
    del held, others
    assert pool("in_use") == 0
    assert address in [block.data_ptr() for block in [large(4) for _ in range(6)]]


def test_threads_never_have_the_same_memory(pool: Callable[[str], int]) -> None:
    """Tensors are made on one thread and die on another."""
    handed: queue.SimpleQueue[tuple[torch.Tensor, int]] = queue.SimpleQueue()

    def run(thread: int) -> None:
        for i in range(25):
            value = 100 * thread + i
            handed.put((large(value, mib=4 + i % 3), value))
            x, expected = handed.get(timeout=60)
            assert (x == expected).all(), expected

    assert together(functools.partial(run, i) for i in range(4)) == [None] * 4
    assert pool("in_use") == 0 and 0 < pool("idle") <= LIMIT


def test_idle_memory_is_bounded(pool: Callable[[str], int]) -> None:
    tensors = [large(i) for i in range(40)]
    assert pool("in_use") == 160 * MIB and pool("idle") == 0
    del tensors
    assert pool("in_use") == 0 and pool("idle") == LIMIT
    too_large = large(0, mib=LIMIT // MIB + 1)
    assert not pooled(too_large) and pool("idle") == LIMIT
    keeper = large(0)
    _C.calls.limit_result_pool(8 * MIB)
    assert pool("idle") == 8 * MIB
    _C.calls.limit_result_pool(0)
    assert pool("idle") == 0 and not pooled(large(0))
    del keeper
    assert pool("in_use") == pool("idle") == 0


def test_memory_is_filled_where_torch_would_fill_it() -> None:
    large(7)
    assert (empty((MIB,), torch.float32, CPU) == 7).all()  # the control: it is not filled
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in DTYPES:
            assert empty((4 * MIB,), dtype, CPU).isnan().all()
        large(7)
        torch.utils.deterministic.fill_uninitialized_memory = False
        assert (empty((MIB,), torch.float32, CPU) == 7).all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_it_can_be_copied_saved_and_shared(pool: Callable[[str], int]) -> None:
    x, file = large(5), io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file), x)
    assert torch.equal(copy.deepcopy(x), x) and torch.equal(pickle.loads(pickle.dumps(x)), x)
    assert x.share_memory_().is_shared() and (x == 5).all()
    assert pool("in_use") == 0  # torch has moved it


def test_it_cannot_grow() -> None:
    """docs/ops.md says so."""
    x = large(5)
    assert (x.resize_(3) == 5).all() and x.shape == (3,)
    for grow in (lambda: x.resize_(2 * MIB), lambda: x.untyped_storage().resize_(0)):
        with pytest.raises(RuntimeError, match="storage that is not resizable"):
            grow()
