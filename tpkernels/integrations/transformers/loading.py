"""A model on the ranks of the default process group, and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tpkernels.launch import fork_server
from tpkernels.launch.terminal import UsageError
from tpkernels.nn import pack_
from tpkernels.parallel.checkpoints import locate
from tpkernels.parallel.decoder import JOINED, join_norms


def preload() -> None:
    """Let ranks that this process starts find transformers imported, which takes each of them
    seconds otherwise. To be called before the first start."""
    fork_server(
        ["transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"]
    )


@contextmanager
def unusable_model() -> Iterator[None]:
    """Turn what loading raises for a model that cannot be used into a `UsageError`."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        raise UsageError(str(error)) from error


@unusable_model()
def load_model(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    ffn_only: bool = False,
    expert_parallel: bool = False,
    weights: Literal["int8"] | None = None,
    plan: dict[str, str] | None = None,
) -> Any:
    """Return the model at ``path``, split over all ranks for inference, as
    `tpkernels.from_pretrained` on ranks of a type of ``device``. Collective.

    Prompts go through the sequence-parallel ops, and single tokens through `matmul_all_reduce`. On
    CPUs the weights of the parallel layers are packed, unless they are float64, or in int8 by
    ``weights``.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tpkernels.from_pretrained(
        path,
        mesh,
        plan=plan,
        ffn_only=ffn_only,
        expert_parallel=expert_parallel,
        dtype=dtype,
        sequence_parallel=None if ffn_only else "prefill",
        pack=weights or False,
    )
    if device == "cpu":
        if not weights and model.dtype != torch.float64:
            pack_(model, drop=True)
        if not ffn_only and plan is None and model.config.model_type in JOINED:
            join_norms(model)
    return model


def end_tokens(model: Any) -> list[int]:
    """Return the tokens that end a text, by the model's generation configuration."""
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


@unusable_model()
def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Return the tokenizer in a model's folder or GGUF file. Raise `UsageError` if there is no such
    file or folder, or if it has no tokenizer that transformers can read."""
    from transformers import AutoTokenizer

    place = locate(path)
    try:
        if place.is_dir():
            return AutoTokenizer.from_pretrained(place)
        return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        missing = place.is_dir() and not any(
            place.glob("token*")
        )  # transformers' text is of slow ones
        why = "" if missing else f" that transformers can read: {error}"
        raise ValueError(
            f"{path} has no tokenizer{why}; copy tokenizer.json and tokenizer_config.json to the "
            "model's folder"
        ) from error
