"""The ``torch.distributed`` backend "tpkernels" for CPU tensors.

``torch.distributed.init_process_group("tpkernels")`` and ``"cpu:tpkernels,cuda:nccl"`` use it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

_logger = logging.getLogger("tpkernels")
NAME = "tpkernels"


def register() -> None:
    """Register the backend with torch. Costs no import of its implementation."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> Any:
    """Return what torch calls: a ``c10d::Backend``, or a process group where none can be
    compiled."""
    from tpkernels.groups.c10d import bridge
    from tpkernels.groups.c10d.backend import Backend

    backend = Backend(options)
    try:
        return bridge.load().Bridge(backend, backend.gloo)
    except bridge.CompileError as error:
        from tpkernels.groups.c10d.python_group import PythonGroup

        _logger.warning(
            "the backend tpkernels runs in Python, slightly slower, and supports no other backend "
            "in the same process group: %s",
            error,
        )
        return PythonGroup(backend, options.store)
