"""Torch's sets of dispatch keys, and where they are in memory (csrc/calls/key_sets.h)."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import torch

from tpkernels import _C

Result = TypeVar("Result")


def key_set(*names: str) -> torch._C.DispatchKeySet:
    """Dispatch keys by name; torch's enumeration for Python lacks some."""
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(names[0]))
    for name in names[1:]:
        keys = keys.add(torch._C._dispatch_key_parse(name))
    return keys


def outside_modes(work: Callable[[], Result]) -> Result:
    """Run ``work`` in a thread of its own: a mode may be on in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def keys_of_thread() -> tuple[int, int]:
    """Return the keys that are included and excluded, as torch says."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


def find_key_sets() -> bool:
    """Has the extension read key sets from memory, if it finds them there. Called on import."""
    numbers = torch.empty(1, device="cpu")
    tensors = [
        numbers,
        torch._neg_view(numbers),
        torch.empty(1, device="cpu", dtype=torch.complex64).conj(),
        torch.empty(1, device="meta"),
        torch.empty(1, device="cpu").to_sparse(),
        torch.nn.Parameter(numbers),
    ]
    with torch.inference_mode():
        tensors.append(torch.empty(1, device="cpu"))
    samples = [(each, each._cdata, torch._C._dispatch_keys(each).raw_repr()) for each in tensors]
    if not _C.calls.find_key_sets(samples, keys_of_thread()):
        return False
    with torch.inference_mode():
        if _C.calls.keys_of_thread() == keys_of_thread():
            return True
    return _C.calls.find_key_sets([], (0, 0))


outside_modes(find_key_sets)
