"""Generation on several ranks gives the tokens of one process, and can end at any step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folders, hf_models, served
from tests.support.nn_reference import find_mismatch
from tests.support.ranked import on_ranks, record_calls
from tpkernels.integrations.transformers.generator import Completions, Generator
from tpkernels.integrations.transformers.loading import LoadOptions, load_model
from tpkernels.integrations.transformers.sampling import Sampling, TokenSequence, choose
from tpkernels.parallel import decoder

transformers = pytest.importorskip("transformers")

END = 2
PROMPTS = [[5, 6, 7, 8, 9], [10, 11]]
GREEDY = Sampling(max_new_tokens=12)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.9, top_k=9, top_p=0.9, seed=7)
PENALIZED = Sampling(max_new_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [hf_folders.folder(base, kind) for kind in ("llama", "mistral", "qwen2", "qwen3")]


def generate_in_one_process(path: Path, sampling: Sampling) -> list[list[int]]:
    """Generate with the plain model, without a cache, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    rows = []
    for number, prompt in enumerate(PROMPTS):
        sequence = TokenSequence(replace(sampling, seed=sampling.seed + number), prompt, [])
        for _ in range(sampling.max_new_tokens):
            ids = torch.tensor([[*prompt, *sequence.generated]])
            with torch.no_grad():
                logits = model(ids).logits[:, -1]
            sequence = sequence._replace(
                generated=[*sequence.generated, int(choose(logits, [sequence]))]
            )
        rows.append(until_end(sequence.generated))
    return rows


def until_end(tokens: Sequence[int]) -> list[int]:
    """Drop the tokens after the first end token, because they have no meaning."""
    return list(tokens[: tokens.index(END) + 1]) if END in tokens else list(tokens)


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_tokens_match_one_process(folder: Path) -> None:
    for sampling in (GREEDY, SAMPLED, PENALIZED):
        want = generate_in_one_process(folder, sampling)
        assert len({*want[0]}) > 2  # not a constant token
        steps = Generator(LoadOptions(folder)).generate(PROMPTS, sampling)
        assert [until_end(tokens) for tokens in zip(*steps, strict=True)] == want


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_blocks_end_in_one_op(folders: list[Path]) -> list[str]:
    """One op computes the all-reduce, the residual and the next norm, also after a failed forward.
    Long sequences are split over the ranks instead."""
    failures, fused_op = [], "matmul_all_reduce_rms_norm"
    for path in folders:
        single = transformers.AutoModelForCausalLM.from_pretrained(path)
        model = load_model(LoadOptions(path))
        for tokens in (1, 7, 30, 64):
            ids = hf_models.batch(tokens)["input_ids"]
            output = model.model.layers[1].self_attn.o_proj
            hook = output.register_forward_pre_hook(lambda *_: 1 // 0)
            with torch.no_grad():
                with pytest.raises(ZeroDivisionError):
                    model(ids[:, :1])
                hook.remove()
                with record_calls() as calls:
                    logits = model(ids, use_cache=False).logits
                mismatch = find_mismatch(logits, single(ids, use_cache=False).logits.double(), 1e-5)
            if mismatch is not None:
                failures.append(f"{path.name}, {tokens} tokens: {mismatch}")
            is_fused = tokens < decoder.PROMPT_ROWS * torch.distributed.get_world_size()
            # Ranks compare a digest of the ids.
            num_id_checks = int(torch.distributed.get_world_size() > 1)
            if is_fused and calls[1 + num_id_checks : -1] != [*[fused_op] * 3, "matmul_all_reduce"]:
                failures.append(f"{path.name}, {tokens} tokens: {calls}")
            if fused_op in calls and not is_fused:
                failures.append(f"{path.name}, {tokens} tokens, which are split: {calls}")
    return failures


@pytest.mark.thorough
@on_ranks(2)
def test_a_long_prompt(folder: Path) -> None:
    """A prompt that is split over the ranks gives the tokens of transformers."""
    prompt = [1 + number % (hf_models.VOCAB - 1) for number in range(60)]
    got = list(Generator(LoadOptions(folder)).generate([prompt], Sampling(max_new_tokens=3)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    want = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
    assert got == want[0, 60:].view(-1, 1).tolist()


@on_ranks(2)
def test_ranks_run_only_requested_steps(folder: Path) -> None:
    generator, forwards = Generator(LoadOptions(folder)), []
    generator._model.register_forward_pre_hook(lambda *_: forwards.append(1))
    steps: Any = generator.generate(PROMPTS, Sampling(max_new_tokens=40))
    list(islice(steps, 3))
    time.sleep(0.3)
    assert len(forwards) == 3
    steps.close()
    assert len(forwards) == 3


@pytest.mark.parametrize(
    ("prompts", "stop", "message"),
    [
        (
            [[3], [5, 47, 6, 99]],
            (),
            r"^token id 47 at position 1 of prompt 1 is out of range; expected 0 to 46 "
            r"\(vocabulary size 47\): the tokenizer belongs to a different model$",
        ),
        ([[-1]], (), "^token id -1 at position 0 of the prompt is out of range; expected 0 to 46"),
        ([[]], (), "^the prompt has no tokens; pass a text that is not empty$"),
        ([[5] * 60], (), "has 60 tokens, and max_new_tokens is 12; the model supports 64 tokens"),
        ([[5]], ("a", ""), "^stop string 1 is empty; it needs at least one character$"),
    ],
)
def test_invalid_prompts_are_refused(
    prompts: list[list[int]], stop: tuple[str, ...], message: str
) -> None:
    facts = {"positions": 64, "vocabulary": 47, "ends": [END]}
    with pytest.raises(ValueError, match=message):
        Completions(None, prompts, facts, GREEDY, stop)


def test_values_out_of_range_are_refused() -> None:
    for name, wrong in (
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("seed", -1),
    ):
        with pytest.raises(ValueError, match=f"{name} is {wrong}; it must be "):
            Sampling(**{name: wrong}).check()  # type: ignore[arg-type]
