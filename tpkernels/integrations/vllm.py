"""The vLLM plugin: which of vLLM's parts are replaced, and why.

vLLM calls `register` in each of its processes, as the entry point ``tpkernels`` of the group
``vllm.general_plugins``. ``TPKERNELS_VLLM`` says what is replaced:

    off          nothing
    all_reduce   on CPUs, the all-reduces of tensor parallelism, whole experts on each rank, and
                 how these exchange the tokens of data-parallel ranks
    fused        also each row-parallel layer: product and all-reduce as one op; and on CPUs the
                 products of other layers and of experts, by packed weights. On GPUs, where none of
                 it is confirmed, these layers and that exchange
    auto         what has been measured not to be slower than vLLM, the default

Each choice is reported once, with its reason. vLLM traces a compiled graph once, so the variable is
read when an engine starts.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass

import torch

from tpkernels.local.packed import native

VARIABLE = "TPKERNELS_VLLM"
MODES = ("off", "all_reduce", "fused", "auto")
TESTED = ("0.32",)

logger = logging.getLogger("vllm.tpkernels")  # has vLLM's handlers


@dataclass(frozen=True)
class Replacement:
    """What is replaced, and why; ``warn``: that is not what a user would expect."""

    mode: str
    reason: str
    warn: bool = False


def choose(requested: str, version: str, platform: str, fast_products: bool) -> Replacement:
    """Return what to replace in a vLLM of that version on "cpu", "cuda" or another platform.
    ``fast_products``: products by packed weights were measured to be faster. Raise ValueError if
    ``requested`` is none of `MODES`."""
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
        if fast_products:
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


def _has_fast_products() -> bool:
    """Return whether vLLM is known to be slower: with zentorch, which it prefers, it was not
    measured."""
    zentorch = hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return not zentorch and native(torch.bfloat16)


def register() -> None:
    """Replace vLLM's parts, before any model is made; may be called several times. Raise ValueError
    if ``TPKERNELS_VLLM`` has no valid value."""
    from vllm import __version__
    from vllm.platforms import current_platform

    platform = "cuda" if current_platform.is_cuda() else current_platform.device_type
    requested = os.environ.get(VARIABLE, "auto")
    choice = choose(requested, __version__, platform, _has_fast_products())
    level = logging.WARNING if choice.warn else logging.INFO
    logger.log(level, "tpkernels: %s (%s)", choice.mode, choice.reason)
    if choice.mode == "off":
        return
    parts = importlib.import_module("tpkernels.integrations.vllm_parts")
    if platform == "cpu":
        parts.replace_communicator(type(current_platform))
        parts.replace_experts(choice.mode != "fused")
    parts.replace_exchange()
    if choice.mode == "fused":
        parts.replace_row_parallel()
    if choice.mode == "fused" and platform == "cpu":
        parts.replace_products()
