"""Which collectives of CUDA tensors are worth a rewrite: see `ops._measured`."""

from __future__ import annotations

from tpkernels import groups
from tpkernels.compile.graph import Collective, Unsupported
from tpkernels.compile.layout import Size
from tpkernels.op_spec import NO_OPTIONS, Options
from tpkernels.tuning.replacement import why_left_to_torch


def check_worthwhile(
    collective: Collective, op: str, rows: Size | None, width: Size, options: Options = NO_OPTIONS
) -> None:
    """Check that an op is to replace a collective and its matmuls.

    Args:
        rows: of the tensor that travels, on all ranks; None: it is not split along its rows.
        width: its last dim.
        options: of the op's `Problem`.

    Raises:
        Unsupported: torch's calls are to stay.
    """
    tensor = collective.node.meta["val"]
    reason = why_left_to_torch(
        groups.get(collective.group),
        op,
        tensor.device.type,
        rows=rows if isinstance(rows, int) else None,
        width=width if rows is not None and isinstance(width, int) else None,
        dtype=tensor.dtype,
        options=options,
    )
    if reason is not None:
        raise Unsupported(reason)
