"""What loading needs of a checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from tpkernels.parallel.checkpoints.stored import Stored


class Checkpoint(Protocol):
    """A model's configuration and weights in files."""

    path: Path  #: of the file or folder

    def config(self) -> Any:
        """The ``PretrainedConfig`` of transformers."""

    def generation_config(self) -> Any:
        """The ``GenerationConfig`` of transformers; None: there is none of its own."""

    def dtype(self) -> torch.dtype:
        """The dtype of the weights, for a config that names none."""

    def tensors(self, model: nn.Module) -> Mapping[str, Stored]:
        """The tensors by the names that ``model`` has for them.

        Args:
            model: the unsharded model, on the meta device.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged or truncated.
            NotImplementedError: a dtype is not supported.
        """


def package(name: str) -> ModuleType:
    """An optional package.

    Raises:
        ImportError: it is not installed; the message has the remedy.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"loading a model needs {name}, which cannot be imported ({error}); "
            "pip install 'tpkernels[models]'"
        ) from error
