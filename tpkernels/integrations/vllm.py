"""The vLLM plugin: selects which components of vLLM are replaced.

vLLM calls `register` in each of its processes, through the entry point ``tpkernels`` of the group
``vllm.general_plugins``. ``TPKERNELS_VLLM`` selects the replacements:

    off          vLLM is unchanged
    all_reduce   on CPUs: the tensor-parallel all-reduce, expert-parallel experts, and the token
                 exchange of experts over data-parallel ranks
    fused        also row-parallel layers, as one op for matmul and all-reduce. On CPUs also the
                 matmuls of all further layers and of experts, with packed weights. On GPUs
                 (not confirmed) only row-parallel layers and the token exchange
    auto         default: replacements that were measured not to be slower than vLLM

Each selection is logged once, with its reason. vLLM traces a compiled graph once, so the variable
is read when an engine starts.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass

import torch

from tpkernels.local.packed import is_native

VARIABLE = "TPKERNELS_VLLM"
MODES = ("off", "all_reduce", "fused", "auto")
TESTED = ("0.32",)

logger = logging.getLogger("vllm.tpkernels")  # this name inherits the vLLM log handlers


@dataclass(frozen=True)
class Replacement:
    """Selected mode and its reason. ``warn``: the user would not expect this mode."""

    mode: str
    reason: str
    warn: bool = False


def choose(requested: str, version: str, platform: str, has_fast_matmul: bool) -> Replacement:
    """Select the mode for a version of vLLM on "cpu", "cuda" or a different platform.
    ``has_fast_matmul``: matmuls with packed weights were measured to be faster than in vLLM. Raise
    ValueError if ``requested`` is not in `MODES`."""
    if requested not in MODES:
        raise ValueError(f"{VARIABLE} is '{requested}'; it must be one of {', '.join(MODES)}")
    if requested == "off":
        return Replacement("off", f"{VARIABLE}=off")
    if ".".join(version.split(".")[:2]) not in TESTED:
        tested = ", ".join(f"{release}.*" for release in TESTED)
        return Replacement(
            "off", f"vLLM {version} is not supported; tested versions: {tested}", warn=True
        )
    if platform == "cpu" and requested == "auto":
        if has_fast_matmul:
            return Replacement("fused", "matmuls with packed weights are faster on this processor")
        return Replacement("all_reduce", "the matmuls of vLLM may be faster on this processor")
    if platform == "cpu":
        return Replacement(requested, f"{VARIABLE}={requested}")
    if platform == "cuda" and requested == "fused":
        return Replacement("fused", f"{VARIABLE}=fused; not measured on GPUs")
    reason = f"platform '{platform}' is not supported"
    if platform == "cuda":
        reason = "no mode was measured to be faster than vLLM on GPUs"
    return Replacement("off", reason, warn=requested != "auto")


def _has_fast_matmul() -> bool:
    """Return whether matmuls with packed weights are faster than in vLLM. False with zentorch: vLLM
    prefers it, and it was not measured."""
    zentorch = hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return not zentorch and is_native(torch.bfloat16)


def register() -> None:
    """Replace components of vLLM before any model is created. May be called several times. Raise
    ValueError if ``TPKERNELS_VLLM`` is invalid."""
    from vllm import __version__
    from vllm.platforms import current_platform

    platform = "cuda" if current_platform.is_cuda() else current_platform.device_type
    requested = os.environ.get(VARIABLE, "auto")
    choice = choose(requested, __version__, platform, _has_fast_matmul())
    level = logging.WARNING if choice.warn else logging.INFO
    logger.log(level, "tpkernels: %s (%s)", choice.mode, choice.reason)
    if choice.mode == "off":
        return
    replacements = importlib.import_module("tpkernels.integrations.vllm_parts")
    if platform == "cpu":
        replacements.replace_communicator(type(current_platform))
        replacements.replace_experts(choice.mode != "fused")
    replacements.replace_exchange()
    if choice.mode == "fused":
        replacements.replace_row_parallel()
    if choice.mode == "fused" and platform == "cpu":
        replacements.replace_matmuls()
