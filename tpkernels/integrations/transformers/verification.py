"""Check that a sharded model computes what the unsharded model of transformers computes.

Problem: both models round, at different places, and errors grow with depth. A fixed tolerance
either hides small faults or fails correct models.

Algorithm: the unsharded model runs once in the dtype under test, and once exactly: in float64, or
in float32 for 16-bit models. The difference of the two is its rounding error E. The sharded model
may differ from the exact model by `ERROR_FACTOR` * E, plus the roundings that only it has: of the
result and of the partial sum of each rank. All differences and errors are Frobenius norms.

    layers      Every layer of the sharded and of the exact model gets the recorded input of the
                unsharded model. Errors do not accumulate, so the first layer above its bound is the
                faulty one. The input that the layer would have received is compared as well: it is
                the result of code between layers, such as attention.
    end to end  Logits, loss and gradients; then logits of the packed model with a KV cache.
    invariant   Logits of several ways to run the model must be bitwise identical.

All runs but the last use the experts that the unsharded run selected. Otherwise two experts that
tie up to rounding would change a result by more than rounding.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

import tpkernels
from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes
from tpkernels.integrations.transformers.loading import LoadOptions, load_model, unusable_model
from tpkernels.launch import Ranks
from tpkernels.launch.terminal import UsageError, byte_size
from tpkernels.local.packed import scale_group
from tpkernels.nn import RowParallelLinear
from tpkernels.nn.sharding import ShardedModule, Sharding
from tpkernels.parallel import pretrained
from tpkernels.parallel.checkpoints import import_package, open_checkpoint
from tpkernels.parallel.decoder import SharedInputLinear

#: Both models round equally often, to the same dtypes, so their errors are two samples of one
#: distribution. Norms of many errors are nearly equal; a few large elements make them differ. With
#: this factor the largest difference was about half of the bound, in SmolLM2-135M and small random
#: models in fp32, bf16 and fp16 on 1, 2, 3 and 5 ranks (AMD EPYC, torch 2.13, 2026-11-27).
ERROR_FACTOR = 4.0
#: Root mean square of a rounding error, in eps times the value: the error is uniform within half a
#: unit in the last place, and that unit is at most eps times the value.
ROUNDING = 1 / math.sqrt(12)
CHUNKS = (7, 64)  #: tokens per forward in the invariant check
LENGTHS = (0.3, 1.0, 0.1, 1.5, 0.7, 0.5, 0.2, 1.2)  #: of the batch; 1.0 is the checked sequence

Sabotage: TypeAlias = Callable[[nn.Module], None]
Rows: TypeAlias = dict[str, dict[int, bytes]]  # digests by layer and token


@dataclass(frozen=True)
class Check:
    """A difference and its bound, both relative to the norm of the exact result."""

    name: str
    difference: float  #: NaN and infinity fail
    bound: float
    where: str  #: layer, parameter, rank

    @property
    def passed(self) -> bool:
        """Return whether the difference is within the bound."""
        return self.difference <= self.bound


@dataclass(frozen=True)
class Result:
    """The checks on a number of ranks."""

    ranks: int
    checks: list[Check]
    #: First layer above its bound, or else the first that is not bitwise identical.
    first_difference: Check | None

    @property
    def passed(self) -> bool:
        """Return whether all checks have passed."""
        return all(check.passed for check in self.checks)


class Rerun(TorchFunctionMode):
    """Within the block, select the recorded experts.

    Args:
        experts: indices [tokens, k] of each ``topk`` call.
        record: fill ``experts`` instead.
        double: compute in float64 where a float64 model computes in float32, such as norms.
        span: first token and number of tokens of this forward; a rank may hold a slice of them.
    """

    def __init__(
        self,
        experts: list[torch.Tensor],
        *,
        record: bool = False,
        double: bool = False,
        span: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__()
        self._record, self._double, self._experts = record, double, experts
        self._unused, self._span = iter(experts), span

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._double:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        if self._record:
            self._experts.append(result.indices)
            return result
        (begin, tokens), rows = self._span, len(result.indices)
        indices = next(self._unused)[begin + _first_row(rows, tokens) :][:rows]
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


class Probe:
    """Hooks that record the input and output of each layer in a forward.

    Args:
        names: the layers.
        inputs: tensors that replace the arguments of each layer. Sharded layers get their slices.
        tokens: number of tokens; a rank may hold a slice of them.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        inputs: Mapping[str, list[torch.Tensor]] | None = None,
        tokens: int = 0,
    ) -> None:
        self.inputs: dict[str, list[torch.Tensor]] = {}
        self.values: dict[str, torch.Tensor] = {}  #: by "LAYER input" and "LAYER output"
        self.partials: dict[str, float] = {}  #: norm of the local partial sum of an output
        self._forced, self._tokens, self._modules = inputs, tokens, dict(model.named_modules())
        self._handles = []
        for name in names:
            module, before = self._modules[name], partial(self._before, name)
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(partial(self._after, name)),
            ]

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def local(self, point: str, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """Return the slice of an unsharded input or output that is stored as ``like``, or None for
        a different layout."""
        sharding = feature_sharding(self._modules, *point.split(" "))
        for dim, (size, local) in enumerate(zip(full.shape, like.shape, strict=True)):
            if size != local and sharding and (dim == full.dim() - 1 or full.dim() == 4):
                width = sharding.total // size  # features of a head, or 1
                ranges = ([(begin // width, n // width) for begin, n in r] for r in sharding.ranges)
                full = Sharding(dim, tuple(map(tuple, ranges)), sharding.rank).shard(full)
            elif size == self._tokens != local:
                full = full.narrow(dim, _first_row(local, size), local)
        return full.to(like.dtype) if full.shape == like.shape else None

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = "hidden_states"
        given = [x for x in (*args, kwargs.get(key)) if isinstance(x, torch.Tensor)]
        if not given or isinstance(module, SharedInputLinear):
            return None  # the parent module has computed the output
        self.inputs[name] = [x.detach().clone() for x in given]
        self.values[f"{name} input"] = self.inputs[name][0]
        if self._forced is None:
            return None
        pairs = zip(self._forced[name], given, strict=True)
        slices = ((self.local(f"{name} input", full, x), x) for full, x in pairs)
        new = [x if slice_ is None else slice_ for slice_, x in slices]
        if isinstance(module, RowParallelLinear) and module.weight.shape[1:] == new[0].shape[-1:]:
            self.partials[f"{name} output"] = _norm(F.linear(new[0], module.weight))
        rest = iter(new)
        args = tuple(next(rest) if isinstance(x, torch.Tensor) else x for x in args)
        return args, kwargs | dict.fromkeys(
            [key] * isinstance(kwargs.get(key), torch.Tensor), new[-1]
        )

    def _after(self, name: str, module: nn.Module, args: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.values[f"{name} output"] = output.detach().clone()


def feature_sharding(modules: Mapping[str, nn.Module], name: str, side: str) -> Sharding | None:
    """Return the sharding of the features of an "input" or "output" of a layer, or None."""
    parent, _, child = name.rpartition(".")
    if child in ("q_norm", "k_norm"):
        name, side = f"{parent}.{child[0]}_proj", "output"
    module = modules.get(name)
    sharding = module.shardings.get("weight") if isinstance(module, ShardedModule) else None
    return sharding if sharding and sharding.dim == (side == "input") else None


def _first_row(rows: int, tokens: int) -> int:
    """Return the first token of this rank, which holds ``rows`` of ``tokens`` tokens."""
    if rows == tokens or not dist.is_initialized():
        return 0
    return sum(shard_sizes(tokens, dist.get_world_size())[: dist.get_rank()])


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))


def _distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    return _norm(x.detach().double() - exact)


def layer_names(model: nn.Module) -> list[str]:
    """Return the names of all modules with parameters, except containers of layers."""
    skipped = ("", getattr(model, "base_model_prefix", ""))
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]
    return [n for n, m in modules if n not in skipped and next(m.parameters(), None) is not None]


def load_unsharded(options: LoadOptions) -> Any:
    """Load the unsharded model: folders with transformers. GGUF files are read as by
    `tpkernels.from_pretrained`, because transformers may keep their weights quantized."""
    transformers, checkpoint = import_package("transformers"), open_checkpoint(options.path)
    dtype = options.dtype or getattr(checkpoint.config(), "dtype", None) or checkpoint.dtype()
    if checkpoint.path.is_file():
        return pretrained.load_unsharded(checkpoint, dtype)
    factory = transformers.AutoModelForCausalLM
    return factory.from_pretrained(checkpoint.path, dtype=dtype).eval()


def write_reference(model: Any, prompts: list[torch.Tensor], int8: bool, file: Path) -> Any:
    """Run the unsharded model in its dtype and exactly, and write the results for the ranks.

    Args:
        prompts: token ids [1, tokens].
        int8: emulate int8 weights, so that E includes the quantization. Gradients are left out.
    """
    model.config._experts_implementation = "eager"  # the only one for all dtypes and sizes
    exact = copy.deepcopy(model).to(_choose_exact_dtype(model, 1 if int8 else 2))
    if int8:
        _emulate_int8(model)
    sequences: list[dict[str, Any]] = []
    for ids in prompts:
        experts: list[torch.Tensor] = []
        rerun = partial(Rerun, experts, double=exact.dtype == torch.float64, span=(0, ids.numel()))
        with torch.set_grad_enabled(not int8):
            with Rerun(experts, record=True), Probe(model, layer_names(model)) as probe:
                out = model(ids, labels=ids, use_cache=False)
            with rerun():
                exact_out = exact(ids, labels=ids, use_cache=False)
                if not int8:
                    out.loss.backward()
                    exact_out.loss.backward()
        with torch.no_grad(), rerun(), Probe(exact, probe.inputs, probe.inputs) as forced:
            exact(ids, use_cache=False)
        logits, exact_logits = out.logits.detach(), exact_out.logits.detach()
        if not logits.isfinite().all():
            name = dtypes.name(model.dtype)
            raise UsageError(f"the unsharded model returns NaN or infinity in {name}; pass --dtype")
        losses, exact_losses = (
            F.cross_entropy(x[0, :-1].double(), ids[0, 1:], reduction="none")
            for x in (logits, exact_logits)
        )
        errors = {point: _distance(x, forced.values[point]) for point, x in probe.values.items()}
        sequences.append(
            {"ids": ids, "experts": experts, "inputs": probe.inputs, "values": probe.values}
            | {"exact": forced.values, "errors": errors, "logits": logits}
            | {"exact_logits": exact_logits, "logit_error": _distance(logits, exact_logits)}
            | {"exact_loss": exact_losses.mean().item(), "logit_norm": _norm(exact_logits)}
            | {"loss_error": float((losses - exact_losses).square().mean().sqrt())}
        )
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    grads = {n: p.grad for n, p in exact.named_parameters() if n in found}
    reference = {
        "dtype": model.dtype,
        "sequences": sequences,
        "gradient_errors": {name: _distance(grad, grads[name]) for name, grad in found.items()},
        "gradient_elements": sum(grad.numel() for grad in found.values()),
        "gradient_norms": {name: _norm(grad) for name, grad in grads.items()},
    }
    torch.save(reference | {"gradients": grads}, file)
    return reference


def _choose_exact_dtype(model: Any, copies: int) -> torch.dtype:
    """Return float64 or, for a 16-bit model, float32: its rounding is at least 2^13 times finer.
    Raises UsageError if two models, with ``copies`` of the parameters each, do not fit in
    memory."""
    exact = torch.float64 if model.dtype == torch.float32 else torch.float32
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]) << 10
    size = copies * sum(p.numel() for p in model.parameters())
    if (needed := size * (exact.itemsize + model.dtype.itemsize)) > available:
        raise UsageError(
            f"a comparison with {dtypes.name(exact)} needs {byte_size(needed)}, and "
            f"{byte_size(available)} are available; pass --dtype bf16 or use a larger machine"
        )
    return exact


class _Int8(TorchFunctionMode):
    """Within the block, matmuls round the rows of x and the columns of w to int8."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = self._round(args[0]), self._round(args[1]), *args[2:]
        elif func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = self._round(args[0]), self._round(args[1].mT).mT
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _round(x: torch.Tensor) -> torch.Tensor:
        groups = x.detach().float().unflatten(-1, (-1, scale_group(x.shape[-1], "")))
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        return ((groups / scale).round() * scale).flatten(-2).to(x.dtype)


def _emulate_int8(model: nn.Module) -> None:
    """Make the linear layers and experts of the unsharded model round as with int8 weights."""

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Int8():
            return original(*args, **kwargs)

    for module in model.modules():
        is_linear = isinstance(module, nn.Linear) and module.in_features % 4 == 0
        if is_linear or (hasattr(module, "gate_up_proj") and hasattr(module, "num_experts")):
            module.forward = partial(forward, module.forward)


def check_rank(options: LoadOptions, file: str, decoded: int, sabotage: Sabotage | None) -> Any:
    """Return the differences of the sharded model on this rank from the reference. Collective."""
    reference, trains = torch.load(file, mmap=True), options.weights is None
    with unusable_model():
        model: Any = tpkernels.from_pretrained(
            options.path,
            init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)),
            plan=options.plan,
            ffn_only=options.ffn_only,
            expert_parallel=options.expert_parallel,
            dtype=options.dtype,
            sequence_parallel=None if options.ffn_only else "prefill",
            pack=options.weights or False,
        )
    if sabotage is not None:
        sabotage(model)
    found: dict[str, Any] = {"layers": [], "logits": [], "loss": [], "decode": [], "tokens": []}
    for sequence in reference["sequences"]:
        ids, inputs = sequence["ids"], sequence["inputs"]
        rerun = partial(Rerun, sequence["experts"], span=(0, ids.numel()))
        with torch.no_grad(), rerun(), Probe(model, inputs, inputs, ids.numel()) as probe:
            model(ids, use_cache=False)
        found["layers"].append(dict(_compare_layers(probe, sequence)))
        with torch.set_grad_enabled(trains), rerun():
            out = model(ids, labels=ids, use_cache=False)
        if trains:
            out.loss.backward()
        found["logits"].append(_distance(out.logits, sequence["exact_logits"]))
        found["loss"].append(abs(out.loss.item() - sequence["exact_loss"]))
    if trains:
        found["gradients"] = dict(_compare_gradients(model, reference["gradients"]))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found["gradient norm"] = float(torch.nn.utils.get_total_norm(grads))
    del model, out
    model = load_model(options)
    if sabotage is not None:
        sabotage(model)
    for sequence in reference["sequences"]:
        ids, unsharded = sequence["ids"], sequence["logits"][0].double()
        prompt = max(1, ids.numel() - decoded)
        sizes = [prompt, *[1] * (ids.numel() - prompt)]
        logits, _ = run_in_chunks(model, ids, sizes, sequence["experts"])
        found["decode"].append(_distance(logits, sequence["exact_logits"][0]))
        # The unsharded logits of the most likely token minus those of the selected token.
        gaps = unsharded.amax(1) - unsharded.gather(1, logits.argmax(1, True))[:, 0]
        found["tokens"].append((float(gaps.max()), int((gaps > 0).sum())))
    return found


def _compare_layers(probe: Probe, sequence: Any) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield each point with its distance from the exact value, the norm, the norm of the partial
    sum, and whether it differs from the unsharded model."""
    for point, got in probe.values.items():
        exact = probe.local(point, sequence["exact"][point], got.double())
        same = probe.local(point, sequence["values"][point], got)
        if exact is not None and same is not None and got.is_floating_point():
            sizes = _distance(got, exact), _norm(exact), probe.partials.get(point, 0.0)
            yield point, (*sizes, not torch.equal(got, same))


def _compare_gradients(model: nn.Module, exact: Any) -> Iterator[tuple[str, float]]:
    """Yield the distance of each local gradient from the shard of the exact gradient."""
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        shardings = getattr(model.get_submodule(owner), "shardings", {})
        if (full := exact.get(name)) is not None:
            grad = torch.zeros(()) if parameter.grad is None else parameter.grad
            yield (
                name,
                _distance(
                    grad, shardings[attribute].shard(full) if attribute in shardings else full
                ),
            )


def run_in_chunks(
    model: Any,
    ids: torch.Tensor,
    sizes: list[int],
    experts: list[torch.Tensor] | None = None,
    names: Sequence[str] = (),
) -> tuple[torch.Tensor, Rows]:
    """Run a sequence [1, tokens] in chunks, with a KV cache.

    Returns:
        The logits [tokens, vocabulary], and the digests of the rows of the layers ``names``.
    """
    cache, chunks, begin, rows = None, [], 0, dict[str, dict[int, bytes]]()
    for chunk in ids.split(sizes, 1):
        rerun = Rerun(experts or [], record=not experts, span=(begin, chunk.numel()))
        with torch.no_grad(), rerun, Probe(model, names) as probe:
            out = model(chunk, past_key_values=cache, use_cache=True)
        _digest(probe, rows, 0, begin, chunk.numel())
        cache, begin = out.past_key_values, begin + chunk.numel()
        chunks.append(out.logits[0])
    return torch.cat(chunks), rows


def _run_in_batch(model: Any, ids: torch.Tensor, names: Sequence[str]) -> tuple[torch.Tensor, Rows]:
    """Run a sequence as an entry of a left-padded batch, like `run_in_chunks`."""
    lengths, entry = [max(1, int(ids.numel() * x)) for x in LENGTHS], LENGTHS.index(1.0)
    batch = torch.zeros(len(lengths), max(lengths), dtype=ids.dtype)
    mask = torch.zeros_like(batch)
    for i, length in enumerate(lengths):
        batch[i, -length:] = ids[0].repeat(2).roll(entry - i)[:length]
        mask[i, -length:] = 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    rows: Rows = {}
    with torch.no_grad(), Probe(model, names) as probe:
        out = model(batch, attention_mask=mask, position_ids=positions, use_cache=False)
    _digest(probe, rows, entry, ids.numel() - max(lengths), max(lengths))
    return out.logits[entry, -ids.numel() :], rows


def _digest(probe: Probe, rows: Rows, entry: int, begin: int, tokens: int) -> None:
    """Add the digests of the outputs [batch, tokens, features] of a forward; ``begin`` is the first
    token, negative for padding."""
    for point, value in probe.values.items():
        if point.endswith(" output") and value.dim() == 3:
            data = value[entry].contiguous().view(torch.uint8).numpy()
            for token, row in enumerate(data, begin + _first_row(len(data), tokens)):
                rows.setdefault(point, {})[token] = hashlib.blake2b(row, digest_size=8).digest()


def check_ways(options: LoadOptions, prompts: list[torch.Tensor], sabotage: Sabotage | None) -> Any:
    """Run the sharded model in several ways. Returns (logits, digests) by way for each prompt.
    Collective."""
    model: Any = load_model(options)
    if sabotage is not None:
        sabotage(model)
    modules = dict(model.named_modules())
    sharded = [n for n in modules if n != "lm_head" and feature_sharding(modules, n, "output")]
    names = [n for n in layer_names(model) if n not in sharded]
    found = []
    for ids in prompts:
        tokens = ids.numel()
        ways = {"prefill": tokens, "decode": 1} | {f"chunks of {size}": size for size in CHUNKS}
        results = {
            way: run_in_chunks(model, ids, [len(x) for x in ids[0].split(size)], None, names)
            for way, size in ways.items()
        }
        found.append(results | {f"batch of {len(LENGTHS)}": _run_in_batch(model, ids, names)})
    return found


def verify(
    options: LoadOptions,
    worlds: Sequence[int],
    make_prompts: Callable[[Any], list[torch.Tensor]],
    *,
    invariant: bool = False,
    decoded: int = 16,
    threads: int = 1,
    timeout: float = 600,
    sabotage: Sabotage | None = None,
) -> Iterator[Result]:
    """Compare the sharded model on each number of ranks with the unsharded model or, if
    ``invariant``, with the prefill on the first number of ranks.

    Args:
        make_prompts: returns token ids [1, tokens] for the configuration of the model.
        decoded: tokens at the end of each prompt that are decoded one by one.
        sabotage: called with the model on each rank. Tests use it to plant faults.
    """
    with tempfile.TemporaryDirectory(prefix="tpkernels-verify-") as folder:
        file, first = Path(folder) / "reference.pt", None
        with unusable_model():
            if invariant:
                prompts = make_prompts(open_checkpoint(options.path).config())
                job: tuple[Any, ...] = (check_ways, options, prompts, sabotage)
            else:
                model = load_unsharded(options)
                prompts = make_prompts(model.config)
                reference = write_reference(model, prompts, options.weights is not None, file)
                del model
                job = (check_rank, options, str(file), decoded, sabotage)
        for world in worlds:
            with Ranks(world, threads=threads, timeout=timeout) as ranks:
                found = ranks.run(*job)
            if invariant:
                first = first or found
                yield Result(world, list(compare_ways(first, found)), None)
            else:
                yield judge(reference, found)


def _worst(checks: Iterable[Check], *, first: bool = False) -> Check:
    """Return the check with the largest difference relative to its bound, or the first failed."""

    def ratio(check: Check) -> float:
        ratio = check.difference / max(check.bound, 1e-300)
        return math.inf if math.isnan(ratio) else ratio

    checks = list(checks)
    failed = [check for check in checks if not check.passed] if first else []
    return next(iter(failed), max(checks, key=ratio))


def judge(reference: Any, found: list[Any]) -> Result:
    """Return the checks for the results of `check_rank` on all ranks."""
    rounding = ROUNDING * torch.finfo(reference["dtype"]).eps
    layers, changed, sequences = [], None, reference["sequences"]
    for i, sequence in enumerate(sequences):
        for point, error in sequence["errors"].items():
            sizes = {
                r: f["layers"][i][point] for r, f in enumerate(found) if point in f["layers"][i]
            }
            partials = math.hypot(*(partial_norm for _, _, partial_norm, _ in sizes.values()))
            for rank, (difference, norm, _, differs) in sizes.items():
                scale = norm or 1.0
                bound = ERROR_FACTOR * error / scale + rounding * (1 + partials / scale)
                layers.append(Check("layers", difference / scale, bound, f"{point}, rank {rank}"))
                changed = layers[-1] if differs and changed is None else changed

    def end_to_end(name: str, key: str, error: str, norm: str) -> Check:
        return _worst(
            Check(
                name, f[key][i] / s[norm], ERROR_FACTOR * s[error] / s[norm] + rounding, f"rank {r}"
            )
            for i, s in enumerate(sequences)
            for r, f in enumerate(found)
        )

    checks = [_worst(layers, first=True)]
    checks.append(end_to_end("logits", "logits", "logit_error", "logit_norm"))
    checks.append(end_to_end("loss", "loss", "loss_error", "exact_loss"))
    if "gradients" in found[0]:
        checks += _judge_gradients(reference, found, rounding)
    checks.append(end_to_end("logits, decode", "decode", "logit_error", "logit_norm"))
    tokens = []
    for i, s in enumerate(sequences):
        # Two logits may each move by the largest error of the sharded and of the unsharded model.
        largest = s["exact_logits"].abs().max().item()
        error = (s["logits"].double() - s["exact_logits"]).abs().max().item() / largest
        bound = 2 * (1 + ERROR_FACTOR) * error + 2 * rounding
        for rank, f in enumerate(found):
            gap, count = f["tokens"][i]
            where = f"{count} of {s['ids'].numel()} differ, rank {rank}"
            tokens.append(Check("tokens", gap / largest, bound, where))
    checks.append(_worst(tokens))
    return Result(len(found), checks, changed if checks[0].passed else checks[0])


def _judge_gradients(reference: Any, found: list[Any], rounding: float) -> Iterator[Check]:
    errors, norms = reference["gradient_errors"], reference["gradient_norms"]
    relative = {name: error / (norms[name] or 1.0) for name, error in errors.items()}
    # A few large elements determine the norm of some gradients, such as those of norm weights. One
    # error can be small by chance, so use the largest over the layers.
    role, largest = partial(re.compile(r"\.\d+\.").sub, ".*."), dict[str, float]()
    for name, error in relative.items():
        largest[role(name)] = max(error, largest.get(role(name), 0.0))
    yield _worst(
        Check(
            "gradients",
            f["gradients"][name] / (norms[name] or 1.0),
            ERROR_FACTOR * largest[role(name)] + rounding,
            f"{name}, rank {rank}",
        )
        for name in relative
        for rank, f in enumerate(found)
    )
    total = math.hypot(*norms.values())
    # torch adds the squares in float32, in any order.
    summed = math.sqrt(reference["gradient_elements"]) * torch.finfo(torch.float32).eps / 2
    bound = ERROR_FACTOR * math.hypot(*errors.values()) / total + rounding + summed
    yield _worst(
        Check("gradient norm", abs(f["gradient norm"] - total) / total, bound, f"rank {rank}")
        for rank, f in enumerate(found)
    )


def compare_ways(reference: Any, found: list[Any]) -> Iterator[Check]:
    """Yield a check of each way in the results of `check_ways` against the prefill in
    ``reference``, with the first layer that differs."""
    for way in found[0][0]:
        largest, where = 0.0, ""
        for i, expected_ways in enumerate(reference[0]):
            base, expected = expected_ways["prefill"][0], dict[str, dict[int, bytes]]()
            for results in reference:  # each rank has the digests of its rows
                for point, rows in results[i]["prefill"][1].items():
                    expected.setdefault(point, {}).update(rows)
            for rank, results in enumerate(found):
                logits, got = results[i][way]
                if torch.equal(logits, base):
                    continue
                differences = (
                    f"{point} of token {token}, rank {rank}"
                    for point, rows in expected.items()
                    for token, digest in got.get(point, {}).items()
                    if token >= 0 and rows.get(token) != digest
                )
                where = where or next(differences, f"logits, rank {rank}")
                largest = max(largest, _distance(logits, base.double()) / _norm(base))
        yield Check(way, largest, 0.0, where)
