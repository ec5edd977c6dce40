"""The transformers Trainer and accelerate train a parallel model like the unsharded model."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import hf_models
from tests.support.ranked import find_unexpected_messages, on_ranks
from tpkernels import nn as tnn
from tpkernels.parallel import model_methods

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def _run_trainer(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run three training steps with clipping. Return the gradient norms and the weights."""
    import transformers

    arguments = transformers.TrainingArguments(
        tempfile.gettempdir(),  # output folder; the trainer does not save
        max_steps=3,
        per_device_train_batch_size=2,
        max_grad_norm=1.0,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    samples = [{"input_ids": torch.arange(i, i + 7)} for i in range(1, 9)]
    trainer = transformers.Trainer(
        copy.deepcopy(model),
        arguments,
        train_dataset=[{**sample, "labels": sample["input_ids"]} for sample in samples],
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return norms, tnn.full_state_dict(trainer.model)


@on_ranks(2, timeout=180)
def test_gradients_and_weights() -> list[str]:
    """Train with accelerate managing the ranks, as on GPUs, and with ranks that accelerate does not
    manage, as `tpkernels.spmd` starts them. Norms and weights match the unsharded model. If the
    model does not declare its ranks to accelerate, DDP is refused."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState, PartialState

    single, mesh = hf_models.make("llama"), hf_models.make_world_mesh()
    parallel = tpkernels.parallelize(copy.deepcopy(single), mesh)
    declared = tpkernels.parallelize(copy.deepcopy(single), mesh)
    model_methods.declare_ranks(declared, dist.get_world_size())
    saved_environment = {
        name: os.environ.pop(name)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        if name in os.environ
    }
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    launcher_environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    launcher_environment |= {
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    results = {}

    def forget_ranks() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()

    def train(model: Any, environment: dict[str, str]) -> Any:
        forget_ranks()
        with mock.patch.dict(os.environ, environment):
            return _run_trainer(model)

    try:
        norms, weights = train(single, {})
        results["spmd"] = train(parallel, {})
        failures = find_unexpected_messages(
            {
                "DistributedDataParallel would treat the pa": lambda: train(
                    parallel, launcher_environment
                )
            }
        )
        # The validation refuses CPUs.
        with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
            results["accelerate"] = train(declared, launcher_environment)
    finally:
        os.environ.update(saved_environment)
        forget_ranks()
    for name, (got_norms, got) in results.items():
        assert torch.allclose(torch.tensor(got_norms), torch.tensor(norms), rtol=1e-4), name
        for key, want in weights.items():
            assert torch.allclose(got[key], want, atol=1e-4), (name, key)
    return failures
