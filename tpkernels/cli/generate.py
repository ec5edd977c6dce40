"""``tpkernels generate``."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from typer import Option

from tpkernels.cli import options
from tpkernels.common.text import pluralize
from tpkernels.integrations.transformers.generator import (
    Completions,
    Driver,
    Generator,
    prompt_tokens,
)
from tpkernels.integrations.transformers.loading import LoadOptions, load_tokenizer, preload
from tpkernels.integrations.transformers.sampling import Sampling
from tpkernels.launch import Ranks
from tpkernels.launch.session import (
    all_gather_objects,
    choose_backend,
    is_leader,
    resolve_device,
    under_torchrun,
    world_size,
)
from tpkernels.launch.terminal import UsageError, check_workers, parse_dtype, warn_oversubscription
from tpkernels.parallel.joint_work import PeerFailedError


def generate(
    model: options.Checkpoint,
    prompt: Annotated[
        list[str], Option(help="Text to continue. Repeatable: several prompts form a batch.")
    ],
    nproc: options.Ranks = None,
    chat: Annotated[
        bool, Option("--chat", help="Treat each prompt as a user message to a chat model.")
    ] = False,
    max_new_tokens: Annotated[int, Option(help="Maximum number of new tokens per prompt.")] = 128,
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[
        int, Option(help="Sample from the k most likely tokens; 0 means all tokens.")
    ] = 0,
    top_p: Annotated[
        float, Option(help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    min_p: Annotated[
        float,
        Option(help="Minimum probability of a token, as a fraction of the highest probability."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, Option(help="Repetition penalty for tokens in the prompt or the text; 1 is none.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, Option(help="Presence penalty for tokens in the generated text.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, Option(help="Frequency penalty, per occurrence of a token in the generated text.")
    ] = 0.0,
    seed: Annotated[int | None, Option(help="Seed of the sampling. Default: random.")] = None,
    stop: Annotated[
        list[str] | None, Option(help="Stop string; the text ends before it. Repeatable.")
    ] = None,
    stream: Annotated[
        bool, Option("--stream", help="Print the text while it is generated.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object at the end.")] = False,
    dtype: options.CheckpointDtype = None,
    ffn_only: options.FfnOnly = False,
    expert_parallel: options.ExpertParallel = False,
    plan: options.PlanFile = None,
    invariant: options.Invariant = False,
    weights: options.Weights = None,
    device: options.Device = None,
    threads: options.Threads = 1,
    timeout: Annotated[
        int,
        Option(
            help="Time limit of loading and of each token, in seconds. Under torchrun: timeout of "
            "the process group."
        ),
    ] = 300,
) -> None:
    """Continue prompts with a Hugging Face model on several ranks.

    The text does not depend on the number of ranks, unless two tokens are equally likely up to
    rounding. To run under torchrun: torchrun --nproc-per-node 2 -m -- tpkernels generate ...
    """
    world = world_size(nproc, 2)
    check_workers(threads=threads)
    device_type = resolve_device(device)
    if stream and as_json:
        raise UsageError("--stream and --json cannot be combined; leave one out")
    if stream and len(prompt) > 1:
        raise UsageError(f"--stream supports one --prompt, and {len(prompt)} were passed")
    for entry in prompt:
        try:
            entry.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"--prompt {entry[:60]!a} is not valid UTF-8") from error
    sampling = Sampling(
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        secrets.randbits(32) if seed is None else seed,
    )
    ranks_model = LoadOptions(
        model,
        device_type,
        None if dtype is None else parse_dtype(dtype),
        ffn_only,
        expert_parallel,
        options.checked_weights(weights, device_type),
        options.read_plan(plan),
        invariant=invariant,
    )
    try:
        sampling.check()
        if not under_torchrun():
            if device_type == "cpu":
                warn_oversubscription(world, threads)
            preload()
        with ThreadPoolExecutor(1) as loading:
            loaded = loading.submit(load_tokenizer, model)
            with _create_driver(
                world, ranks_model, choose_backend(world, device_type), threads, timeout
            ) as driver:
                tokenizer, sampling = _synchronize(loaded, sampling)
                prompts = [prompt_tokens(tokenizer, entry, chat=chat) for entry in prompt]
                facts = driver.call("describe", rank=0)
                completions = Completions(tokenizer, prompts, facts, sampling, stop or ())
                with closing(completions.run(driver)) as updates:
                    for increments in updates:
                        if stream and is_leader():
                            typer.echo(increments[0], nl=False)
                            sys.stdout.flush()
    except BrokenPipeError:  # an OSError, but not caused by invalid input
        raise
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    except PeerFailedError as error:
        typer.echo(f"FAIL: {error}", err=True)
        raise typer.Exit(1) from error
    if not is_leader():
        return
    if as_json:
        typer.echo(json.dumps({"ranks": world, **_json(completions, prompt)}, indent=2))
    else:
        _show(completions, prompt, world, stream)


def _synchronize(loaded: Future[Any], sampling: Sampling) -> tuple[Any, Sampling]:
    """Return the tokenizer and the sampling options. Under torchrun all ranks use the sampling
    options of rank 0, and all ranks fail if a rank cannot load the tokenizer."""
    if not under_torchrun():
        return loaded.result(), sampling
    tokenizer, failure = None, None
    try:
        tokenizer = loaded.result()
    except (OSError, ValueError, ImportError) as error:
        failure = f"rank {dist.get_rank()}: {error}"
    results = all_gather_objects((failure, sampling))
    for failure, _ in results:
        if failure is not None:
            raise UsageError(failure)
    return tokenizer, results[0][1]


class _TorchrunDriver:
    """Driver for a rank of torchrun. All ranks make the same calls on their local `Generator`."""

    def __init__(self, model: LoadOptions) -> None:
        self._generator = Generator(model)

    def call(self, method: str, *, rank: int) -> Any:
        return getattr(self._generator, method)()

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        return getattr(self._generator, method)(*args)


@contextmanager
def _create_driver(
    world: int, model: LoadOptions, backend: str, threads: int, timeout: float
) -> Iterator[Driver]:
    """Yield a driver for `Generator`: on ``world`` new ranks or, under torchrun, on the existing
    ranks. New ranks end with the block."""
    if not under_torchrun():
        with Ranks(
            world, Generator, model, backend=backend, threads=threads, timeout=timeout
        ) as ranks:
            yield ranks
        return
    torch.set_num_threads(threads)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield _TorchrunDriver(model)
    finally:
        dist.destroy_process_group()


def _json(completions: Completions, prompts: list[str]) -> dict[str, Any]:
    return {
        "dtype": completions.facts["dtype"],
        "seed": completions.sampling.seed if completions.sampling.temperature else None,
        "seconds_to_first_token": completions.times.first,
        "seconds": completions.times.end,
        "steps_per_second": completions.times.rate,
        "completions": [
            {
                "prompt": prompt,
                "prompt_tokens": len(tokens),
                "text": completion.text,
                "tokens": completion.tokens,
                "finish_reason": completion.finish_reason,
            }
            for prompt, tokens, completion in zip(
                prompts, completions.prompts, completions.completions, strict=True
            )
        ],
    }


def _show(completions: Completions, prompts: list[str], world: int, stream: bool) -> None:
    """Print texts that were not streamed to stdout, and the times to stderr."""
    if stream:
        typer.echo()
    for prompt, completion in zip(prompts, completions.completions, strict=True):
        if len(prompts) > 1:
            typer.echo(f"{prompt}:")
        if not stream:
            typer.echo(completion.text)
    times, tokens = (
        completions.times,
        sum(len(completion.tokens) for completion in completions.completions),
    )
    speed = "" if times.rate is None else f", then {times.rate:.1f} tokens/s for each prompt"
    typer.echo(
        f"{pluralize(tokens, 'token')} on {pluralize(world, 'rank')} in {times.end:.2f} s: first "
        f"token after {times.first:.2f} s{speed}",
        err=True,
    )
