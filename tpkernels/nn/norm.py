"""RMSNorm that each rank applies to its own rows or heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn.regions import copy_to_ranks


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, computed in fp32 and rounded once.

    Args:
        hidden_size: size of the last dim.
        eps: added to the mean square.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name, if each rank applies the
            weight to its own part of the input: its rows under sequence parallelism, or its heads.
            The backward then sums the weight's gradient over the ranks. None: all ranks have the
            same input, and the same gradient.
        device, dtype: of the weight.

    ``weight`` is [hidden_size] on every rank.
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
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., hidden_size]; the result has its shape and dtype."""
        weight = self.shared_weight().to(x.dtype)
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)

    def shared_weight(self) -> torch.Tensor:
        """Return the weight; its gradient is summed if each rank has a part of the input."""
        return self.weight if self.group is None else copy_to_ranks(self.weight, self.group)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, group={self.group!r}"
