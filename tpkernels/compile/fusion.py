"""The pass over inductor's graphs, and how it is enabled."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tpkernels import groups
from tpkernels.common import dtypes
from tpkernels.compile import FusionReport, LeftAlone, Rewritten, Site, rewrites
from tpkernels.compile.graph import (
    FP8,
    Collective,
    Unsupported,
    op_of,
    read_sizes_of_inputs,
)
from tpkernels.compile.layout import same, shape_of, value
from tpkernels.compile.order import tie_ops
from tpkernels.torch_private import (
    REGISTERED_GROUPS,
    custom_graph_pass,
    inductor_config,
    is_erased,
    pattern_matcher,
)
from tpkernels.torch_private import c10d_functional as _c10d

# Before inductor's own patterns, which would turn a sum of matmuls into an addmm.
_SLOT = "post_grad_custom_pre_pass"

# Inductor pads matmuls on a GPU if that is faster in a measurement of this rank alone. The pass
# would then find a matmul on some ranks, and a slice of a larger one on others.
_ALIKE = {"shape_padding": False}

_FUSE: dict[object, Callable[[Collective], rewrites.Change]] = {
    _c10d.all_gather_into_tensor.default: rewrites.fuse_gather,
    _c10d.reduce_scatter_tensor.default: rewrites.fuse_reduction,
    _c10d.all_reduce.default: rewrites.fuse_reduction,
}
_SEVERAL, _WRITES = "it moves several tensors in one call", "it writes into one of its arguments"
_LEFT_ALONE: dict[object, str] = {
    _c10d.all_gather_into_tensor_coalesced.default: _SEVERAL,
    _c10d.reduce_scatter_tensor_coalesced.default: _SEVERAL,
    _c10d.all_reduce_coalesced.default: _SEVERAL,
    _c10d.all_reduce_.default: _WRITES,
    _c10d.all_gather_into_tensor_out.default: _WRITES,
}


@functools.cache
def _sources() -> bytes:
    """Return the digest of the files that the rewritten graphs depend on."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*package.glob("compile/*.py"), *package.glob("ops/*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


class CollectiveFusion(custom_graph_pass.CustomGraphPass):
    """Created by ``tpkernels.compile.fuse_collectives``, which documents it."""

    def __init__(self, only: Iterable[str] | None = None, norms: bool | None = None) -> None:
        self.report = FusionReport()
        self._only, self._norms = None if only is None else frozenset(only), norms
        self._entered: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveFusion:
        """Return itself: ``torch.compile`` copies inductor's config, but there is one report."""
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Pass these to ``torch.compile(model, options=...)``."""
        return {_SLOT: self, **_ALIKE}

    def __enter__(self) -> FusionReport:
        passes = self._after(getattr(inductor_config, _SLOT))
        patch = inductor_config.patch({_SLOT: passes, **_ALIKE})
        patch.__enter__()
        self._entered.append(patch)
        return self.report

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def uuid(self) -> bytes:
        """Return the pass's part of inductor's cache key.

        It covers the code of the pass and of the ops, whose schemas may change between versions;
        the pass's groups; the sizes of all groups, by which means are divided and which the graph
        of an all-reduce does not show; and the measured times by which collectives of CUDA tensors
        are rewritten, or that they are being measured.
        """
        only = None if self._only is None else sorted(self._only)
        sizes = sorted((name, pg.size()) for pg, name in REGISTERED_GROUPS.items())
        times = sorted((name, repr(table)) for name, table in groups.known_times("cuda").items())
        tuned = groups.autotuned_groups()
        facts = repr((only, self._norms, sizes, times, tuned)).encode()
        return hashlib.sha256(_sources() + facts).digest()

    def __call__(self, graph: fx.Graph) -> None:
        backward = any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))
        name = f"graph {len(self.report.graphs)}, {'backward' if backward else 'forward'}"
        self.report.graphs.append(name)
        read_sizes_of_inputs(graph)
        sites: dict[fx.Node, Site] = {}  # of the nodes that the pass puts there
        changed = self._fuse_matmuls(graph, name, sites)
        if changed:
            pattern_matcher.stable_topological_sort(graph)
        if self._norms is not False and self._fuse_norms(graph, name, sites):
            changed = True
            pattern_matcher.stable_topological_sort(graph)
        if tie_ops(graph) or changed:
            graph.lint()

    def _fuse_matmuls(self, graph: fx.Graph, name: str, sites: dict[fx.Node, Site]) -> bool:
        """Rewrite collectives, or report why not. Return whether any was rewritten."""
        changed, writes = False, list(filter(pattern_matcher.is_mutation_op, graph.nodes))
        # Gathers of fp8 numbers come first: each may take up the gather of its scales.
        for node in sorted(graph.nodes, key=_moves_bytes, reverse=True):
            op = None if is_erased(node) else op_of(node)  # erased: part of another's op
            if op not in _FUSE and op not in _LEFT_ALONE:
                continue
            group = node.kwargs.get("group_name", node.args[-1])
            site = Site(name, node.name, str(group), _module_of(node))
            try:
                if op in _LEFT_ALONE:
                    raise Unsupported(_LEFT_ALONE[op])
                change = _FUSE[op](self._collective(node, group, writes))
            except Unsupported as reason:
                self.report.left_alone.append(LeftAlone(site, str(reason)))
            else:
                changed = True
                self._rewrote(site, change)
                if change.node is not None:
                    sites[change.node] = site
        return changed

    def _fuse_norms(self, graph: fx.Graph, name: str, sites: dict[fx.Node, Site]) -> bool:
        """Make norms part of the all-reduces in front of them. Return whether there are any."""
        changed, report = False, self.report
        writes = list(filter(pattern_matcher.is_mutation_op, graph.nodes))
        for node in list(graph.nodes):
            group = rewrites.reduction_group(node)
            if group is None or not (self._norms or _is_on_gpu(node)):
                continue
            site = sites.get(node) or Site(name, node.name, str(group), _module_of(node))
            try:
                change = rewrites.fuse_norm(self._collective(node, group, writes))
            except Unsupported:  # the collective alone is reported
                continue
            if change is not None:
                changed = True
                report.rewritten = [entry for entry in report.rewritten if entry.site != site]
                report.left_alone = [entry for entry in report.left_alone if entry.site != site]
                self._rewrote(site, change)
        return changed

    def _rewrote(self, site: Site, change: rewrites.Change) -> None:
        self.report.rewritten.append(Rewritten(site, change.op, change.matmuls, change.detail))

    def _collective(self, node: fx.Node, group: object, writes: list[fx.Node]) -> Collective:
        """Return a collective of the graph, after the checks that all kinds of it share."""
        if not isinstance(group, str):
            raise Unsupported("its group has no name in the graph")
        if self._only is not None and group not in self._only:
            raise Unsupported(f"group '{group}' is not a selected group: {sorted(self._only)}")
        world = groups.get(group).world
        if world == 1:
            raise Unsupported(f"group '{group}' has one rank")
        x: torch.Tensor = value(node.args[0])
        if x.dtype not in dtypes.CODES and not _moves_bytes(node):
            raise Unsupported(f"the ops do not support {dtypes.name(x.dtype)}")
        if x.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"the ops do not support tensors on {x.device}")
        if x.dim() == 0 or any(same(size, 0) for size in shape_of(node)):
            raise Unsupported(f"its input has shape {list(x.shape)}, which is not a matrix")
        return Collective(node, group, world, writes)

    def _after(self, present: custom_graph_pass.CustomGraphPassType) -> object:
        """Return the passes that are set already, then this one."""
        if present is None:
            return self
        if not hasattr(custom_graph_pass, "get_custom_graph_passes"):
            raise RuntimeError(
                f"inductor's {_SLOT} is already set to {present}, and this version of torch "
                "supports one pass; call that pass and this pass from one function"
            )
        return (*custom_graph_pass.get_custom_graph_passes(present), self)


def _is_on_gpu(node: fx.Node) -> bool:
    result = value(node)
    return isinstance(result, torch.Tensor) and result.device.type == "cuda"


def _moves_bytes(node: fx.Node) -> bool:
    """Return whether a node gathers fp8 numbers, perhaps as bytes."""
    gathers = node.target is _c10d.all_gather_into_tensor.default
    return gathers and value(node.args[0]).dtype in (*FP8, torch.uint8)


def _module_of(node: fx.Node) -> str:
    """Return the name of the module in which a node was traced; "" if the compiler has not kept
    it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [path for path, _ in stack.values()][-1:]
    return re.sub(r"^L\['\w+'\]\.?", "", path[0]) if path else ""
