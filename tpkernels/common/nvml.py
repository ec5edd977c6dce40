"""Queries of NVML, a library of the NVIDIA driver. They cover all GPUs of the host, including GPUs
that are not visible to this process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
#: Errors of the functions in this module. AttributeError: the library is too old.
ERRORS = OSError, AttributeError, RuntimeError
_SUCCESS, _NVLINK = 0, 2  # also NVML_P2P_STATUS_OK; NVML_P2P_CAPS_INDEX_NVLINK
_MAX_STRING_BYTES = 80


@contextlib.contextmanager
def _open_nvml() -> Iterator[Callable[..., None]]:
    """Yield a function that calls an NVML function. It raises RuntimeError if NVML returns an
    error."""
    library = ctypes.CDLL(LIBRARY)

    def call(function: str, *arguments: Any, on: str = "") -> None:
        code = getattr(library, function)(*arguments)
        if code != _SUCCESS:
            raise RuntimeError(f"{function}{on} returned the NVML error {code}")

    call("nvmlInit_v2")
    try:
        yield call
    finally:
        library.nvmlShutdown()


def driver_version() -> str:
    """Return the version of the driver, such as "580.65.06"."""
    buffer = ctypes.create_string_buffer(_MAX_STRING_BYTES)
    with _open_nvml() as call:
        call("nvmlSystemGetDriverVersion", buffer, ctypes.c_uint(len(buffer)))
    return buffer.value.decode()


def uuids() -> list[str]:
    """Return the UUIDs of the GPUs on this host."""
    count, result = ctypes.c_uint(), []
    with _open_nvml() as call:
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            device, buffer = ctypes.c_void_p(), ctypes.create_string_buffer(_MAX_STRING_BYTES)
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            call("nvmlDeviceGetUUID", device, buffer, ctypes.c_uint(len(buffer)))
            result.append(buffer.value.decode())
    return result


def get_uuid(device: torch.device | int) -> str:
    """Return the NVML UUID of a GPU of this process."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def find_unlinked(gpu: str, peers: Sequence[str]) -> list[str]:
    """Return the peers without an NVLink to ``gpu``. All GPUs are UUIDs."""
    unlinked = []
    with _open_nvml() as call:

        def handle(uuid: str) -> ctypes.c_void_p:
            device, function = ctypes.c_void_p(), "nvmlDeviceGetHandleByUUID"
            call(function, uuid.encode(), ctypes.byref(device), on=f"({uuid})")
            return device

        for peer in peers:
            status = ctypes.c_int(-1)
            pair = handle(gpu), handle(peer)
            call("nvmlDeviceGetP2PStatus", *pair, _NVLINK, ctypes.byref(status))
            if status.value != _SUCCESS:
                unlinked.append(peer)
    return unlinked
