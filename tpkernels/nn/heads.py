"""How attention heads are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.shards import shard_sizes


@dataclass(frozen=True)
class Heads:
    """Heads of an attention with grouped queries, over ``world`` ranks by whole key-value groups.

    Raises:
        ValueError: ``heads`` is no positive multiple of ``kv_heads``, or ``head_dim`` not positive.
    """

    heads: int
    kv_heads: int
    head_dim: int
    world: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads or self.head_dim < 1:
            raise ValueError(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}, each of "
                f"head_dim={self.head_dim} >= 1"
            )

    @property
    def query_group(self) -> int:
        """Features of the query heads of one key-value group."""
        return self.heads // self.kv_heads * self.head_dim

    @property
    def query_sizes(self) -> list[int]:
        """Query features of each rank."""
        return [groups * self.query_group for groups in shard_sizes(self.kv_heads, self.world)]

    @property
    def kv_sizes(self) -> list[int]:
        """Key, or value, features of each rank."""
        return [groups * self.head_dim for groups in shard_sizes(self.kv_heads, self.world)]
