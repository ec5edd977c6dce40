"""``tpkernels generate``: completions on several ranks, streams, JSON output, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import Result

import tpkernels.cli.generate as command
from tests.cli import test_cli
from tests.cli.test_shard import MLP
from tests.support import served
from tests.support.processes import python_output, torchrun
from tests.support.ranked import on_ranks
from tests.support.tiers import thorough
from tpkernels.integrations.transformers.sampling import Sampling
from tpkernels.launch.terminal import UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.folder(tmp_path_factory.mktemp("model"), length=64)


@pytest.fixture(scope="module")
def completion(folder: Path) -> str:
    """Return the completion of the prompt by transformers in one process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = served.tokenizer()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    new_tokens = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(new_tokens, skip_special_tokens=True))


@pytest.mark.thorough
def test_no_benchmark_is_imported_to_generate_text() -> None:
    code = (
        "import sys, tpkernels.cli.generate, tpkernels.integrations.transformers.generator\n"
        "print([name for name in sys.modules if name.startswith('tpkernels.bench')])"
    )
    assert python_output("-c", code) == "[]\n"


def invoke(folder: Path, *args: object) -> Result:
    return test_cli.invoke("generate", "--model", folder, *args)


def parse_output(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.thorough
def test_the_completion_equals_one_process(folder: Path, completion: str) -> None:
    """Generate on two ranks, with a second prompt in the same batch."""
    prompts = ("--prompt", PROMPT, "--prompt", "it was")
    output = parse_output(invoke(folder, *prompts, "--max-new-tokens", 8, "--tp", 2, "--json"))
    assert len(completion) > 5 and output["completions"][0]["text"] == completion
    assert output["completions"][0]["finish_reason"] == "length"
    assert output["ranks"] == 2 and output["dtype"] == "float32"
    assert 0 < output["seconds_to_first_token"] <= output["seconds"]
    int8 = ("--weights", "int8", "--max-new-tokens", 8, "--tp", 2, "--json")
    assert (
        len(parse_output(invoke(folder, "--prompt", PROMPT, *int8))["completions"][0]["tokens"])
        == 8
    )


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_expert_parallel_needs_an_moe_model(folder: Path, command: str) -> None:
    """The option reaches the ranks."""
    options = ("--prompt", PROMPT) if command == "generate" else ("--port", 0)
    result = test_cli.invoke(command, "--model", folder, *options, "--expert-parallel")
    assert result.exit_code == 2
    assert "the plan of LlamaForCausalLM does not contain any; leave it out" in result.stderr


@pytest.mark.thorough
def test_a_plan_in_a_file(folder: Path, completion: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(MLP))
    options = ("--prompt", PROMPT, "--max-new-tokens", 8, "--tp", 2, "--plan", file)
    result = invoke(folder, *options)
    assert result.exit_code == 0 and result.stdout.strip("\n") == completion, result.output


@pytest.mark.slow
def test_a_stream(folder: Path, completion: str) -> None:
    result = invoke(folder, "--prompt", PROMPT, "--max-new-tokens", 8, "--tp", 1, "--stream")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{completion}\n"
    assert "8 tokens on 1 rank" in result.stderr


@pytest.mark.slow
def test_under_torchrun(folder: Path) -> None:
    """All ranks sample with the seed of rank 0. The output contains it, and only rank 0 prints."""
    options = ["--prompt", PROMPT, "--max-new-tokens", "8", "--temperature", "1", "--json"]
    command = ("-m", "tpkernels", "generate", "--model", folder)
    launched = json.loads(torchrun(2, *command, *options))
    direct = parse_output(invoke(folder, *options, "--seed", launched["seed"], "--tp", 2))
    assert launched["completions"] == direct["completions"]


@on_ranks(2)
def test_ranks_of_torchrun_agree_on_tokenizer_and_seed() -> None:
    """If one rank cannot load the tokenizer, all ranks raise its error."""
    rank, (good, bad) = dist.get_rank(), (Future[str](), Future[str]())
    good.set_result("tokenizer")
    bad.set_exception(ValueError("tokenizer.json is missing"))
    sampling = Sampling(seed=5 + rank)
    with mock.patch.object(command, "under_torchrun", lambda: True):
        assert command._synchronize(good, sampling) == ("tokenizer", Sampling(seed=5))
        with pytest.raises(UsageError, match=r"rank 1: tokenizer\.json is missing"):
            command._synchronize(bad if rank == 1 else good, sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", -1), "temperature is -1.0"),
        (("--top-p", 0), "top_p is 0.0"),
        (("--max-new-tokens", 0), "max_new_tokens is 0"),
        (("--stream", "--json"), "--stream and --json cannot be combined"),
        (("--stream", "--prompt", "more"), "--stream supports one --prompt, and 2 were passed"),
        (("--dtype", "int4"), "int4"),
        (("--weights", "int4"), "--weights is 'int4' on device cpu; expected int8 on device cpu"),
        (("--tp", 0), "--nproc is 0"),
        (("--prompt", "the \udcff"), "--prompt 'the \\udcff' is not valid UTF-8"),
    ],
)
def test_refused_before_ranks_start(
    folder: Path, options: tuple[object, ...], message: str
) -> None:
    result = invoke(folder, "--prompt", PROMPT, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("", ("--prompt", "the " * 60), "the model supports 64 tokens in all"),
        ("", ("--prompt", ""), "has no tokens"),
        ("tokenizer", ("--prompt", PROMPT), "has no tokenizer; copy tokenizer.json"),
        ("chat", ("--prompt", "a", "--chat"), "template"),
        ("weights", ("--prompt", PROMPT), "safetensors"),
    ],
)
def test_refused_after_reading_the_model(
    tmp_path: Path, change: str, options: tuple[object, ...], message: str
) -> None:
    template = None if change == "chat" else served.TEMPLATE
    folder = served.folder(tmp_path, length=64, template=template)
    for file in {"tokenizer": "tokenizer*.json", "weights": "*.safetensors"}.get(change, "-"), "-":
        for path in folder.glob(file):
            path.unlink()
    result = invoke(folder, "--max-new-tokens", 8, "--tp", 1, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe(folder: Path) -> None:
    """The reader closes the pipe after one character, as `head` does."""
    command = [sys.executable, "-m", "tpkernels", "generate", "--model", str(folder), "--stream"]
    options = ["--prompt", PROMPT, "--max-new-tokens", "50"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) in (0, 1)  # 0: the pipe held all output
        assert process.stderr.read() == "" or process.returncode == 0


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", " does not exist; pass a local folder"),
        thorough("model.safetensors", "is damaged or truncated"),
        thorough("config.json", "config.json"),
    ],
)
def test_an_unusable_model_is_one_line(tmp_path: Path, file: str, message: str) -> None:
    folder = tmp_path / "none"
    if file:
        folder = served.folder(tmp_path / "model", length=64)
        (folder / file).write_bytes((folder / file).read_bytes()[:-9])
    result = invoke(folder, "--prompt", PROMPT, "--tp", 2)
    assert result.exit_code == 2, result.output
    [line] = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert message in line and "Traceback" not in result.stderr, result.stderr
