"""Registers the backend "tpkernels" of `torch.distributed`, without an import of ``tpkernels``.

torch calls `register` when it is imported (the entry point group ``torch.backends``), so
``init_process_group("tpkernels")`` needs no import. It takes 30 us. TORCH_DEVICE_BACKEND_AUTOLOAD=0
disables the call.
"""

from typing import Any


def register() -> None:
    """Register the backend for CPU tensors. Does nothing if torch has no distributed package."""
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("tpkernels", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> Any:
    from tpkernels.groups.c10d import create

    return create(options)
