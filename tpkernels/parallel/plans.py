"""Plans: torch's parallel styles by module name, checked before torch applies them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn import check

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Model = TypeVar("Model", bound=nn.Module)


def apply(model: Model, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> Model:
    """``torch.distributed.tensor.parallel.parallelize_module`` with all checks made first. torch
    only warns about a name that matches nothing. See `tpkernels.parallelize` for the errors.
    """
    from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

    if not plan:
        raise ValueError("plan is empty; name at least one module")
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"plan[{pattern!r}] is a {type(style).__name__}, not a "
                "torch.distributed.tensor.parallel.ParallelStyle"
            )
        modules = list(matches(model, pattern))
        if not modules:
            names = [name for name, _ in model.named_modules() if name]
            close = difflib.get_close_matches(pattern, names, 3, 0.4)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ValueError(
                f"plan names {pattern!r}, which is not a module of {type(model).__name__}{hint}"
            )
        for name, module in modules:
            _check_module(name or type(model).__name__, module, style, mesh)
    parallelize_module(model, mesh, dict(plan))
    return model


def _check_module(name: str, module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Raises what torch would raise only after changing the modules before this one."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    from tpkernels.parallel import styles

    if isinstance(style, (styles.FusedColwiseParallel, styles.FusedRowwiseParallel)):
        try:
            style.check(module, mesh)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise type(error)(f"{name}: {error}") from None
        return
    if not isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel)):
        return  # Other styles split no parameters.
    takes_linears = not isinstance(style, SequenceParallel)
    if takes_linears and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise TypeError(
            f"{name} is a {type(module).__name__}; {type(style).__name__} takes an nn.Linear or an "
            "nn.Embedding"
        )
    for parameter_name, parameter in module.named_parameters():
        check.plain_parameter(parameter, f"{name}.{parameter_name}")


def matches(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that torch matches with ``pattern``: each part of a name may have wildcards."""
    atoms = pattern.split(".") if pattern else []
    for name, module in model.named_modules():
        parts = name.split(".") if name else []
        if len(parts) == len(atoms) and all(map(fnmatch, parts, atoms)):
            yield name, module
