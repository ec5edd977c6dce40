"""The two halves of a transformer block, with the parameter names of the Llama family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn.column import column_parallel
from tpkernels.nn.merged import MergedColumnParallelLinear, QKVParallelLinear
from tpkernels.nn.row import RowParallelLinear


class ParallelMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, gate and up sharing one gather.

    Args:
        hidden_size, intermediate_size: of the unsharded block.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: of all three layers.
        activation: of the gate.
        sequence_parallel: in and out are this rank's rows of the sequence, dim ``sequence_dim``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        group: GroupLike,
        *,
        bias: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        both = MergedColumnParallelLinear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )
        self.gate_proj, self.up_proj = both.layers
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """x [..., hidden_size] -> the same, plus ``residual``. ``shard_sizes``: rows of each rank
        along ``sequence_dim`` where they are not all equal."""
        parts: Any = self._modules  # what self.gate_proj looks up, but not in a small block's time
        layers = [parts["gate_proj"], parts["up_proj"]]
        gate, up = column_parallel(x, layers, shard_sizes=shard_sizes)
        inner = self.activation(gate) * up
        y: torch.Tensor = parts["down_proj"](inner, residual=residual, shard_sizes=shard_sizes)
        return y


Rotary = tuple[torch.Tensor, torch.Tensor]


class ParallelAttention(nn.Module):
    """Attention with grouped queries, each rank having the heads of its key-value groups.

    Args:
        hidden_size: of input and output.
        heads, kv_heads, head_dim: of the unsharded attention. Any numbers of heads: see
            `QKVParallelLinear`.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: of the query, key and value projections; out_bias: of the output's.
        sequence_parallel: in and out are this rank's rows of the sequence.
        sequence_dim: the dim of the sequence, 0 or 1, of x [.., .., hidden_size].
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
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if sequence_dim not in (0, 1):
            raise ValueError(f"sequence_dim is {sequence_dim}; attention takes 0 or 1")
        qkv = QKVParallelLinear(
            hidden_size,
            heads,
            kv_heads,
            head_dim,
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device=device,
            dtype=dtype,
        )
        self.heads, self.sequence_dim = qkv.heads, sequence_dim
        self.q_proj, self.k_proj, self.v_proj = qkv.layers
        self.o_proj = RowParallelLinear(
            heads * head_dim,
            hidden_size,
            group,
            bias=out_bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            in_sizes=self.heads.query_sizes,
            device=device,
            dtype=dtype,
        )

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
        """x [sequence, batch, hidden_size], or [batch, sequence, hidden_size] with
        ``sequence_dim=1`` -> the same, plus ``residual``.

        Args:
            rotary: (cos, sin) of all rows of the sequence, [sequence, head_dim], the angles of the
                first half of head_dim repeated in the second, taken in x's dtype; None: no rotary
                embedding.
            attn_mask: as ``torch.nn.functional.scaled_dot_product_attention`` takes it; it
                broadcasts to [batch, heads of this rank, sequence, sequence].
            is_causal: whether a row attends to no later one; by default without a mask, which then
                says all of it.
            shard_sizes: rows of each rank of the sequence where they are not all equal.

        Raises:
            ValueError: a mask together with ``is_causal=True``.
        """
        if is_causal and attn_mask is not None:
            raise ValueError("give attn_mask or is_causal=True; a mask has to say what is causal")
        layers = [self.q_proj, self.k_proj, self.v_proj]
        products = column_parallel(x, layers, shard_sizes=shard_sizes)
        # [batch, heads, sequence, head_dim]
        order = (1, 2, 0, 3) if self.sequence_dim == 0 else (0, 2, 1, 3)
        shape = (-1, self.heads.head_dim)
        q, k, v = (y.unflatten(-1, shape).permute(order) for y in products)
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
        back = (2, 0, 1, 3) if self.sequence_dim == 0 else (0, 2, 1, 3)
        inner = out.permute(back).flatten(2)
        return self.o_proj(inner, residual=residual, shard_sizes=shard_sizes)


def _rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
