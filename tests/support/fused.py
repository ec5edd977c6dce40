"""What the tests of ``fused_dtensor`` share."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
Results = list[torch.Tensor]


def gradients(tensors: list[torch.Tensor]) -> Results:
    """Those that the tensors have, whole."""
    grads = [one.grad for one in tensors]
    return [
        one.full_tensor() if isinstance(one, DTensor) else one for one in grads if one is not None
    ]


def differences(what: str, own: Results, fused: Results) -> list[str]:
    """Where DTensor's results and those of the fused ops differ, as text."""
    assert own
    if len(own) != len(fused):
        return [f"{what}: {len(fused)} results, expected {len(own)}"]
    return [
        f"{what}: result {i} differs by {(a - b).abs().max()}"
        for i, (a, b) in enumerate(zip(own, fused, strict=True))
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-5)  # fp32, sums of at most 14 terms
    ]
