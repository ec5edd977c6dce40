"""Checks of modules that are about to be sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch._subclasses import FakeTensor

from tpkernels import dtypes
from tpkernels.local.packed import check_packable


def plain_parameter(value: torch.Tensor | None, what: str) -> None:
    """Check that a parameter can be split.

    Raises:
        NotImplementedError: it is quantised, packed or distributed, or no op takes its dtype.
    """
    if value is None:
        return
    data = value.data
    if not value.is_floating_point() or type(data) not in (torch.Tensor, FakeTensor):
        raise NotImplementedError(
            f"{what} is a {type(data).__name__} of {dtypes.name(value.dtype)}; a quantised, packed "
            "or distributed weight cannot be split: parallelise the plain floating-point model"
        )
    dtypes.check_supported(value.dtype, what)


def linear(module: nn.Module, name: str) -> nn.Linear:
    """Return ``module`` if it is a plain ``nn.Linear``.

    Raises:
        TypeError: it is something else, such as a parallel layer or an adapter.
        NotImplementedError: its weight is quantised or distributed.
    """
    if isinstance(module, nn.Linear):
        plain_parameter(module.weight, f"{name}.weight")
        plain_parameter(module.bias, f"{name}.bias")
    if type(module) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise TypeError(
            f"{name} is a {type(module).__module__}.{type(module).__qualname__}, not an nn.Linear"
        )
    assert isinstance(module, nn.Linear)
    return module


def linears(modules: Mapping[str, nn.Module]) -> None:
    """Check several modules as `linear` does."""
    for name, module in modules.items():
        linear(module, name)


def packable(model: nn.Module) -> None:
    """Check that the weights of a model's linear layers can be packed.

    Raises:
        NotImplementedError: they cannot, because of their device or dtype.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            check_packable(module.weight, f"{name}.weight")


def embedding(module: nn.Module, name: str) -> nn.Embedding:
    """Return ``module`` if it is a plain ``nn.Embedding``.

    Raises:
        TypeError: it is something else.
        NotImplementedError: its weight is quantised or distributed, or it has an option that a
            vocabulary-parallel embedding lacks.
    """
    if not isinstance(module, nn.Embedding) or type(module) is not nn.Embedding:
        raise TypeError(
            f"{name} is a {type(module).__module__}.{type(module).__qualname__}, not an "
            "nn.Embedding"
        )
    plain_parameter(module.weight, f"{name}.weight")
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise NotImplementedError(
            f"{name} has max_norm, sparse or scale_grad_by_freq, which a vocabulary-parallel "
            "embedding does not support"
        )
    return module
