"""Load ``tpkernels serve`` with many clients, and compare each answer with a sequential run.

    python -m benchmarks.serving --model DIR --tp 2 --clients 32 --seconds 60

First the idle server answers each prompt. Then many clients send prompts concurrently. Each answer
must be identical to the answer of the idle server. Prompts are chats of different lengths with
greedy answers; half of the answers are streams. In one of eight requests the client disconnects
after a few chunks. The model is a folder or a GGUF file. Memory is the VmRSS of each rank
(/proc/PID/status), every 10 s and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

QUESTIONS = (
    "What is gravity?",
    "Name the planets, one by one.",
    "Write a short poem about rain in a city at night.",
    "How do I cook rice? Give me the steps, and how much water I need for two people.",
    "Explain what a prime number is to a child. " * 4,
    "Summarise: " + "The fox ran over the hill and met another fox, who was tired. " * 12,
)
START_S = 300.0
HANG_UP_EVERY = 8


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `tpkernels serve`. Yields its process and URL."""
    command = [sys.executable, "-m", "tpkernels", "serve", "--model", args.model]
    options = ["--tp", str(args.tp), "--port", "0", "--name", "model", *args.option]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while True:
                log.seek(0)
                content = log.read()
                if match := re.search(r"on (http://\S+)", content):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start; its log: {content}")
                time.sleep(0.1)
            yield process, match[1]
            process.terminate()
            print("exit code of the server:", process.wait(60))
        finally:
            process.kill()
            process.wait()


def memory(driver: int) -> list[float]:
    """Return the VmRSS of each rank in MiB. The ranks are grandchildren of process ``driver``."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
        except OSError:
            continue
        match = re.search(r"VmRSS:\s+(\d+)", status)
        processes[int(folder.name)] = (int(fields[1]), int(match[1]) / 1024 if match else 0.0)
    servers = {pid for pid, (parent, _) in processes.items() if parent == driver}
    ranks = [pid for pid, (parent, _) in sorted(processes.items()) if parent in servers]
    return [round(processes[pid][1], 1) for pid in ranks]


class Clients:
    """Clients that send prompts and compare the answers."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._api = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0
        )
        self._args = args
        self._numbers = itertools.count()
        self.prompts = [f"{question} ({i})" for i in range(args.variants) for question in QUESTIONS]
        self.expected: dict[str, tuple[str, int]] = {}
        self.counts: Counter[str] = Counter()
        self.tokens = 0

    async def ask(
        self, prompt: str, stream: bool, max_chunks: int | None = None
    ) -> tuple[str, int]:
        """Return the answer and its number of tokens. Disconnects after ``max_chunks`` chunks."""
        fields: dict[str, Any] = {
            "model": "model",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._args.tokens,
        }
        if not stream:
            completion = await self._api.chat.completions.create(**fields)
            return completion.choices[0].message.content or "", completion.usage.completion_tokens
        content, tokens, num_chunks = "", 0, 0
        events = await self._api.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        async for event in events:
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            elif event.choices[0].delta.content:
                content += event.choices[0].delta.content
                num_chunks += 1
                if num_chunks == max_chunks:
                    await events.close()
                    break
        return content, tokens

    async def record_expected_answers(self) -> None:
        for prompt in self.prompts:
            self.expected[prompt] = await self.ask(prompt, stream=False)

    async def client(self, deadline: float, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            number, prompt = next(self._numbers), rng.choice(self.prompts)
            try:
                if number % HANG_UP_EVERY == 0:
                    await self.ask(prompt, stream=True, max_chunks=rng.randint(1, 5))
                    self.counts["client disconnected"] += 1
                    continue
                answer = await self.ask(prompt, stream=bool(number % 2))
            except openai.OpenAIError as error:
                self.counts[f"error: {type(error).__name__}"] += 1
                continue
            self.tokens += answer[1]
            same = answer == self.expected[prompt]
            self.counts["same answer as alone" if same else "different answer than alone"] += 1


async def load(clients: Clients, args: argparse.Namespace, driver: int) -> None:
    begin = time.monotonic()
    await clients.record_expected_answers()
    elapsed = time.monotonic() - begin
    tokens = sum(tokens for _, tokens in clients.expected.values())
    print(f"sequential: {len(clients.expected)} prompts, {tokens / elapsed:.1f} tokens/s")

    async def watch_memory() -> None:
        for second in range(10, int(args.seconds) + 1, 10):
            await asyncio.sleep(begin + second - time.monotonic())
            print(f"memory of the ranks after {second} s, MiB:", memory(driver))

    begin = time.monotonic()
    await asyncio.gather(
        watch_memory(), *(clients.client(begin + args.seconds, i) for i in range(args.clients))
    )
    elapsed = time.monotonic() - begin
    print(f"memory of the ranks after {elapsed:.0f} s, MiB:", memory(driver))
    print(f"{args.clients} clients for {elapsed:.1f} s: {clients.tokens / elapsed:.1f} tokens/s")
    for outcome, count in sorted(clients.counts.items()):
        print(f"{outcome}: {count}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or GGUF file")
    parser.add_argument("--tp", type=int, default=2, help="number of ranks (%(default)s)")
    parser.add_argument(
        "--clients", type=int, default=32, help="number of concurrent clients (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="duration of the load (%(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=32, help="maximum tokens per answer (%(default)s)"
    )
    parser.add_argument(
        "--variants", type=int, default=2, help="variants of each question (%(default)s)"
    )
    parser.add_argument(
        "--option", action="append", default=[], help="option of tpkernels serve; repeatable"
    )
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with server(args) as (process, url):
        clients = Clients(url, args)
        asyncio.run(load(clients, args, process.pid))
    errors = sum(count for outcome, count in clients.counts.items() if outcome.startswith("error"))
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
