"""What NVML, a library of NVIDIA's driver, says of a host's GPUs, whatever this process sees of
them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
ERRORS = OSError, AttributeError, RuntimeError  #: of the functions here; AttributeError: too old
_SUCCESS, _NVLINK = 0, 2  # also NVML_P2P_STATUS_OK; NVML_P2P_CAPS_INDEX_NVLINK
_LONGEST_VERSION = 80  # bytes


@contextlib.contextmanager
def _opened() -> Iterator[Callable[..., None]]:
    """Yield what calls a function of NVML, and raises RuntimeError where that fails."""
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
    """Return the driver's version, such as "580.65.06"."""
    text = ctypes.create_string_buffer(_LONGEST_VERSION)
    with _opened() as call:
        call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
    return text.value.decode()


def uuids() -> list[str]:
    """Return the UUIDs of this host's GPUs."""
    count, found = ctypes.c_uint(), []
    with _opened() as call:
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_LONGEST_VERSION)
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            call("nvmlDeviceGetUUID", device, text, ctypes.c_uint(len(text)))
            found.append(text.value.decode())
    return found


def uuid_of(device: torch.device | int) -> str:
    """Return NVML's name of one of this process's GPUs."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def unlinked(gpu: str, peers: Sequence[str]) -> list[str]:
    """Return the peers to which NVML knows no NVLink from a GPU. All are given by their UUIDs."""
    found = []
    with _opened() as call:

        def handle(uuid: str) -> ctypes.c_void_p:
            device, function = ctypes.c_void_p(), "nvmlDeviceGetHandleByUUID"
            call(function, uuid.encode(), ctypes.byref(device), on=f"({uuid})")
            return device

        for peer in peers:
            status = ctypes.c_int(-1)
            pair = handle(gpu), handle(peer)
            call("nvmlDeviceGetP2PStatus", *pair, _NVLINK, ctypes.byref(status))
            if status.value != _SUCCESS:
                found.append(peer)
    return found
