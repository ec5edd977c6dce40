"""Inference that is bitwise identical on any number of ranks and in any batch.

With ``numerics="invariant"``, a value may depend only on the row that it belongs to, not on other
rows or on the number of ranks. The parts of a model and why they qualify:

    projections     packed weights; row-parallel ones are summed by a tree (csrc/host/sum_tree.h)
    attention       `tpkernels.parallel.attention`: keys in order, in fixed blocks
    experts         complete on each rank; `moe_combine` adds them in slot order
    embedding       exactly one rank has a nonzero value
    norms           torch and this package reduce each row on its own
    activations     torch applies a different function to the last elements of a tensor that do not
                    fill a vector, and to those of each thread: see `apply_padded`
    routers         their weights are replicated and plain: see `_RouterMode`

`check` rejects models with any other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tpkernels.local.matmul import allocating_matmul
from tpkernels.local.packed import pack
from tpkernels.nn.moe import MoE
from tpkernels.torch_private import direct_children, direct_parameters, tensor_version

# Elements per vector of all vector units and dtypes, including unrolling. Below `_GRAIN` elements
# torch uses no threads.
_VECTOR, _GRAIN = 64, 32768
# Elementwise functions of torch that round the last elements differently, measured with torch 2.13
# and AVX2: fp32, bf16 and fp16.
_UNARY = frozenset({torch.sigmoid, F.sigmoid, torch.Tensor.sigmoid, F.silu, F.gelu, F.softplus})

_CASTS = frozenset({torch.Tensor.type, torch.Tensor.to, torch.Tensor.float})


def apply_padded(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to x [..., width], so that each element is in a full vector.

    Returns a tensor in the shape of x.
    """
    width = x.shape[-1]
    threaded = x.numel() >= _GRAIN and torch.get_num_threads() > 1
    if width % _VECTOR == 0 and not threaded:
        return function(x)
    rows = F.pad(x.reshape(prod(x.shape[:-1]), width), (0, -width % _VECTOR))
    blocks = rows.split(max(1, (_GRAIN - 1) // rows.shape[1]))
    return torch.cat([function(block) for block in blocks])[:, :width].reshape(x.shape)


class PaddedActivation(nn.Module):
    """An activation function in which every element is in a full vector."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply_padded(self.activation, x)


def pad_activations(parent: nn.Module, projections: Collection[str | None]) -> None:
    """Replace the activations of an MLP. ``projections`` are the names of its linear layers."""
    for name in _activation_names(parent, projections):
        setattr(parent, name, PaddedActivation(getattr(parent, name)))


def _activation_names(parent: nn.Module, projections: Collection[str | None]) -> list[str]:
    """Return the names of the children that are activations: they have no state."""
    return [
        name
        for name, child in direct_children(parent).items()
        if child is not None
        and name not in projections
        and not isinstance(child, nn.Dropout)
        and "Norm" not in type(child).__name__
        and not any(True for _ in child.parameters())
        and not any(True for _ in child.buffers())
    ]


class _RouterMode(TorchFunctionMode):
    """Multiplies by replicated plain weights with packed copies, and pads elementwise functions.

    Casts of parameters are cached, because some routers cast their weight to float32 in each call.
    """

    def __init__(self) -> None:
        super().__init__()
        #: By operation and id of the source: source, its state, and result.
        self._derived: dict[object, tuple[torch.Tensor, object, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in _CASTS and isinstance(args[0], nn.Parameter) and not torch.is_grad_enabled():
            key = func, args[1:], tuple(kwargs.items())
            return self._derive(key, args[0], lambda: func(*args, **kwargs))
        if func in _UNARY and isinstance(args[0], torch.Tensor):
            return apply_padded(partial(func, **kwargs), args[0])
        return func(*args, **kwargs)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run ``F.linear``, with its argument names."""
        is_cast = any(result is weight for _, _, result in self._derived.values())
        if is_cast or isinstance(weight, nn.Parameter):
            packed = self._derive("pack", weight, lambda: pack(weight.detach().t()))
        else:  # a temporary tensor
            packed = pack(weight.detach().t())
        y = allocating_matmul(input.reshape(-1, input.shape[-1]), packed, bias)
        return y.view(*input.shape[:-1], -1)

    def _derive(
        self, operation: object, source: torch.Tensor, derive: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of an operation, computed again only if the source has changed."""
        key = operation, id(source)
        state = tensor_version(source), source.data_ptr(), source.dtype
        cached = self._derived.get(key)
        if cached is None or cached[0] is not source or cached[1] != state:
            cached = self._derived[key] = source, state, derive()
        return cached[2]

    def __deepcopy__(self, memo: object) -> _RouterMode:
        return _RouterMode()

    def __reduce__(self) -> tuple[type[_RouterMode], tuple[()]]:
        return _RouterMode, ()


def make_router_invariant(parent: nn.Module) -> None:
    """Run the forward of the parent of experts, with its router, under a `_RouterMode`."""
    parent.forward = partial(_run_router, parent, _RouterMode())


def _run_router(parent: nn.Module, mode: _RouterMode, *args: Any, **options: Any) -> Any:
    with mode:
        return type(parent).forward(parent, *args, **options)


def check_block(
    name: str, module: nn.Module, projections: Collection[str | None], head_unit: int | None
) -> None:
    """Raise NotImplementedError if a parent of projections may not be invariant.

    Args:
        name: name of the module in the model.
        projections: names of its linear layers.
        head_unit: ``k_unit`` of an attention that is split by heads, otherwise None.
    """
    is_attention = "Attention" in type(module).__name__  # not split by heads
    if head_unit is None and not is_attention and not _activation_names(module, projections):
        raise _refuse(name, "its activation function is not a module")
    if head_unit is not None and head_unit % 2:
        raise _refuse(name, f"its head size {head_unit} is odd")


def check(
    model: nn.Module, replaced: Collection[nn.Module], experts: Collection[nn.Module]
) -> None:
    """Raise NotImplementedError for a module that may not be invariant.

    Args:
        model: the unsharded model.
        replaced: modules that parallel layers replace, and their parents.
        experts: experts of the plan.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise _refuse(type(model).__name__, "its attention does not use the attention interface")
    allowed = {*replaced}
    for module in model.modules():
        if experts and {*module.children()} & {*experts}:
            allowed |= {*module.modules()}
    for name, module in model.named_modules():
        parameters = [p for p in direct_parameters(module).values() if p is not None]
        if any(
            p.device.type not in ("cpu", "meta") or p.dtype == torch.float64 for p in parameters
        ):
            raise _refuse(name, "it has float64 weights or is not on the CPU")
        if _uses_length(module):
            raise _refuse(name, "its frequencies depend on the longest sequence of the batch")
        known = "Norm" in type(module).__name__ or isinstance(module, (nn.Embedding, MoE))
        if parameters and module not in allowed and not known:
            raise _refuse(
                name, f"a {type(module).__name__} may round differently in a larger batch"
            )


def _uses_length(module: nn.Module) -> bool:
    """Return whether a rotary embedding depends on the lengths of all sequences in the batch."""
    rope_type = getattr(module, "rope_type", None)
    types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind in ("dynamic", "longrope") for kind in types)


def _refuse(name: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f'numerics="invariant" does not support {name}: {reason}')
