"""Lets graphs run as they are that hold ``control_deps``, where torch has only code for that and no
kernel: before 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import DispatchKey
from torch._inductor.fx_passes.control_dependencies import control_deps


def _at_once(_: Any, graph: Callable[..., Any], *inputs: Any) -> Any:
    return graph(*inputs)


if not control_deps.has_kernel_for_dispatch_key(DispatchKey.Autograd):
    for _key in (DispatchKey.CPU, DispatchKey.AutogradCPU):
        control_deps.py_impl(_key)(_at_once)
