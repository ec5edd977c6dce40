"""How attention heads are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tpkernels.shards import shard_sizes

QKV = ("q_proj", "k_proj", "v_proj")


class Projection(NamedTuple):
    """The split of a query, key or value projection."""

    sizes: list[int]  #: output features of each rank
    stand_in: int  #: zero features that a rank without heads returns


@dataclass(frozen=True)
class Heads:
    """Heads of grouped-query attention, split over ``world`` ranks by whole key-value groups.

    Raises:
        ValueError: ``heads`` is not a positive multiple of ``kv_heads``, or ``head_dim`` is not
            positive.
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
    def query_sizes(self) -> list[int]:
        """Return the query features of each rank."""
        return self._sizes(self._query_group)

    @property
    def projections(self) -> dict[str, Projection]:
        """Return the projections, by their names in `QKV`."""
        query = Projection(self.query_sizes, self._query_group)
        key_value = Projection(self._sizes(self.head_dim), self.head_dim)
        return dict(zip(QKV, (query, key_value, key_value), strict=True))

    @property
    def _query_group(self) -> int:
        """Return the features of the query heads of one key-value group."""
        return self.heads // self.kv_heads * self.head_dim

    def _sizes(self, features: int) -> list[int]:
        """Return the features of each rank, with ``features`` in a key-value group."""
        return [groups * features for groups in shard_sizes(self.kv_heads, self.world)]
