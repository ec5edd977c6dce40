"""A manager of continuous batching that generates what a test says, without a model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Output:
    """As transformers' ``GenerationOutput``."""

    request_id: str
    generated_tokens: list[int]
    finished: bool = False
    error: str | None = None

    def is_finished(self) -> bool:
        return self.finished


@dataclass
class FakeManager:
    """Generates ``tokens`` after each prompt; while ``held``, only ``before_hold`` of them."""

    tokens: list[int]
    before_hold: int = 0
    held: bool = False
    error: str | None = None  #: of a request, after its tokens
    added: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    forgetful: bool = False  #: the first cancellation of a request has no effect
    running: bool = False
    output_router: Any = None

    def __post_init__(self) -> None:
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self.running = True

    def is_running(self) -> bool:
        return self.running

    def add_request(self, input_ids: list[int], *, request_id: str, **options: Any) -> str | None:
        if not self.running:
            return None
        self.added[request_id] = {"input_ids": input_ids, **options}
        task = asyncio.get_running_loop().create_task(self._generate(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return request_id

    def cancel_request(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def _generate(self, name: str) -> None:
        options = self.added[name]
        tokens = self.tokens[: options["max_new_tokens"]]
        for count in range(1, len(tokens) + 1):
            while self.held and count > self.before_hold:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            if self.cancelled.count(name) > self.forgetful:
                return
            last = count == len(tokens) or tokens[count - 1] in options["eos_token_id"]
            error = self.error if last else None
            self.output_router.deliver(Output(name, tokens[:count], last, error))
            if last:
                return
