"""What the pass did: each collective that it rewrote, and why it left the others alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Site:
    """A functional collective: the node in ``graph``, its group, and the module that it was traced
    in, where the compiler has kept that."""

    graph: str
    collective: str
    group: str
    module: str

    def __str__(self) -> str:
        return f"group '{self.group}'" + (f", {self.module}" if self.module else "")


@dataclass(frozen=True)
class Rewritten:
    """A collective that is now part of an op.

    ``op`` is its name in ``torch.ops.tpkernels``, ``products`` how many matmuls it took in,
    ``detail`` shapes and options in words.
    """

    site: Site
    op: str
    products: int
    detail: str

    def __str__(self) -> str:
        return f"{self.op}: {self.detail} ({self.site})"


@dataclass(frozen=True)
class LeftAlone:
    """A collective that stays as it is, and why."""

    site: Site
    reason: str

    def __str__(self) -> str:
        return f"{self.site.collective} left alone: {self.reason} ({self.site})"


@dataclass
class Report:
    """What the pass saw in the graphs that it was given, in their order.

    A graph that inductor takes from its cache is not compiled, and so not in here;
    ``torch._inductor.config.force_disable_caches = True`` shows all.
    """

    graphs: list[str] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many of each op were put in."""
        return dict(Counter(each.op for each in self.rewritten))

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph was compiled: nothing has run yet, or all came from inductor's cache "
                "(torch._inductor.config.force_disable_caches = True compiles them anew)"
            )
        lines = [f"{len(self.rewritten)} rewritten, {len(self.left_alone)} left alone"]
        for graph in self.graphs:
            lines.append(graph)
            every: list[Rewritten | LeftAlone] = [*self.rewritten, *self.left_alone]
            here = [f"  {each}" for each in every if each.site.graph == graph]
            lines += here or ["  no collectives"]
        return "\n".join(lines)
