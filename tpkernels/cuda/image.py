"""Where the compiled kernels come from: the fat binary in the extension, where it was built with
nvcc; else NVRTC, which CuPy finds and calls, compiles the same sources once per architecture.

What NVRTC made is kept in ``$XDG_CACHE_HOME/tpkernels`` (``~/.cache/tpkernels``), under a name that
holds the architecture and a hash of sources, options and NVRTC's version. A file there is used only
if nobody else can have written it (`cache.read_trusted`) and its own checksum is right; losing it
costs a compilation.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from tpkernels import _C
from tpkernels.cache import cache_folder, read_trusted, replace_file
from tpkernels.cuda.checks import device_and_stream

_OPTIONS = ("--std=c++17",)
_MOST_BYTES = 64 << 20  # an image has less than 1 MiB
_DIGEST_BYTES = hashlib.sha256().digest_size
_INSTALL = "pip install 'tpkernels[cu13]' (or [cu12] for CUDA 12), or build where there is nvcc"


@functools.cache
def kernels(device: int) -> _C.cuda.Kernels:
    """The kernels, loaded on a GPU.

    Raises:
        NotImplementedError: there is no driver, no such GPU, or no image that it can run.
        RuntimeError: the first call, which loads them, comes while a graph is captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the CUDA kernels are not loaded yet, which a capture does not allow: call "
            "tpkernels.cuda.barrier, or any of its functions, once before"
        )
    capability = _C.cuda.compute_capability(device)
    return _C.cuda.Kernels(device, None if _C.cuda.architectures() else nvrtc_image(capability))


def image_status() -> str:
    """Which image is active: embedded, or made by NVRTC, or why there is none."""
    if embedded := _C.cuda.architectures():
        return f"embedded: {embedded}"
    try:
        nvrtc, cupy_version = _nvrtc()
    except NotImplementedError as error:
        return f"none: {error}"
    return f"NVRTC {_version(nvrtc)} through CuPy {cupy_version}, compiled at first use"


def unsupported(device: torch.device) -> str | None:
    """Why the kernels cannot run on a GPU; None: they are loaded."""
    try:
        kernels(device_and_stream(device)[0])
    except NotImplementedError as error:
        return f"needs the CUDA kernels: {error}"
    return None


def driver_status() -> str:
    """What the CUDA driver supports, or why it cannot be used."""
    try:
        version = _C.cuda.driver_version()
        devices = range(_C.cuda.device_count())
        found = ", ".join(f"sm_{_C.cuda.compute_capability(i)}" for i in devices)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return f"for CUDA {version // 1000}.{version % 1000 // 10}, GPUs: {found or 'none'}"


def nvrtc_image(capability: int) -> bytes:
    """A cubin for GPUs of a compute capability (90 for 9.0), from the cache or from NVRTC.

    Raises:
        NotImplementedError: CuPy or NVRTC is not installed, or does not know the architecture.
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
    """The image in a file; None if it is not there, cannot be read, is damaged, or if another user
    can have written it."""
    try:
        content = read_trusted(path, most=_MOST_BYTES)
    except (OSError, ValueError):
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return image if hashlib.sha256(image).digest() == digest else None


def write_cached(path: Path, image: bytes) -> None:
    """Keeps an image. Where that cannot be done, the next process compiles again."""
    with contextlib.suppress(OSError):
        replace_file(path, hashlib.sha256(image).digest() + image)


def _nvrtc() -> tuple[Any, str]:
    """CuPy's face of NVRTC, and CuPy's version."""
    try:
        import cupy
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise NotImplementedError(
            f"the CUDA kernels were not compiled when tpkernels was built, and CuPy, which would "
            f"compile them now, cannot be imported ({error}): {_INSTALL}"
        ) from error
    try:
        nvrtc.getVersion()
    except Exception as error:  # of another class in each version of CuPy
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise NotImplementedError(
            f"CuPy {cupy.__version__} is here, but NVRTC, the compiler that it calls, is not "
            f"({told[0]}): {_INSTALL}"
        ) from error
    return nvrtc, cupy.__version__


def _version(nvrtc: Any) -> str:
    return ".".join(map(str, nvrtc.getVersion()))


def _compile(nvrtc: Any, options: tuple[str, ...]) -> bytes:
    *headers, (main, source) = _C.cuda.sources()
    texts, names = [text.encode() for _, text in headers], [name.encode() for name, _ in headers]
    program = nvrtc.createProgram(source, main, texts, names)
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy takes the last byte off, as of text
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip() or "no further reason"
        raise NotImplementedError(
            f"NVRTC {_version(nvrtc)} does not compile the CUDA kernels with {options[-1]}: "
            f"{error}: {log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
