"""Triton's way from a launch to the compiled kernel, without a GPU: nothing is compiled, and what
would be launched is noted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from tests.support.kernel_builds import KERNELS as BUILDS

# (kernel, grid, arguments) of each launch.
Launches = list[tuple[str, tuple[int, ...], tuple[Any, ...]]]
KERNELS = [kernel for kernel, _ in BUILDS.values()]
_HOPPER = GPUTarget("cuda", 90, 32)


class _Driver:
    """Of a GPU that has one stream."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _HOPPER


class _Compiled(CompiledKernel):  # type: ignore[misc]
    def __init__(self, source: Any, launches: Launches | None) -> None:
        self.name, self.src, self.metadata = source.name, source, None
        self.module, self.function, self.packed_metadata = object(), 0, ()
        self._launches = launches
        self._run = self._note

    def _note(self, *given: Any) -> None:
        if self._launches is not None:
            grid, arguments = given[:3], given[9:]
            self._launches.append((self.name, grid, arguments))


@contextlib.contextmanager
def launching(launches: Launches | None = None) -> Iterator[list[str]]:
    """Kernels can be launched; the names of those that Triton would have compiled."""
    compiled: list[str] = []

    def compile_source(source: Any, **_: Any) -> _Compiled:
        compiled.append(source.name)
        return _Compiled(source, launches)

    before = driver._active
    driver.set_active(_Driver())
    try:
        for kernel in KERNELS:
            kernel.device_caches[0] = kernel.create_binder()
            kernel.compile = compile_source
        yield compiled
    finally:
        driver._active = before
        for kernel in KERNELS:
            kernel.device_caches.clear()
