"""``tpkernels verify``."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from typer import Option

from tpkernels.cli import options
from tpkernels.common.text import pluralize
from tpkernels.integrations.transformers import verification
from tpkernels.integrations.transformers.loading import LoadOptions, load_tokenizer, preload
from tpkernels.launch.terminal import (
    UsageError,
    check_workers,
    console,
    parse_dtype,
    require_at_least,
    table,
    warn_oversubscription,
)

_PROMPT_TOKENS = 64  # of the random prompt
_INVARIANT_PROMPT_TOKENS = 80  # more than the largest chunk


def verify(
    model: options.Checkpoint,
    tp: Annotated[str, Option("--tp", "--nproc", help="Numbers of ranks.")] = "1,2",
    prompt: Annotated[
        list[str] | None,
        Option(help="Text to run the model on. Repeatable. Default: random tokens."),
    ] = None,
    tokens: Annotated[
        int, Option(help="Number of tokens at the end of a prompt to decode one by one.")
    ] = 16,
    invariant: Annotated[
        bool,
        Option(
            "--invariant",
            help="Require bitwise identical logits on each number of ranks, by prefill, decoding, "
            "in chunks and in a batch.",
        ),
    ] = False,
    dtype: options.CheckpointDtype = None,
    weights: options.Weights = None,
    ffn_only: options.FfnOnly = False,
    expert_parallel: options.ExpertParallel = False,
    plan: options.PlanFile = None,
    threads: options.Threads = 1,
    timeout: Annotated[int, Option(help="Time limit for a number of ranks, in seconds.")] = 600,
    as_json: options.AsJson = False,
) -> None:
    """Verify that a sharded Hugging Face model computes what the unsharded model computes.

    Differences must be within the rounding errors of the unsharded model. Runs on CPUs.
    """
    worlds = options.numbers("tp", [tp])
    for world in worlds:
        check_workers(tp=world)
    check_workers(threads=threads)
    require_at_least(1, tokens=tokens, timeout=timeout)
    warn_oversubscription(max(worlds), threads)
    extra: dict[str, Any] = {"invariant": True} if invariant else {}
    load_options = LoadOptions(
        model,
        "cpu",
        None if dtype is None else parse_dtype(dtype),
        ffn_only,
        expert_parallel,
        options.checked_weights(weights, "cpu"),
        options.read_plan(plan),
        **extra,
    )
    texts = prompt or []

    def make_prompts(config: Any) -> list[torch.Tensor]:
        if not texts:
            generator = torch.Generator().manual_seed(0)
            vocabulary = config.get_text_config().vocab_size
            count = _INVARIANT_PROMPT_TOKENS if invariant else _PROMPT_TOKENS
            return [torch.randint(vocabulary, (1, count), generator=generator)]
        tokenizer = load_tokenizer(model)
        ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        for text, entry in zip(texts, ids, strict=True):
            if entry.numel() < 2:
                raise UsageError(f"--prompt {text!r} has fewer than 2 tokens; pass a longer text")
        return ids

    preload()
    start, screen, results = time.monotonic(), console(), []
    for result in verification.verify(
        load_options,
        worlds,
        make_prompts,
        invariant=invariant,
        decoded=tokens,
        threads=threads,
        timeout=timeout,
    ):
        results.append(result)
        if not as_json:
            _show(result, screen)
    passed = all(result.passed for result in results)
    seconds = time.monotonic() - start
    if as_json:
        rows = [asdict(result) | {"passed": result.passed} for result in results]
        output = {"model": model, "passed": passed, "seconds": seconds, "results": rows}
        typer.echo(json.dumps(output, indent=2))
    else:
        if weights is not None and not invariant:
            screen.print("Gradients were left out: int8 weights have none.")
        verdict = "PASS" if passed else "FAIL"
        screen.print(f"{verdict}: {pluralize(len(results), 'number')} of ranks, {seconds:.0f} s")
    if not passed:
        raise typer.Exit(1)


def _show(result: verification.Result, screen: Any) -> None:
    grid = table(f"{pluralize(result.ranks, 'rank')}", ("difference", "bound", "result"), "where")
    for check in result.checks:
        verdict = "[green]PASS[/]" if check.passed else "[bold red]FAIL[/]"
        grid.add_row(
            check.name,
            f"{check.difference:.2g}",
            f"{check.bound:.2g}",
            verdict,
            escape(check.where),
        )
    screen.print(grid)
    first = result.first_difference
    if first is not None:
        kind = "rounding" if first.passed else "more than rounding"
        screen.print(
            f"First layer that differs: {first.where} by {first.difference:.2g}, {kind}.",
            markup=False,
        )
