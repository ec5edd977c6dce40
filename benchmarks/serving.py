"""Load ``tpkernels serve`` with many clients, and compare each answer with a sequential run.

    python -m benchmarks.serving --model DIR --tp 2 --clients 32 --seconds 60

First each prompt is sent without other load. Then many clients send prompts for a while. An answer
must be identical to the answer that the prompt got without load. Prompts are chats of different
lengths with greedy answers; half of the answers are streams. In one request of eight the client
disconnects after a few chunks. The model is a folder or a GGUF file. Memory is the VmRSS of each
rank (/proc/PID/status), every 10 s and at the end.
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
    """A server of its own, and its address."""
    command = [sys.executable, "-m", "tpkernels", "serve", "--model", args.model]
    options = ["--tp", str(args.tp), "--port", "0", "--name", "model", *args.option]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while True:
                log.seek(0)
                text = log.read()
                if found := re.search(r"on (http://\S+)", text):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start; its log: {text}")
                time.sleep(0.1)
            yield process, found[1]
            process.terminate()
            print("exit code of the server:", process.wait(60))
        finally:
            process.kill()
            process.wait()


def memory(driver: int) -> list[float]:
    """VmRSS of each rank, in MiB: the grandchildren of the server's process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
        except OSError:
            continue
        found = re.search(r"VmRSS:\s+(\d+)", status)
        parents[int(folder.name)] = (int(fields[1]), int(found[1]) / 1024 if found else 0.0)
    servers = {pid for pid, (parent, _) in parents.items() if parent == driver}
    ranks = [pid for pid, (parent, _) in sorted(parents.items()) if parent in servers]
    return [round(parents[pid][1], 1) for pid in ranks]


class Clients:
    """Asks, and compares."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._api = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0
        )
        self._args = args
        self._numbers = itertools.count()
        self.prompts = [f"{question} ({i})" for i in range(args.variants) for question in QUESTIONS]
        self.alone: dict[str, tuple[str, int]] = {}
        self.counts: Counter[str] = Counter()
        self.tokens = 0

    async def ask(self, prompt: str, stream: bool, most: int | None = None) -> tuple[str, int]:
        """The answer and its tokens; with ``most``, hangs up after so many pieces of text."""
        fields: dict[str, Any] = {
            "model": "model",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._args.tokens,
        }
        if not stream:
            whole = await self._api.chat.completions.create(**fields)
            return whole.choices[0].message.content or "", whole.usage.completion_tokens
        text, tokens, pieces = "", 0, 0
        events = await self._api.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        async for event in events:
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            elif event.choices[0].delta.content:
                text += event.choices[0].delta.content
                pieces += 1
                if pieces == most:
                    await events.close()
                    break
        return text, tokens

    async def alone_first(self) -> None:
        for prompt in self.prompts:
            self.alone[prompt] = await self.ask(prompt, stream=False)

    async def client(self, deadline: float, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            number, prompt = next(self._numbers), rng.choice(self.prompts)
            try:
                if number % HANG_UP_EVERY == 0:
                    await self.ask(prompt, stream=True, most=rng.randint(1, 5))
                    self.counts["client disconnected"] += 1
                    continue
                answer = await self.ask(prompt, stream=bool(number % 2))
            except openai.OpenAIError as error:
                self.counts[f"error: {type(error).__name__}"] += 1
                continue
            self.tokens += answer[1]
            same = answer == self.alone[prompt]
            self.counts["same answer as alone" if same else "different answer than alone"] += 1


async def load(clients: Clients, args: argparse.Namespace, driver: int) -> None:
    begin = time.monotonic()
    await clients.alone_first()
    took = time.monotonic() - begin
    tokens = sum(tokens for _, tokens in clients.alone.values())
    print(f"sequential: {len(clients.alone)} prompts, {tokens / took:.1f} tokens/s")

    async def watch_memory() -> None:
        for second in range(10, int(args.seconds) + 1, 10):
            await asyncio.sleep(begin + second - time.monotonic())
            print(f"memory of the ranks after {second} s, MiB:", memory(driver))

    begin = time.monotonic()
    await asyncio.gather(
        watch_memory(), *(clients.client(begin + args.seconds, i) for i in range(args.clients))
    )
    took = time.monotonic() - begin
    print(f"memory of the ranks after {took:.0f} s, MiB:", memory(driver))
    print(f"{args.clients} clients for {took:.1f} s: {clients.tokens / took:.1f} tokens/s")
    for what, count in sorted(clients.counts.items()):
        print(f"{what}: {count}")


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
    wrong = sum(count for what, count in clients.counts.items() if what.startswith("error"))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
