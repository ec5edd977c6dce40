"""A call's arguments by name, as the op's schema has them: an option is declared once."""

from __future__ import annotations

from collections import namedtuple

import torch

from tpkernels import _C
from tpkernels.ops._key_sets import key_set

# Of CPU and CUDA tensors whose memory holds their values.
PLAIN_KEYS = key_set(
    "CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"
)
if not _C.calls.open_exchange(torch.Tensor, PLAIN_KEYS.raw_repr()):
    raise ImportError(
        f"torch {torch.__version__} has no DLPack exchange interface; tpkernels needs 2.11 or later"
    )


def arguments_of(schema: torch.FunctionSchema) -> _C.calls.Arguments:
    """Make a call's arguments a named tuple with the names and the defaults of an op's schema."""
    given = schema.arguments
    described = [
        (
            each.name,
            each.has_default_value(),
            each.default_value if each.has_default_value() else None,
            each.kwarg_only,
        )
        for each in given
    ]
    cls = namedtuple("Arguments", [each.name for each in given])  # type: ignore[misc]
    return _C.calls.Arguments(schema.name.removeprefix("tpkernels::"), described, cls)
