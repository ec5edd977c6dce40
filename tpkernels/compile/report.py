"""Which collectives the pass rewrote, and why it left the others alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Site:
    """Where a functional collective was found."""

    graph: str  #: number and kind of the graph
    collective: str  #: the node's name in the graph
    group: str  #: name of the process group
    module: str  #: where the node was traced; "" if the compiler has not kept that

    def __str__(self) -> str:
        return f"group '{self.group}'" + (f", {self.module}" if self.module else "")


@dataclass(frozen=True)
class Rewritten:
    """A collective that is now part of an op."""

    site: Site
    op: str  #: name in ``torch.ops.tpkernels``
    matmuls: int  #: how many were fused with the collective
    detail: str  #: shapes and options, in words

    def __str__(self) -> str:
        return f"{self.op}: {self.detail} ({self.site})"


@dataclass(frozen=True)
class LeftAlone:
    """A collective that was not rewritten, and why."""

    site: Site
    reason: str

    def __str__(self) -> str:
        return f"{self.site.collective} left alone: {self.reason} ({self.site})"


@dataclass
class Report:
    """What the pass did with the graphs that it saw, in their order.

    A graph from inductor's cache is not compiled again and does not appear here. To see all graphs,
    set ``torch._inductor.config.force_disable_caches = True``.
    """

    graphs: list[str] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Return how many collectives became part of each op, by the op's name."""
        return dict(Counter(site.op for site in self.rewritten))

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph was compiled: nothing has run yet, or all came from inductor's cache "
                "(torch._inductor.config.force_disable_caches = True compiles them again)"
            )
        lines = [f"{len(self.rewritten)} rewritten, {len(self.left_alone)} left alone"]
        for graph in self.graphs:
            lines.append(graph)
            entries: list[Rewritten | LeftAlone] = [*self.rewritten, *self.left_alone]
            here = [f"  {entry}" for entry in entries if entry.site.graph == graph]
            lines += here or ["  no collectives"]
        return "\n".join(lines)
