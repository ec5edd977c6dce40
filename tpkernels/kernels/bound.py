"""Launches of a kernel with everything bound but the addresses of tensors.

Triton finds what it has compiled by all arguments of a launch, each time: 12 us, AMD EPYC (Zen 5),
Triton 3.7.1, 2026-11-23. In the calls of one planned call only addresses change, and of these only
the alignment matters to what is compiled. So a launch goes to the compiled kernel at once if one
with such alignments has gone through Triton before.
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

_ALIGNMENT = 16  # bytes, of an address; Triton compiles another kernel where it has less
_compiling = threading.Lock()  # held where `compile` of a kernel of Triton is replaced


@functools.cache
def _fix_cache_keys() -> None:
    """Have Triton compute the cache keys of all functions of this folder, in the same order in
    every process. Triton (3.6, 3.7) computes a kernel's key when it is first launched, and the key
    differs if functions that it calls already have theirs: a process that launches kernels in
    another order would compile them again."""
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018


class BoundKernel:
    """A kernel on a grid of ``programs`` with everything but its first arguments: tensors, their
    descriptors or None. Shapes, strides and dtypes must be the same in all launches.

    Args:
        args: the kernel's other arguments, in its order.
        options: of the launch.
    """

    def __init__(
        self, kernel: KernelInterface, programs: int, args: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        _fix_cache_keys()
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._args, self._options = args, options
        self._compiled: dict[int, Any] = {}

    def __call__(self, *tensors: Any) -> None:
        aligned = 1  # one bit per tensor; no comprehension, which would be one more call
        for x in tensors:
            if isinstance(x, torch.Tensor):
                aligned = 2 * aligned + (x.data_ptr() % _ALIGNMENT == 0)
        launch = self._compiled.get(aligned)
        if launch is not None:
            launch(*tensors, *self._args)
            return
        devices = {x.device for x in tensors if isinstance(x, torch.Tensor)}
        captured = any(map(streams.is_captured, devices))
        with _only_compiled(self._kernel) if captured else contextlib.nullcontext():
            compiled = self._kernel[self._grid](*tensors, *self._args, **self._options)
        # It is not under the interpreter. Hooks before a launch are Triton's to call.
        if isinstance(compiled, CompiledKernel) and not self._kernel.pre_run_hooks:
            self._compiled[aligned] = compiled[self._grid]


class WithScratch:
    """A bound kernel that makes descriptors, in the device memory ``scratch``."""

    def __init__(self, bound: BoundKernel, scratch: torch.Tensor) -> None:
        self._bound, self._scratch = bound, scratch

    def __call__(self, *tensors: Any) -> None:
        # Triton's allocator is a variable of the context: a caller's own stays as it was.
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
def _only_compiled(kernel: KernelInterface) -> Iterator[None]:
    """Has launches of this thread raise ``CaptureError`` where Triton would have to compile: the
    new kernel would be loaded within the capture, which ends it and with it the group."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
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
