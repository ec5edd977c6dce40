"""Bound launches are identical to Triton launches, but skip the lookup of the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.runtime._allocation import _allocator

from tests.support.fake_triton import KERNELS, Launches, launching
from tpkernels.errors import CaptureError
from tpkernels.kernels import (
    all_gather_matmul,
    configs,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from tpkernels.kernels.bound import BoundKernel, WithScratch
from tpkernels.kernels.configs import Descriptor, MatmulConfig
from tpkernels.symm import streams
from tpkernels.symm.device import DeviceWorkspace, PreparedCall

BF16 = torch.bfloat16
SIZES = (16, 16)
CONFIG = replace(configs.TABLE[90, 2, True], programs=132)


def gather(config: MatmulConfig, x: torch.Tensor, w: torch.Tensor) -> tuple[PreparedCall, Any]:
    gathered, out = x.new_empty(32, 64), x.new_empty(32, 48)
    prepared = all_gather_matmul.prepare(config, x[:16], [w, w], gathered, BF16, SIZES)
    return prepared, (x[:16], [w, w], [None, None], [out, out.clone()], gathered)


def scatter(config: MatmulConfig, x: torch.Tensor, w: torch.Tensor) -> tuple[PreparedCall, Any]:
    prepared = matmul_reduce_scatter.prepare(config, x, w, SIZES, BF16)
    return prepared, (x, w, None, None, x.new_empty(16, 48))


def reduce(config: MatmulConfig, x: torch.Tensor, w: torch.Tensor) -> tuple[PreparedCall, Any]:
    prepared = matmul_all_reduce.prepare(config, x, w, BF16, 2, BF16)
    return prepared, (x, w, x.new_ones(48), None, x.new_empty(32, 48))


OPS = {"all_gather_matmul": gather, "matmul_reduce_scatter": scatter, "matmul_all_reduce": reduce}
Compiled = tuple[Launches, list[str]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Yield the launches, and the names of the kernels that were compiled for them."""
    monkeypatch.setattr(configs, "INTERPRETED", False)
    launches: Launches = []
    with launching(launches) as compiled:
        yield launches, compiled


def workspace() -> DeviceWorkspace:
    region = torch.zeros(1 << 12, dtype=torch.uint8)
    return DeviceWorkspace([region.data_ptr()] * 2, region, 0, 64, 64, 1.0)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(32, 64, dtype=BF16), torch.ones(48, 64, dtype=BF16).t()


def comparable(arguments: Any) -> Any:
    """Convert arguments to comparable values, descriptors to their fields."""
    if isinstance(arguments, Descriptor):
        fields = arguments.shape, arguments.strides, arguments.block_shape
        return arguments.base.data_ptr(), *fields
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr(), arguments.dtype
    if isinstance(arguments, tuple):
        return tuple(map(comparable, arguments))
    return getattr(arguments, "value", arguments)


@pytest.mark.parametrize("op", OPS)
def test_bound_launch_matches_triton(
    gpu: Compiled, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Run a bound call twice. The second run makes the same launches without `kernel.run`."""
    launches, compiled = gpu
    prepared, tensors = OPS[op](CONFIG, *operands())
    run = prepared.bind(workspace(), 77)
    run(*tensors)
    kernels, first = len(compiled), list(launches)
    launches.clear()
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "run", None)
    run(*tensors)
    assert len(compiled) == kernels  # Triton would not compile again either
    assert first and list(map(comparable, launches)) == list(map(comparable, first))


def bound_scatter() -> tuple[PreparedCall, Callable[..., None], tuple[Any, ...]]:
    prepared, tensors = scatter(CONFIG, *operands())
    return prepared, prepared.bind(workspace(), 77), tensors


def test_capture_launches_only_compiled_kernels(
    gpu: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, compiled = gpu
    prepared, run, (*inputs, out) = bound_scatter()
    monkeypatch.setattr(streams, "is_captured", lambda _: True)
    with pytest.raises(CaptureError, match="matmul_reduce_scatter_kernel is not compiled for"):
        run(*inputs, out)
    assert not launches and not compiled
    monkeypatch.setattr(streams, "is_captured", lambda _: False)
    run(*inputs, out)
    monkeypatch.setattr(streams, "is_captured", lambda _: True)
    prepared.bind(workspace(), 77)(*inputs, out)  # a new binding of a compiled kernel
    run(*inputs, torch.empty_like(out))
    with pytest.raises(CaptureError, match="alignments"):
        run(*inputs, misaligned_copy(out))
    assert len(launches) == 3 and len(compiled) == 1


def misaligned_copy(x: torch.Tensor) -> torch.Tensor:
    """Copy x to an address that is not aligned for 16-byte loads."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def test_addresses_follow_the_call_and_alignments_select_kernels(
    gpu: Compiled,
) -> None:
    launches, compiled = gpu
    _, run, (x, w, bias, residual, out) = bound_scatter()
    for result in (out, misaligned_copy(out), torch.empty_like(out), misaligned_copy(out)):
        x, w = x.clone(), w.t().clone().t()
        run(x, w, bias, residual, result)
        a, b, *_, stored = launches[-1][2][:5]
        assert isinstance(a, Descriptor) and isinstance(b, Descriptor)
        assert a.base is x and b.base is w and stored is result
    assert len(compiled) == 2 and len(launches) == 4


def test_hooks_are_called_before_every_launch(
    gpu: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def hook(*args: Any, **_: Any) -> None:
        calls.append(args)

    monkeypatch.setattr(matmul.matmul_kernel, "pre_run_hooks", [hook])
    run = matmul.bind_matmul(CONFIG, *operands(), BF16)
    for _ in range(3):
        run(*operands(), None, torch.empty(32, 48, dtype=BF16))
    assert len(calls) == 3


def test_the_interpreter_gets_every_launch() -> None:
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launched.append((grid, args, options))

    launch = BoundKernel(Kernel(), 3, (1, 2), {"num_warps": 4})
    launch(None)
    launch(None)
    assert launched == [((3, 1, 1), (None, 1, 2), {"num_warps": 4})] * 2


@pytest.mark.parametrize(
    ("op", "columns", "num_allocators"), [(scatter, 48, 1), (scatter, 47, 0), (reduce, 48, 0)]
)
def test_descriptor_stores_get_scratch_memory(
    gpu: Compiled, monkeypatch: pytest.MonkeyPatch, op: Any, columns: int, num_allocators: int
) -> None:
    allocators: list[Any] = []
    monkeypatch.setattr(triton, "set_allocator", allocators.append)
    x, w = operands()
    prepared, tensors = op(CONFIG, x, w[:, :columns])
    prepared.bind(target := workspace(), 77)(*tensors)
    assert [allocator(128, 128, None) is target.scratch for allocator in allocators] == [
        True
    ] * num_allocators


def test_descriptors_use_the_given_scratch_memory() -> None:
    """Launch with scratch memory that suffices, then with too little, which raises.

    Afterwards the allocator of the caller is active again.
    """
    scratch, caller_allocator = torch.empty(256, dtype=torch.uint8), object()
    allocated: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda nbytes: allocated.append(_allocator.get()(nbytes, 128, None))

    launch = WithScratch(BoundKernel(Kernel(), 2, (), {}), scratch)
    token = _allocator.set(caller_allocator)
    try:
        launch(256)
        with pytest.raises(
            RuntimeError, match="needs 384 bytes of scratch memory, but only 256 are allocated"
        ):
            launch(384)
        assert allocated == [scratch] and _allocator.get() is caller_allocator
    finally:
        _allocator.reset(token)
