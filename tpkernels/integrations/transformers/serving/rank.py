"""What each rank of ``tpkernels serve`` runs: all generate, rank 0 also speaks HTTP.

End: rank 0 stops on SIGTERM, or if the generation fails, and with the last message of transformers'
loop the others stop too. A rank that dies or hangs fails the loop on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.integrations.transformers.loading import (
    end_tokens,
    load_model,
    load_tokenizer,
)

PAGE_TOKENS = 64  # of the cache, which requests take page by page
_BATCH_TOKENS = 512  # of prompts and answers in one step; a longer prompt takes several
PEER_S = 30.0  # for a rank that does not answer; the same as for the ops
_STOP_S = 10.0  # for the generation to end
_LOOK_S = 0.1  # between two looks at the generation


@dataclass(frozen=True)
class Options:
    """What ``tpkernels serve`` was asked for. See its options."""

    model: str
    name: str
    dtype: torch.dtype | None
    ffn_only: bool
    max_requests: int
    max_waiting: int
    max_length: int | None
    cache_tokens: int
    request_timeout: float
    grace: int
    key: str | None


def run_rank(options: Options, shared: socket.socket) -> None:
    """Serves until rank 0 is told to stop.

    Args:
        shared: the socket that rank 0 listens on, bound to its address.

    Raises:
        RuntimeError: the generation failed.
    """
    first = dist.get_rank() == 0
    if first:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `host.serve`
    tokenizer = load_tokenizer(options.model) if first else None
    dist.barrier()  # a GGUF file's tokenizer may take longer than ranks wait for one another
    model = load_model(options.model, dtype=options.dtype, ffn_only=options.ffn_only)
    manager = make_manager(model, options)
    _report_once(manager)
    if first:
        asyncio.run(_serve(options, model, tokenizer, manager, shared))
    else:
        from tpkernels.integrations.transformers.serving.outputs import Nowhere

        shared.close()
        manager.output_router = Nowhere()
        manager.start()
        manager.join(time.perf_counter())
    error = manager.background_thread_status.fatal_error
    if error is not None:
        raise RuntimeError("the generation failed") from error
    manager.destroy()


def make_manager(model: Any, options: Options) -> Any:
    """A manager of transformers, with a cache of a fixed size. Collective."""
    import transformers

    from tpkernels.integrations.transformers.serving.sampling import processors

    pages = -(-options.cache_tokens // PAGE_TOKENS)
    manager = model.init_continuous_batching(
        # Each request has its own end tokens and limits.
        transformers.GenerationConfig(do_sample=True, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=pages,
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=options.max_requests,
            cpu_group_timeout=PEER_S,
            disable_nccl_graph_mixing=False,
            # The processors choose rows by their values, which a graph cannot.
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    manager.logit_processor = processors()
    return manager


def end_tokens_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    own = tokenizer.eos_token_id
    return frozenset([*end_tokens(model), *([] if own is None else [own])])


def _report_once(manager: Any) -> None:
    """Keep the manager from printing what `run_rank` raises: it logs the error that ends its loop,
    and often fails again while it tells the other ranks."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    report = threading.excepthook

    def other(args: threading.ExceptHookArgs) -> None:
        if manager.background_thread_status.fatal_error is None:
            report(args)

    threading.excepthook = other


async def _serve(
    options: Options, model: Any, tokenizer: Any, manager: Any, listener: socket.socket
) -> None:
    import uvicorn

    from tpkernels.integrations.transformers.serving.app import Service, make_app
    from tpkernels.integrations.transformers.serving.batcher import Batcher
    from tpkernels.integrations.transformers.serving.metrics import Metrics
    from tpkernels.integrations.transformers.serving.prompts import Prompts

    most = longest(options, model.config.max_position_embeddings)
    batcher = Batcher(
        manager,
        tokenizer,
        end_tokens=end_tokens_of(model, tokenizer),
        most=options.max_requests + options.max_waiting,
        timeout=options.request_timeout,
        metrics=Metrics(),
    )
    prompts = Prompts(tokenizer, vocabulary=model.config.vocab_size, most=most)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        batcher.start()
        watching = asyncio.create_task(_watch(batcher, server))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"Serving {options.name} on http://{shown}:{port} with {dist.get_world_size()} ranks; "
            f"at most {most} tokens a request",
            flush=True,
        )
        yield
        watching.cancel()

    service = Service(options.name, batcher, prompts, options.key)
    config = uvicorn.Config(
        make_app(service, lifespan),
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=options.grace,
    )
    server = uvicorn.Server(config)
    # uvicorn stops on SIGTERM, and raises it once more at its end, which would kill this rank.
    signal.signal(signal.SIGTERM, lambda *_: None)
    await server.serve(sockets=[listener])
    manager.stop(hard_stop=True, timeout=_STOP_S)


async def _watch(batcher: Any, server: Any) -> None:
    """End the server if the generation has failed; its clients get the reason."""
    while (why := batcher.failure()) is None:
        await asyncio.sleep(_LOOK_S)
    batcher.fail(why)
    server.should_exit = True


def longest(options: Options, model_length: int) -> int:
    """Return the most tokens of a prompt and its answer."""
    wanted = model_length if options.max_length is None else options.max_length
    return min(wanted, model_length, options.cache_tokens)
