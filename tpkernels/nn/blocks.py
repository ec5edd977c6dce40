"""RMSNorm, MLP and attention of a transformer, with the parameter names of the Llama family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from tpkernels.nn.regions import copy_to_ranks
from tpkernels.nn.sharding import LayerOptions
from tpkernels.torch_private import direct_children

Rotary = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """RMSNorm over the last dim, computed in fp32 and rounded once.

    Equals ``torch.nn.RMSNorm(hidden_size, eps)``::

        x / sqrt(mean(x^2) + eps) * weight

    Args:
        hidden_size: size of the last dim.
        eps: added to the mean square.
        group: group of the ranks that apply the weight to different inputs: to the local rows under
            sequence parallelism, or to the local heads. The backward then sums the weight gradient
            over the ranks. None: all ranks have the same input and the same gradient.
        device, dtype: device and dtype of the weight.

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
        self.group = None if group is None else groups.group_name(group)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., hidden_size]. The result has the shape and dtype of ``x``."""
        weight = self.shared_weight().to(x.dtype)
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)

    def shared_weight(self) -> torch.Tensor:
        """Return the weight. With a ``group``, the backward sums its gradient over the ranks."""
        return self.weight if self.group is None else copy_to_ranks(self.weight, self.group)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, group={self.group!r}"


class ParallelMLP(nn.Module):
    """Gated MLP. The gate and up projections share one all-gather.

    Equals this program on unsharded ``nn.Linear`` layers::

        down_proj(activation(gate_proj(x)) * up_proj(x))

    Args:
        hidden_size, intermediate_size: sizes of the unsharded block.
        group, options: see `tpkernels.nn`.
        bias: whether the three layers have biases.
        activation: applied to the gate.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        group: GroupLike,
        *,
        bias: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.activation = activation
        widths = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        gate_up = MergedColumnParallelLinear(hidden_size, widths, group, bias=bias, **options)
        self.gate_proj, self.up_proj = gate_up.layers
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, group, bias=bias, **options
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Apply the block.

        Args:
            x: [..., hidden_size], all rows or, with ``sequence_parallel``, the local rows.
            residual: added to the output. It has the shape of ``x``, and the output gets its dtype.
            shard_sizes: number of rows of each rank.

        Returns:
            A tensor with the shape of ``x``.
        """
        # Faster than attribute access (``self.gate_proj``).
        modules: dict[str, Any] = direct_children(self)
        layers = [modules["gate_proj"], modules["up_proj"]]
        gate, up = column_parallel(x, layers, shard_sizes=shard_sizes)
        inner = self.activation(gate) * up
        y: torch.Tensor = modules["down_proj"](inner, residual=residual, shard_sizes=shard_sizes)
        return y


class ParallelAttention(nn.Module):
    """Grouped-query attention. Each rank computes the heads of its key-value groups.

    Equals this program on unsharded ``nn.Linear`` layers, with q, k and v split into heads::

        q, k, v = rotate(q_proj(x)), rotate(k_proj(x)), v_proj(x)
        o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal))

    Args:
        hidden_size: features of input and output.
        heads, kv_heads, head_dim: sizes of the unsharded attention, see `QKVParallelLinear`.
        group, options: see `tpkernels.nn`.
        bias: whether the query, key and value projections have biases.
        out_bias: whether the output projection has a bias.
        sequence_dim: the sequence dim, 0 (the default) or 1.

    Raises:
        ValueError: ``sequence_dim`` is not 0 or 1, or a size is invalid.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        group: GroupLike,
        *,
        bias: bool = False,
        out_bias: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        qkv = QKVParallelLinear(hidden_size, heads, kv_heads, head_dim, group, bias=bias, **options)
        self.heads = qkv.heads
        self.q_proj, self.k_proj, self.v_proj = qkv.layers
        self.o_proj = RowParallelLinear(
            heads * head_dim,
            hidden_size,
            group,
            bias=out_bias,
            in_sizes=self.q_proj.out_sizes,
            **options,
        )
        self.sequence_dim = self.o_proj.sequence_dim
        if self.sequence_dim not in (0, 1):
            raise ValueError(f"sequence_dim is {self.sequence_dim}; attention supports 0 and 1")

    def forward(
        self,
        x: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Apply the attention.

        Args:
            x: [sequence, batch, hidden_size], or [batch, sequence, hidden_size] with
                ``sequence_dim=1``. With ``sequence_parallel``, the local rows.
            rotary: (cos, sin) for all rows of the sequence, each [sequence, head_dim]. The second
                half of head_dim repeats the angles of the first half. Converted to the dtype of
                ``x``. None: no rotary embedding.
            attn_mask: mask for ``torch.nn.functional.scaled_dot_product_attention``. It must
                broadcast to [batch, local heads, sequence, sequence].
            is_causal: whether rows attend only to themselves and earlier rows. The default is True
                without ``attn_mask``, and False with it.
            residual: added to the output. It has the shape of ``x``, and the output gets its dtype.
            shard_sizes: number of rows of each rank.

        Returns:
            A tensor with the shape of ``x``.

        Raises:
            ValueError: ``attn_mask`` and ``is_causal=True`` were both passed.
        """
        if is_causal and attn_mask is not None:
            raise ValueError(
                "attn_mask and is_causal=True were both passed; pass one of them. To combine them, "
                "add the causal mask to attn_mask"
            )
        layers = [self.q_proj, self.k_proj, self.v_proj]
        outputs = column_parallel(x, layers, shard_sizes=shard_sizes)
        # [batch, heads, sequence, head_dim]
        order = (1, 2, 0, 3) if self.sequence_dim == 0 else (0, 2, 1, 3)
        shape = (-1, self.heads.head_dim)
        q, k, v = (y.unflatten(-1, shape).permute(order) for y in outputs)
        if rotary is not None:
            q, k = _rotate(q, rotary), _rotate(k, rotary)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            is_causal=attn_mask is None if is_causal is None else is_causal,
            enable_gqa=self.heads.heads != self.heads.kv_heads,
        )
        inverse = (2, 0, 1, 3) if self.sequence_dim == 0 else (0, 2, 1, 3)
        inner = out.permute(inverse).flatten(2)
        return self.o_proj(inner, residual=residual, shard_sizes=shard_sizes)


def _rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
