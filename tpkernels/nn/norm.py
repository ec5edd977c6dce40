"""RMSNorm, where each rank applies it to rows, or heads, of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn.regions import copy_to_ranks


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in fp32, rounded once.

    Args:
        hidden_size: of the last dim.
        eps: added to the mean square.
        group: the ranks, where each applies the weight to a part of its own: to its rows under
            sequence parallelism, or to its heads. A rank then sees a part of the weight's gradient;
            the parts are summed in the backward, so that the weight has its whole gradient, the
            same on all ranks, as soon as the backward has run. None: all ranks have the same input.

    ``weight`` [hidden_size] is whole on every rank.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        group: GroupLike | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.group = None if group is None else groups.name_of(group)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        weight = self.weight if self.group is None else copy_to_ranks(self.weight, self.group)
        return F.rms_norm(x, (self.hidden_size,), weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, group={self.group!r}"
