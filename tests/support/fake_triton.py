"""The launch path of Triton without a GPU.

Kernels are not compiled. Launches are recorded.
"""

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
    """The driver of a GPU with one stream."""

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

    def _note(self, *args: Any) -> None:
        if self._launches is not None:
            grid, arguments = args[:3], args[9:]
            self._launches.append((self.name, grid, arguments))


@contextlib.contextmanager
def launching(launches: Launches | None = None) -> Iterator[list[str]]:
    """Enable launches. Yield the names of kernels that Triton would have compiled."""
    compiled: list[str] = []

    def compile_source(source: Any, **_: Any) -> _Compiled:
        compiled.append(source.name)
        return _Compiled(source, launches)

    previous = driver._active
    driver.set_active(_Driver())
    try:
        for kernel in KERNELS:
            kernel.device_caches[0] = kernel.create_binder()
            kernel.compile = compile_source
        yield compiled
    finally:
        driver._active = previous
        for kernel in KERNELS:
            kernel.device_caches.clear()
