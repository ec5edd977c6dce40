"""What transformers computes with a whole model in one process: the logits and tokens that a
parallel one must have, and how far its logits may be off.

One process computes them, once for all numbers of ranks. If each rank did, four would hold four
whole models, and they would come to their next collective further apart than its timeout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import tpkernels

NEW = 64  # tokens after each prompt
_NEW_ALONE = 16  # after the first prompt by itself
_PROMPTS_WITH_LOGITS = 2
# Allowed errors, mean and largest, in terms of transformers' own. The same sums in another order
# and with partial sums rounded had 1.0 and 1.0 times its errors for SmolLM2 on one rank, 1.2 and
# 1.9 on two, 1.4 and 2.2 on three, 1.2 and 1.4 on four; the largest is that of one position.
_TIMES = 2, 3


def write(model: Any, prompts: torch.Tensor, path: Path) -> None:
    """Writes what an fp32 ``model`` makes of prompts [number, tokens]; turns it into fp64."""
    with torch.no_grad():
        tokens = generated(model, prompts)
        texts = tokens[:_PROMPTS_WITH_LOGITS]
        logits = model(texts).logits
        exact = model.double()(texts).logits
    reference = {"prompts": prompts, "tokens": tokens, "exact": exact}
    torch.save(reference | {"errors": _errors(logits, exact)}, path)


def _errors(logits: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The root of the mean square, and the largest, relative to the largest logit."""
    off = (logits.double() - exact) / exact.abs().max()
    return float(off.square().mean().sqrt()), float(off.abs().max())


def generated(model: Any, prompts: torch.Tensor, new: int = NEW) -> torch.Tensor:
    """The prompts and the ``new`` tokens after each, greedily."""
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=new,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )


def differences(path: str, reference: str, mesh: DeviceMesh, options: dict[str, Any]) -> list[str]:
    """What is wrong with a model loaded from ``path`` in fp32: its logits at every position of two
    texts, or its tokens after every prompt, at once and after the first prompt alone."""
    want = torch.load(reference, mmap=True)
    model = tpkernels.from_pretrained(path, mesh, dtype=torch.float32, **options)
    failures = []
    with torch.no_grad():
        logits = model(want["tokens"][:_PROMPTS_WITH_LOGITS]).logits
    if logits.shape != want["exact"].shape:
        return [f"logits have shape {list(logits.shape)}"]
    pairs = zip(_errors(logits, want["exact"]), want["errors"], _TIMES, strict=True)
    for off, single, times in pairs:
        if not off <= times * single:
            failures.append(f"logits are off by {off:.3g}; transformers by {single:.3g}")
    for count, new in ((len(want["prompts"]), NEW), (1, _NEW_ALONE)):
        prompts = want["prompts"][:count]
        tokens = generated(model, prompts, new)
        expected = want["tokens"][:count, : prompts.shape[1] + new]
        wrong = (tokens != expected).any(1).nonzero().flatten().tolist()
        if wrong:
            failures.append(f"other tokens after prompts {wrong} of {count}")
    return failures
