"""Requests into transformers' manager of continuous batching, and text out of it. Rank 0 only.

Problem: the manager generates in a thread of its own; HTTP requests live in an event loop. A client
may hang up at any moment, read slowly, or never; the generation may fail or be stopped.

Sync: the thread hands its outputs to the loop (`outputs.ToLoop`). All else here runs in the loop,
so no state is shared. An output has all tokens so far, and of each request only the latest is kept:
a client that reads slowly costs no memory.

Invariant: a request is in `_live` until its last output has come, or it was cancelled. An output of
a request that is not in `_live` cancels it once more: transformers forgets a cancellation that
overtakes its request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tpkernels.integrations.transformers.serving.metrics import Metrics
from tpkernels.integrations.transformers.serving.outputs import ToLoop
from tpkernels.integrations.transformers.serving.replies import ApiError, Usage
from tpkernels.integrations.transformers.serving.requests import Sampling
from tpkernels.integrations.transformers.text import TextStream


@dataclass(frozen=True)
class Piece:
    """More text of an answer. ``finish``: why it has ended, "stop" or "length"."""

    text: str
    usage: Usage
    finish: str | None


class Batcher:
    """Generates text for requests.

    Args:
        manager: of transformers, not started yet.
        tokenizer: a fast one of transformers.
        end_tokens: tokens that end an answer.
        most: requests at a time, those that wait included.
        timeout: seconds for an answer.
    """

    def __init__(
        self,
        manager: Any,
        tokenizer: Any,
        *,
        end_tokens: Collection[int],
        most: int,
        timeout: float,
        metrics: Metrics,
    ) -> None:
        self._manager, self._tokenizer, self._end_tokens = manager, tokenizer, end_tokens
        self._most, self._timeout, self._metrics = most, timeout, metrics
        self._live: dict[str, Answer] = {}
        self._reported: str | None = None
        self._names = map("request-{}".format, itertools.count())
        metrics.watch(running=lambda: self._count(True), waiting=lambda: self._count(False))

    def start(self) -> None:
        """Start the generation; called in the event loop."""
        self._manager.output_router = ToLoop(self.receive)
        self._manager.start()

    def failure(self) -> str | None:
        """Return why no text can be generated; None as long as it can."""
        error = self._manager.background_thread_status.fatal_error
        if error is not None:
            return f"{type(error).__name__}: {error}"
        return None if self._manager.is_running() else "the generation has ended"

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Answer:
        """Add a request.

        Raises:
            ApiError: there are too many, or none is taken any more.
        """
        if len(self._live) >= self._most:
            raise ApiError(429, f"the server has {self._most} requests already; try again later")
        name = next(self._names)
        answer = Answer(self, name, len(prompt), sampling)
        added = None
        if self.failure() is None:
            added = self._manager.add_request(
                list(prompt),
                request_id=name,
                max_new_tokens=sampling.max_tokens,
                streaming=True,
                eos_token_id=list(self._end_tokens),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
        if added is None:
            raise ApiError(503, "the server is stopping; it takes no more requests")
        self._live[name] = answer
        self._metrics.prompt_tokens.inc(len(prompt))
        return answer

    def fail(self, why: str) -> None:
        """End all answers with an error."""
        for answer in list(self._live.values()):
            answer.end(why)
        self._live.clear()

    def receive(self, outputs: Sequence[Any]) -> None:
        """Take outputs of the manager."""
        for output in outputs:
            answer = self._live.get(output.request_id)
            if answer is not None:
                answer.receive(output)
                if output.is_finished():
                    del self._live[output.request_id]
            elif not output.is_finished():
                self._manager.cancel_request(output.request_id)

    def report(self, error: str) -> None:
        """Logs why requests have failed, once if it is the same for all."""
        if error != self._reported:
            logging.getLogger("uvicorn.error").error("requests have failed: %s", error)
        self._reported = error

    def text_of(self, sampling: Sampling) -> TextStream:
        return TextStream(self._tokenizer, sampling.stop, self._end_tokens)

    def forget(self, name: str) -> None:
        """Cancels a request unless it has ended."""
        if self._live.pop(name, None) is not None:
            self._manager.cancel_request(name)

    def _count(self, begun: bool) -> int:
        return sum(bool(answer.tokens) is begun for answer in self._live.values())

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    @property
    def timeout(self) -> float:
        """Return the seconds for an answer."""
        return self._timeout


class Answer:
    """What is generated for one request. Close it, whatever happens."""

    def __init__(self, batcher: Batcher, name: str, prompt: int, sampling: Sampling) -> None:
        self._batcher, self._name, self._prompt, self._sampling = batcher, name, prompt, sampling
        self._begin = self._latest = time.monotonic()
        self._arrived = asyncio.Event()
        self._finished = False
        self._error: str | None = None
        self.tokens: list[int] = []

    def receive(self, output: Any) -> None:
        """Take an output; only in the event loop."""
        now, metrics = time.monotonic(), self._batcher.metrics
        new = len(output.generated_tokens) - len(self.tokens)
        if new > 0:
            if self.tokens:
                metrics.token_seconds.observe((now - self._latest) / new)
            else:
                metrics.first_token_seconds.observe(now - self._begin)
            metrics.generated_tokens.inc(new)
            self._latest, self.tokens = now, output.generated_tokens
        if output.error is not None:
            self._error = output.error
            self._batcher.report(output.error)
        self._finished = output.is_finished()
        self._arrived.set()

    def end(self, error: str) -> None:
        """End the answer with an error."""
        self._error, self._finished = error, True
        self._arrived.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text as it is generated; the last piece has `Piece.finish`.

        Raises:
            ApiError: the generation failed, or took too long.
        """
        text, seen = self._batcher.text_of(self._sampling), 0
        while True:
            await self._wait()
            if self._error is not None:
                raise ApiError(500, "the generation failed; the server's log says why")
            tokens, last = self.tokens[seen:], self._finished
            seen += len(tokens)
            piece = text.feed(tokens, last)
            finish = "stop" if text.stopped else "length" if last else None
            if piece or finish:
                yield Piece(piece, Usage(self._prompt, seen), finish)
            if finish:
                return

    async def _wait(self) -> None:
        """Until there is something new."""
        left = self._begin + self._batcher.timeout - time.monotonic()
        try:
            await asyncio.wait_for(self._arrived.wait(), max(left, 0))
        except asyncio.TimeoutError as error:
            limit = self._batcher.timeout
            raise ApiError(504, f"the answer took longer than {limit:g} s") from error
        self._arrived.clear()

    def close(self) -> None:
        """Cancels the request unless it has ended. Idempotent."""
        self._batcher.forget(self._name)
