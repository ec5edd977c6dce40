"""Load the compiled kernels: the fat binary in the extension, if it was built with nvcc. Otherwise
NVRTC, which CuPy locates and calls, compiles the same sources once per architecture.

NVRTC cubins are cached in ``$XDG_CACHE_HOME/tpkernels`` (``~/.cache/tpkernels``). The file name
contains the architecture and a hash of the sources, the options and the NVRTC version. A file is
used only if no untrusted user can have written it (`cache.read_trusted`) and its checksum is
correct. A lost file costs one compilation.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tpkernels import _C
from tpkernels.common.cache import cache_folder, read_trusted, replace_file
from tpkernels.errors import CaptureError
from tpkernels.symm import streams

# Without --device-as-default-execution-space, NVRTC treats lambdas in kernels as host functions.
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
_MAX_IMAGE_BYTES = 64 << 20  # an image is smaller than 1 MiB
_DIGEST_BYTES = hashlib.sha256().digest_size
_INSTALL = "pip install 'tpkernels[cu13]' (or [cu12] for CUDA 12), or build with nvcc"


@functools.cache
def kernels(device: int) -> _C.cuda.Kernels:
    """Return the kernels of a GPU, loaded at the first call.

    Raises:
        NotImplementedError: the driver, the GPU or a compatible image is missing.
        CaptureError: the kernels are not loaded yet and a graph is being captured.
    """
    if torch.cuda.is_available() and streams.is_captured(torch.device("cuda", device)):
        raise CaptureError(
            "the CUDA kernels cannot be loaded during graph capture; call the op once before the "
            "capture"
        )
    capability = _C.cuda.compute_capability(device)
    return _C.cuda.Kernels(device, None if _C.cuda.architectures() else nvrtc_image(capability))


def launch(kernel: str, device: torch.device, *arguments: object, **shape: Any) -> None:
    """Queue a kernel of csrc/cuda/kernels.h on the current torch stream of a GPU. ``shape``:
    ``blocks`` (default 1), blocks per ``cluster`` (default 1), ``early`` launch (default False)."""
    index, stream = device_and_stream(device)
    kernels(index).launch(kernel, stream, *arguments, **shape)


def device_and_stream(device: torch.device) -> tuple[int, int]:
    """Return (GPU index, current torch stream), or (0, 0) for a CPU device. Tests run the kernels
    on CPU tensors, with an emulated driver."""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream


def image_status() -> str:
    """Describe the kernel image: embedded, compiled by NVRTC, or the reason why it is missing."""
    if embedded := _C.cuda.architectures():
        return f"embedded: {embedded}"
    try:
        nvrtc, cupy_version = _nvrtc()
    except NotImplementedError as error:
        return f"none: {error}"
    return f"NVRTC {_version(nvrtc)} through CuPy {cupy_version}, compiled at first use"


def unsupported(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on a GPU, or None if they are loaded."""
    try:
        kernels(device_and_stream(device)[0])
    except NotImplementedError as error:
        return f"needs the CUDA kernels: {error}"
    return None


def available(device: torch.device) -> bool:
    """Return whether the kernels can be launched on a GPU. Loads the kernels; during graph capture,
    returns False if they are not loaded yet."""
    try:
        return _loads(device_and_stream(device)[0])
    except CaptureError:
        return False


@functools.cache
def _loads(device: int) -> bool:
    try:
        kernels(device)
    except NotImplementedError:
        return False
    return True


def driver_status() -> str:
    """Describe the CUDA driver (CUDA version, GPU architectures), or return the reason why it
    cannot be used."""
    try:
        version = _C.cuda.driver_version()
        devices = range(_C.cuda.device_count())
        gpus = ", ".join(f"sm_{_C.cuda.compute_capability(i)}" for i in devices)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return f"for CUDA {version // 1000}.{version % 1000 // 10}, GPUs: {gpus or 'none'}"


def nvrtc_image(capability: int) -> bytes:
    """Return a cubin for a compute capability (90 for 9.0), from the cache or from NVRTC.

    Raises:
        NotImplementedError: CuPy or NVRTC is missing or does not support the architecture.
    """
    nvrtc, _ = _nvrtc()
    options = (*_OPTIONS, f"--gpu-architecture=sm_{capability}")
    identity = f"{_version(nvrtc)} {options} {_C.cuda.sources()}"
    name = f"kernels-sm_{capability}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.cubin"
    folder = cache_folder()
    image = read_cached(folder / name)
    if image is None:
        image = _compile(nvrtc, options)
        write_cached(folder / name, image)
    return image


def read_cached(path: Path) -> bytes | None:
    """Return the cached image, or None if the file is missing, unreadable, corrupt, or writable by
    untrusted users."""
    try:
        content = read_trusted(path, max_bytes=_MAX_IMAGE_BYTES)
    except (OSError, ValueError):
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None


def write_cached(path: Path, image: bytes) -> None:
    """Write an image to the cache. If this fails, the next process compiles again."""
    with contextlib.suppress(OSError):
        replace_file(path, hashlib.sha256(image).digest() + image)


def _nvrtc() -> tuple[ModuleType, str]:
    """Return (NVRTC module of CuPy, CuPy version)."""
    try:
        import cupy
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise NotImplementedError(
            f"the CUDA kernels were not compiled when tpkernels was built, and CuPy, which could "
            f"compile them now, cannot be imported ({error}): {_INSTALL}"
        ) from error
    try:
        nvrtc.getVersion()
    except Exception as error:  # the exception type depends on the CuPy version
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise NotImplementedError(
            f"CuPy {cupy.__version__} is installed, but NVRTC, the compiler that it needs, is not "
            f"({lines[0]}): {_INSTALL}"
        ) from error
    return nvrtc, cupy.__version__


def _version(nvrtc: ModuleType) -> str:
    return ".".join(map(str, nvrtc.getVersion()))


def _compile(nvrtc: ModuleType, options: tuple[str, ...]) -> bytes:
    *headers, (main, source) = _C.cuda.sources()
    bodies, names = [body.encode() for _, body in headers], [name.encode() for name, _ in headers]
    program = nvrtc.createProgram(source, main, bodies, names)
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy strips the last byte, as for text
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip() or "the compiler log is empty"
        raise NotImplementedError(
            f"NVRTC {_version(nvrtc)} cannot compile the CUDA kernels with {options[-1]}: "
            f"{error}: {log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
