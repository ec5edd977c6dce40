"""The ``torch.distributed`` backend "tpkernels" for CPU tensors.

``torch.distributed.init_process_group("tpkernels")`` and ``"cpu:tpkernels,cuda:nccl"`` use it.
tpkernels_autoload.py registers it.
"""

from __future__ import annotations

import logging
from typing import Any

from tpkernels.torch_private import BackendOptions

_logger = logging.getLogger("tpkernels")


def create(options: BackendOptions) -> Any:
    """Return what torch calls for a process group: a ``c10d::Backend``, or a process group where
    none can be compiled."""
    from tpkernels.groups.c10d import bridge
    from tpkernels.groups.c10d.backend import Backend

    try:
        make = bridge.load().Bridge  # before this rank can keep others waiting
    except bridge.CompileError as error:
        from tpkernels.groups.c10d.python_group import PythonGroup

        _logger.warning(
            "the backend tpkernels runs in Python, slightly slower, and supports no other backend "
            "in the same process group: %s",
            error,
        )
        return PythonGroup(Backend(options), options.store)
    backend = Backend(options)
    return make(backend, backend.gloo)
