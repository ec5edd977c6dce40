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
from tests.support import hf_models

NEW = 64  # tokens after each prompt
_NEW_ALONE = 16  # after the first prompt by itself
_PROMPTS_WITH_LOGITS = 2


def write(model: Any, prompts: torch.Tensor, path: Path) -> None:
    """Writes what an fp32 ``model`` makes of prompts [number, tokens]; turns it into fp64."""
    with torch.no_grad():
        tokens = generated(model, prompts)
        texts = tokens[:_PROMPTS_WITH_LOGITS]
        logits = model(texts).logits
        exact = model.double()(texts).logits
    # The same sums in another order, and those that are sent rounded once more.
    limit = 2 * hf_models.error(logits, exact, exact)
    reference = {"prompts": prompts, "tokens": tokens, "exact": exact, "limit": limit}
    torch.save(reference, path)


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
    off = hf_models.error(logits, want["exact"], want["exact"])
    if not off <= want["limit"]:
        failures.append(f"logits are off by {off:.3g}, allowed {want['limit']:.3g}")
    for count, new in ((len(want["prompts"]), NEW), (1, _NEW_ALONE)):
        prompts = want["prompts"][:count]
        tokens = generated(model, prompts, new)
        expected = want["tokens"][:count, : prompts.shape[1] + new]
        wrong = (tokens != expected).any(1).nonzero().flatten().tolist()
        if wrong:
            failures.append(f"other tokens after prompts {wrong} of {count}")
    return failures
