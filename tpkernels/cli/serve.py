"""``tpkernels serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from tpkernels.cli import options
from tpkernels.launch.session import under_torchrun
from tpkernels.launch.terminal import (
    UsageError,
    check_workers,
    parse_dtype,
    read_input,
    require_at_least,
    warn_oversubscription,
)

_MAX_KEY_BYTES = 4096  # maximum bytes of a key file


def serve(
    model: options.Checkpoint,
    ranks: options.Tp = 2,
    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 means all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 selects a free port.")] = 8000,
    name: Annotated[
        str | None,
        Option(help="Model name that clients send. Default: the name of the folder or file."),
    ] = None,
    dtype: options.CheckpointDtype = None,
    ffn_only: options.FfnOnly = False,
    expert_parallel: options.ExpertParallel = False,
    plan: options.PlanFile = None,
    invariant: options.Invariant = False,
    weights: options.Weights = None,
    max_requests: Annotated[int, Option(help="Maximum number of requests in a batch.")] = 32,
    max_waiting: Annotated[
        int, Option(help="Maximum number of queued requests. Further requests get status 429.")
    ] = 128,
    max_length: Annotated[
        int | None,
        Option(
            help="Maximum tokens of a prompt plus its answer. Default: the maximum of the model."
        ),
    ] = None,
    cache_tokens: Annotated[
        int, Option(help="Size of the KV cache in tokens, over all requests.")
    ] = 16384,
    request_timeout: Annotated[int, Option(help="Time limit of an answer, in seconds.")] = 600,
    grace: Annotated[
        int, Option(help="Seconds that running requests get to finish when the server stops.")
    ] = 10,
    api_key_file: Annotated[
        Path | None, Option(help="File with the API key that clients must send as a bearer token.")
    ] = None,
    threads: options.Threads = 1,
) -> None:
    """Serve a Hugging Face model over the OpenAI HTTP API.

    Endpoints: /v1/models, /v1/completions, /v1/chat/completions, /health, and /metrics for
    Prometheus. After the first Ctrl-C or SIGTERM, running requests may finish within --grace
    seconds. A second one ends them immediately. The exit code is 1 if a rank failed.
    """
    check_workers(tp=ranks, threads=threads)
    require_at_least(1, **{"max-requests": max_requests, "request-timeout": request_timeout})
    # A prompt and its answer have at least 2 tokens.
    require_at_least(2, **{"cache-tokens": cache_tokens})
    require_at_least(0, **{"max-waiting": max_waiting, "grace": grace})
    if max_length is not None:
        require_at_least(2, **{"max-length": max_length})
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port is {port}; it must be 0 to 65535")
    key = None if api_key_file is None else _read_key(api_key_file)
    if under_torchrun():
        raise UsageError(
            "`tpkernels serve` launches its own ranks; run it without torchrun and pass --tp"
        )
    if not Path(model).exists():
        raise UsageError(
            f"--model is {model}, which does not exist; pass a local folder or a GGUF file"
        )
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401

        from tpkernels.integrations.transformers.loading import LoadOptions
        from tpkernels.integrations.transformers.serving import server
    except ImportError as error:
        raise UsageError(f"{error}; pip install 'tpkernels[serve]'") from error
    server_options = server.ServerOptions(
        model=LoadOptions(
            model,
            dtype=None if dtype is None else parse_dtype(dtype),
            ffn_only=ffn_only,
            expert_parallel=expert_parallel,
            weights=options.checked_weights(weights, "cpu"),
            plan=options.read_plan(plan),
            invariant=invariant,
        ),
        name=name or Path(model).resolve().stem,
        max_requests=max_requests,
        max_waiting=max_waiting,
        max_length=max_length,
        cache_tokens=cache_tokens,
        request_timeout=request_timeout,
        grace=grace,
        key=key,
    )
    warn_oversubscription(ranks, threads)
    server.serve(server_options, ranks=ranks, threads=threads, host=host, port=port)


def _read_key(path: Path) -> str:
    try:
        key = read_input(path, max_bytes=_MAX_KEY_BYTES).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"'{path}' is not ASCII text") from error
    if not key:
        raise UsageError(f"'{path}' is empty; write the API key to it, or leave --api-key-file out")
    return key
