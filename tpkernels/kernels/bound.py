"""Kernel launches with all arguments bound except the tensor addresses.

Triton looks up the compiled kernel by all launch arguments at every launch: 12 us (AMD EPYC Zen 5,
Triton 3.7.1, 2026-11-23). Repeated calls of a cached plan differ only in the addresses, and only
the alignment of an address selects the compiled kernel. If Triton has already compiled the kernel
for the same alignments, a launch calls it directly.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import pkgutil
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, KernelInterface

from tpkernels import kernels
from tpkernels.errors import CaptureError
from tpkernels.symm import streams

_ALIGNMENT = 16  # bytes; for less aligned addresses Triton compiles a separate kernel
_compiling = threading.Lock()  # held while the `compile` method of a Triton kernel is replaced


@functools.cache
def _fix_cache_keys() -> None:
    """Compute the Triton cache keys of all functions of this folder in a fixed order.

    Triton (3.6, 3.7) computes the key of a kernel at its first launch. It differs if the callees
    have keys already. Without a fixed order, the keys would depend on the order of the first
    launches, and a process with a different order would compile the kernels again."""
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018


class BoundKernel:
    """A kernel launch on a grid of ``programs``. A call passes the leading arguments: tensors,
    descriptors or None. Their shapes, strides and dtypes must be equal in all calls.

    Args:
        args: the remaining kernel arguments, in order.
        options: launch options.
    """

    def __init__(
        self, kernel: KernelInterface, programs: int, args: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        _fix_cache_keys()
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._args, self._options = args, options
        self._compiled: dict[int, Any] = {}

    def __call__(self, *tensors: Any) -> None:
        alignments = 1  # one bit per tensor; no comprehension, to avoid a function call
        for x in tensors:
            if isinstance(x, torch.Tensor):
                alignments = 2 * alignments + (x.data_ptr() % _ALIGNMENT == 0)
        launch = self._compiled.get(alignments)
        if launch is not None:
            launch(*tensors, *self._args)
            return
        devices = {x.device for x in tensors if isinstance(x, torch.Tensor)}
        captured = any(map(streams.is_captured, devices))
        with _forbid_compilation(self._kernel) if captured else contextlib.nullcontext():
            compiled = self._kernel[self._grid](*tensors, *self._args, **self._options)
        # The interpreter returns no CompiledKernel. A direct launch would skip pre-run hooks.
        if isinstance(compiled, CompiledKernel) and not self._kernel.pre_run_hooks:
            self._compiled[alignments] = compiled[self._grid]


class WithScratch:
    """A bound kernel that creates TMA descriptors in the device memory ``scratch``."""

    def __init__(self, bound: BoundKernel, scratch: torch.Tensor) -> None:
        self._bound, self._scratch = bound, scratch

    def __call__(self, *tensors: Any) -> None:
        # The Triton allocator is a context variable. The copy protects the allocator of the caller.
        contextvars.copy_context().run(self._launch, *tensors)

    def _launch(self, *tensors: Any) -> None:
        triton.set_allocator(self._allocate)
        self._bound(*tensors)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
        if nbytes > self._scratch.nbytes:
            raise RuntimeError(
                f"the kernel needs {nbytes} bytes of scratch memory, but only "
                f"{self._scratch.nbytes} are allocated"
            )
        return self._scratch


@contextlib.contextmanager
def _forbid_compilation(kernel: KernelInterface) -> Iterator[None]:
    """Raise ``CaptureError`` if a launch of this thread needs compilation. Loading a new kernel
    during graph capture would invalidate the capture and break the group."""
    if not isinstance(kernel, JITFunction):  # an interpreted kernel
        yield
        return
    thread = threading.get_ident()
    with _compiling:
        compile_source = kernel.compile

        def refuse(*args: Any, **options: Any) -> CompiledKernel:
            if threading.get_ident() != thread:
                return compile_source(*args, **options)
            raise CaptureError(
                f"the Triton kernel {kernel.__name__} is not compiled for these operands, and it "
                "cannot be loaded during graph capture; end the capture, and run the call once "
                "before it with the same shapes, dtypes, strides and alignments"
            )

        kernel.compile = refuse
        try:
            yield
        finally:
            kernel.compile = compile_source
