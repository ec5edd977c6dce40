"""Inductor graph pass that fuses collectives, and its registration."""

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
    compute_sizes_from_inputs,
    get_op,
)
from tpkernels.compile.layout import get_shape, sizes_equal, value
from tpkernels.compile.order import tie_ops
from tpkernels.torch_private import (
    REGISTERED_GROUPS,
    custom_graph_pass,
    inductor_config,
    is_erased,
    pattern_matcher,
)
from tpkernels.torch_private import c10d_functional as _c10d

# Runs before the inductor patterns, because these would turn a sum of matmuls into an addmm.
_SLOT = "post_grad_custom_pre_pass"

# Inductor pads matmuls on a GPU if that is faster in a local measurement. The pass would then see a
# matmul on some ranks, and a slice of a larger matmul on other ranks.
_CONFIG = {"shape_padding": False}

_FUSE: dict[object, Callable[[Collective], rewrites.Change]] = {
    _c10d.all_gather_into_tensor.default: rewrites.fuse_gather,
    _c10d.reduce_scatter_tensor.default: rewrites.fuse_reduction,
    _c10d.all_reduce.default: rewrites.fuse_reduction,
}
_COALESCED, _WRITES = "it moves several tensors in one call", "it writes into one of its arguments"
_LEFT_ALONE: dict[object, str] = {
    _c10d.all_gather_into_tensor_coalesced.default: _COALESCED,
    _c10d.reduce_scatter_tensor_coalesced.default: _COALESCED,
    _c10d.all_reduce_coalesced.default: _COALESCED,
    _c10d.all_reduce_.default: _WRITES,
    _c10d.all_gather_into_tensor_out.default: _WRITES,
}


@functools.cache
def _sources() -> bytes:
    """Return a digest of the source files that the rewritten graphs depend on."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted([*package.glob("compile/*.py"), *package.glob("ops/*.py")]):
        digest.update(path.read_bytes())
    return digest.digest()


class CollectiveFusion(custom_graph_pass.CustomGraphPass):
    """Compiler pass that ``tpkernels.compile.fuse_collectives`` creates and documents."""

    def __init__(self, only: Iterable[str] | None = None, norms: bool | None = None) -> None:
        self.report = FusionReport()
        self._only, self._norms = None if only is None else frozenset(only), norms
        self._entered: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveFusion:
        """Return self: ``torch.compile`` copies the inductor config, but copies share a report."""
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Options for ``torch.compile(model, options=...)``."""
        return {_SLOT: self, **_CONFIG}

    def __enter__(self) -> FusionReport:
        passes = self._append_to(getattr(inductor_config, _SLOT))
        patch = inductor_config.patch({_SLOT: passes, **_CONFIG})
        patch.__enter__()
        self._entered.append(patch)
        return self.report

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def uuid(self) -> bytes:
        """Return the contribution of the pass to the inductor cache key.

        It covers

        - the code of the pass and of the ops, because op schemas may change between versions;
        - the groups of the pass;
        - the sizes of all groups, because means are divided by them, and the graph of an all-reduce
          does not contain them;
        - the measured times that decide about collectives of CUDA tensors, or that they are being
          measured.
        """
        only = None if self._only is None else sorted(self._only)
        sizes = sorted((name, pg.size()) for pg, name in REGISTERED_GROUPS.items())
        times = sorted((name, repr(table)) for name, table in groups.timing_tables("cuda").items())
        tuned = groups.autotuned_groups()
        key = repr((only, self._norms, sizes, times, tuned)).encode()
        return hashlib.sha256(_sources() + key).digest()

    def __call__(self, graph: fx.Graph) -> None:
        backward = any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder"))
        name = f"graph {len(self.report.graphs)}, {'backward' if backward else 'forward'}"
        self.report.graphs.append(name)
        compute_sizes_from_inputs(graph)
        sites: dict[fx.Node, Site] = {}  # sites of the nodes that the pass inserts
        changed = self._fuse_matmuls(graph, name, sites)
        if changed:
            pattern_matcher.stable_topological_sort(graph)
        if self._norms is not False and self._fuse_norms(graph, name, sites):
            changed = True
            pattern_matcher.stable_topological_sort(graph)
        if tie_ops(graph) or changed:
            graph.lint()

    def _fuse_matmuls(self, graph: fx.Graph, name: str, sites: dict[fx.Node, Site]) -> bool:
        """Rewrite collectives, or report why not. Return whether the graph changed."""
        changed, writes = False, list(filter(pattern_matcher.is_mutation_op, graph.nodes))
        # Gathers of fp8 values are processed first: they may absorb the gather of their scales.
        for node in sorted(graph.nodes, key=_gathers_fp8, reverse=True):
            op = None if is_erased(node) else get_op(node)  # erased: already fused
            if op not in _FUSE and op not in _LEFT_ALONE:
                continue
            group = node.kwargs.get("group_name", node.args[-1])
            site = Site(name, node.name, str(group), _find_module(node))
            try:
                if op in _LEFT_ALONE:
                    raise Unsupported(_LEFT_ALONE[op])
                change = _FUSE[op](self._collective(node, group, writes))
            except Unsupported as reason:
                self.report.left_alone.append(LeftAlone(site, str(reason)))
            else:
                changed = True
                self._report(site, change)
                if change.node is not None:
                    sites[change.node] = site
        return changed

    def _fuse_norms(self, graph: fx.Graph, name: str, sites: dict[fx.Node, Site]) -> bool:
        """Fuse norms into the preceding all-reduces. Return whether the graph changed."""
        changed, report = False, self.report
        writes = list(filter(pattern_matcher.is_mutation_op, graph.nodes))
        for node in list(graph.nodes):
            group = rewrites.reduction_group(node)
            if group is None or not (self._norms or _is_on_gpu(node)):
                continue
            site = sites.get(node) or Site(name, node.name, str(group), _find_module(node))
            try:
                change = rewrites.fuse_norm(self._collective(node, group, writes))
            except Unsupported:  # the report already lists the collective
                continue
            if change is not None:
                changed = True
                report.rewritten = [entry for entry in report.rewritten if entry.site != site]
                report.left_alone = [entry for entry in report.left_alone if entry.site != site]
                self._report(site, change)
        return changed

    def _report(self, site: Site, change: rewrites.Change) -> None:
        self.report.rewritten.append(Rewritten(site, change.op, change.matmuls, change.detail))

    def _collective(self, node: fx.Node, group: object, writes: list[fx.Node]) -> Collective:
        """Return a collective of the graph, after the checks that all kinds share."""
        if not isinstance(group, str):
            raise Unsupported("its group has no name in the graph")
        if self._only is not None and group not in self._only:
            raise Unsupported(f"group '{group}' is not a selected group: {sorted(self._only)}")
        world = groups.get(group).world
        if world == 1:
            raise Unsupported(f"group '{group}' has one rank")
        x: torch.Tensor = value(node.args[0])
        if x.dtype not in dtypes.CODES and not _gathers_fp8(node):
            raise Unsupported(f"the ops do not support {dtypes.name(x.dtype)}")
        if x.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"the ops do not support tensors on {x.device}")
        if x.dim() == 0 or any(sizes_equal(size, 0) for size in get_shape(node)):
            raise Unsupported(f"its input has shape {list(x.shape)}, which is not a matrix")
        return Collective(node, group, world, writes)

    def _append_to(self, passes: custom_graph_pass.CustomGraphPassType) -> object:
        """Return the registered passes, followed by this pass."""
        if passes is None:
            return self
        if not hasattr(custom_graph_pass, "get_custom_graph_passes"):
            raise RuntimeError(
                f"inductor's {_SLOT} is already set to {passes}, and this version of torch "
                "supports one pass; call that pass and this pass from one function"
            )
        return (*custom_graph_pass.get_custom_graph_passes(passes), self)


def _is_on_gpu(node: fx.Node) -> bool:
    result = value(node)
    return isinstance(result, torch.Tensor) and result.device.type == "cuda"


def _gathers_fp8(node: fx.Node) -> bool:
    """Return whether a node gathers fp8 values, possibly as bytes."""
    gathers = node.target is _c10d.all_gather_into_tensor.default
    return gathers and value(node.args[0]).dtype in (*FP8, torch.uint8)


def _find_module(node: fx.Node) -> str:
    """Return the name of the module in which a node was traced, or "" if it was not recorded."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [path for path, _ in stack.values()][-1:]
    return re.sub(r"^L\['\w+'\]\.?", "", path[0]) if path else ""
