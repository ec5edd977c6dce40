"""Memory for results and large temporaries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import _C

# From this size on, fresh memory comes straight from the kernel, page by page.
# AMD EPYC Zen 3 (a virtual machine), 2026-11-21: a 32 MiB all_reduce into a new tensor took 30 ms
# more than one in place with pages of 4 KiB, and 5 ms more with huge pages.
HUGE_BYTES = 4 << 20


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty``, with huge pages for large tensors on the CPU."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and out.nbytes >= HUGE_BYTES:
        _C.host.advise_huge_pages(out.data_ptr(), out.nbytes)
    return out
