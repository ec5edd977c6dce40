"""Load a model on the ranks of the default process group, and its tokenizer."""

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
from tpkernels.parallel.decoder import JOINABLE_MODEL_TYPES, join_norms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def preload() -> None:
    """Import transformers in the fork server, which saves each new rank some seconds. Call it
    before the first start."""
    fork_server(
        ["transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"]
    )


@contextmanager
def unusable_model() -> Iterator[None]:
    """Convert errors from loading an unusable model into `UsageError`."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class LoadOptions:
    """Options of `tpkernels.from_pretrained` for a model on several ranks."""

    path: str | os.PathLike[str]
    device: str = "cpu"  #: device type of the ranks
    dtype: torch.dtype | None = None
    ffn_only: bool = False
    expert_parallel: bool = False
    weights: Literal["int8"] | None = None  #: weight dtype of the parallel layers, on CPUs
    plan: dict[str, str] | None = None
    invariant: bool = False  #: the same bits on any number of ranks and in any batch


@unusable_model()
def load_model(options: LoadOptions) -> PreTrainedModel:
    """Return the model, split over all ranks for inference. Collective.

    Prompts use the sequence-parallel ops, single tokens `matmul_all_reduce`. On CPUs the weights of
    the parallel layers are packed, unless they are float64 or already packed as int8.
    """
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tpkernels.from_pretrained(
        options.path,
        mesh,
        plan=options.plan,
        ffn_only=options.ffn_only,
        expert_parallel=options.expert_parallel,
        dtype=options.dtype,
        sequence_parallel=None if options.ffn_only or options.invariant else "prefill",
        pack=options.weights or False,
        numerics="invariant" if options.invariant else "ordered",
    )
    if options.device == "cpu":
        if not (options.weights or options.invariant) and model.dtype != torch.float64:
            pack_(model, drop=True)
        plain = not options.ffn_only and options.plan is None
        if plain and model.config.model_type in JOINABLE_MODEL_TYPES:
            join_norms(model)
    return model


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the end tokens in the generation configuration of the model."""
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


@unusable_model()
def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a model folder or GGUF file. Raise `UsageError` if the path does not
    exist, or if transformers cannot load a tokenizer from it."""
    from transformers import AutoTokenizer

    location = locate(path)
    try:
        if location.is_dir():
            return AutoTokenizer.from_pretrained(location)
        return AutoTokenizer.from_pretrained(location.parent, gguf_file=location.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if location.is_file():
            GGUFCheckpoint(location).check_not_split()
        # The transformers message is misleading: it mentions slow tokenizers.
        missing = location.is_dir() and not any(location.glob("token*"))
        reason = "" if missing else f" that transformers can load: {error}"
        raise ValueError(
            f"{path} contains no tokenizer{reason}; copy tokenizer.json and tokenizer_config.json "
            "to the model folder"
        ) from error
