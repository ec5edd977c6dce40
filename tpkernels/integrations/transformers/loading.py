"""A model on the ranks of the default process group, and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tpkernels.launch import fork_server
from tpkernels.launch.terminal import UsageError
from tpkernels.nn import pack_
from tpkernels.parallel.checkpoints import GGUFCheckpoint, locate
from tpkernels.parallel.decoder import JOINED, join_norms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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


@dataclass(frozen=True)
class LoadOptions:
    """A model, and how ranks load it; see `tpkernels.from_pretrained`."""

    path: str | os.PathLike[str]
    device: str = "cpu"  #: type of the ranks' devices
    dtype: torch.dtype | None = None
    ffn_only: bool = False
    expert_parallel: bool = False
    weights: Literal["int8"] | None = None  #: of the parallel layers, on CPUs
    plan: dict[str, str] | None = None


@unusable_model()
def load_model(options: LoadOptions) -> PreTrainedModel:
    """Return the model, split over all ranks for inference. Collective.

    Prompts go through the sequence-parallel ops, and single tokens through `matmul_all_reduce`. On
    CPUs the weights of the parallel layers are packed, unless they are float64 or in int8.
    """
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tpkernels.from_pretrained(
        options.path,
        mesh,
        plan=options.plan,
        ffn_only=options.ffn_only,
        expert_parallel=options.expert_parallel,
        dtype=options.dtype,
        sequence_parallel=None if options.ffn_only else "prefill",
        pack=options.weights or False,
    )
    if options.device == "cpu":
        if not options.weights and model.dtype != torch.float64:
            pack_(model, drop=True)
        plain = not options.ffn_only and options.plan is None
        if plain and model.config.model_type in JOINED:
            join_norms(model)
    return model


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a text, by the model's generation configuration."""
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


@unusable_model()
def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a model's folder or GGUF file. Raise `UsageError` if there is no such
    file or folder, or if it has no tokenizer that transformers can read."""
    from transformers import AutoTokenizer

    place = locate(path)
    try:
        if place.is_dir():
            return AutoTokenizer.from_pretrained(place)
        return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if place.is_file():
            GGUFCheckpoint(place).check_not_split()
        # The text of transformers is about slow tokenizers.
        missing = place.is_dir() and not any(place.glob("token*"))
        why = "" if missing else f" that transformers can load: {error}"
        raise ValueError(
            f"{path} contains no tokenizer{why}; copy tokenizer.json and tokenizer_config.json "
            "to the model folder"
        ) from error
