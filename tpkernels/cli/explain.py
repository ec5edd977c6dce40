"""``tpkernels explain``: the selection of an algorithm, and predicted times of a model layer."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from typer import Option

from tpkernels.bench.probes import profile_by_name
from tpkernels.bench.specs import Spec, check_spec, make_spec, unsupported_kernels
from tpkernels.bench.sweep import LAYER, MODELS, projection
from tpkernels.cli import options
from tpkernels.common.integers import ceil_div
from tpkernels.common.shards import shard_sizes
from tpkernels.common.text import pluralize
from tpkernels.launch.session import check_device
from tpkernels.launch.terminal import (
    UsageError,
    byte_size,
    check_known,
    check_workers,
    console,
    milliseconds,
    parse_dtype,
    require_at_least,
    table,
)
from tpkernels.planning import qualification, store
from tpkernels.planning.choose import (
    Capabilities,
    choose,
    find_qualification_obstacle,
    unsupported_algorithms,
)
from tpkernels.planning.cost import (
    MEASURED,
    Profile,
    all_reduce_variant,
    collective_seconds,
    fused_seconds,
    machines,
    matmul_seconds,
)
from tpkernels.planning.machine import this_machine
from tpkernels.planning.op_spec import OPS
from tpkernels.planning.qualification import SUMS, Qualification
from tpkernels.planning.table import Table
from tpkernels.symm.node import find_hierarchical_obstacle

_MODELS = [name for name, model in MODELS.items() if not model.experts]
_NO_GAIN = 0.98  # minimum of overlapped / unfused that is shown as no gain (noise)
_LEGEND = """\
Predicted ms per layer, without attention and norms. qkv and gate_up are column-parallel, out and
down are row-parallel. weights/rank: weights of one layer on each rank."""


def explain(
    op: Annotated[str | None, Option(help="Op to explain; tpkernels info lists the ops.")] = None,
    m: Annotated[int | None, Option(help="Rows of the matmul (M), over all ranks.")] = None,
    n: Annotated[int | None, Option(help="Columns of the result (N), over all ranks.")] = None,
    k: Annotated[int | None, Option(help="Contraction size (K), over all ranks.")] = None,
    nbytes: Annotated[
        str | None,
        Option("--bytes", help="Tensor size of a collective, over all ranks, such as 64K or 32M."),
    ] = None,
    tp: Annotated[
        str,
        Option(
            "--tp", "--nproc", help="Number of ranks. With --model also a list, such as 1,2,4,8."
        ),
    ] = "2",
    dtype: options.Dtype = "bf16",
    device: Annotated[str, Option(help="Device: cpu | cuda.")] = "cpu",
    hosts: Annotated[
        int, Option(help="Number of hosts. Ranks on different hosts do not share memory.")
    ] = 1,
    threads: options.Threads = 1,
    model: Annotated[
        str | None, Option(help=f"Predict a layer of this model instead: {', '.join(_MODELS)}.")
    ] = None,
    prefill: Annotated[int, Option(help="Tokens of a prefill step, for --model.")] = 8192,
    decode: Annotated[int, Option(help="Sequences of a decode step, for --model.")] = 64,
    machine_name: Annotated[
        str | None,
        Option(
            "--machine",
            help=f"Machine of the prediction, for --model: {', '.join(machines())}, or {MEASURED} "
            "for the rates that tpkernels tune --machine measured. Default: this, or a preset.",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, for --model.")] = False,
) -> None:
    """Show which algorithm auto selects for an op and why, or predict the time of a model layer.

    Times are those that `tpkernels tune` measured on this machine. No ranks are started.
    """
    if (op is None) == (model is None):
        raise UsageError("pass either --op or --model")
    worlds = options.numbers("tp", [tp])
    if model is not None:
        if (m, n, k, nbytes) != (None,) * 4:
            raise UsageError("--m, --n, --k and --bytes need --op; leave out --model")
        phases = {"prefill": prefill, "decode": decode}
        _explain_model(model, worlds, machine_name, phases, parse_dtype(dtype), as_json)
        return
    if len(worlds) > 1 or machine_name is not None or as_json:
        raise UsageError("a list of --tp, --machine and --json need --model; leave out --op")
    assert op is not None  # checked above: either --op or --model
    (world,) = worlds
    check_workers(tp=world, threads=threads)
    require_at_least(1, hosts=hosts)
    check_device(device)
    spec = _parse_spec(op, (m, n, k), nbytes, parse_dtype(dtype))
    check_spec(spec, world)
    shared_memory, problem = hosts == 1, spec.problem(world, device)
    capabilities = Capabilities(
        shared_memory,
        unsupported=unsupported_kernels(device),
        no_node_reason=find_hierarchical_obstacle(shard_sizes(world, hosts)),
        qualification=qualification.load_qualification(world)
        if device == "cuda"
        else Qualification(),
    )
    machine, timings = None, Table()
    if device == "cpu" or torch.cuda.is_available():
        machine = this_machine(device, world, hosts, shared_memory, threads=threads)
        timings = store.load_or_warn(machine)
    chosen = choose(problem, capabilities, tuned=timings)
    measured = None if problem.tuning_key is None else timings.get(*problem.tuning_key)
    ms = {} if measured is None else measured.ms
    grid = table("algorithm", ("ms",), "not available because it")
    for name, unsupported in unsupported_algorithms(problem, capabilities).items():
        reason = unsupported or find_qualification_obstacle(problem, name, capabilities)
        label = f"[bold green]{name}[/]" if name == chosen.algorithm else name
        time = milliseconds(ms[name]) if name in ms else "not measured"
        grid.add_row(label, "" if reason else time, escape(reason or ""))
    notes = []
    if device == "cuda" and op in ("all_reduce", "matmul_all_reduce"):
        variant = all_reduce_variant(problem.nbytes, world, frozenset(SUMS))
        notes.append(f"direct uses the {variant} variant at this size, according to the cost model")
    notes.append(f"auto selects [bold]{chosen.algorithm}[/]: {escape(chosen.reason)}")
    if machine is not None:
        count = len(timings.measurements)
        layout = f"{pluralize(world, 'rank')} x {pluralize(threads, 'thread')}"
        if count:
            path = escape(str(store.get_table_path(machine)))
            notes.append(f"Times measured with {layout}: {pluralize(count, 'case')} in {path}")
        else:
            notes.append(f"No times were measured with {layout}; run tpkernels tune")
    for item in (f"{op} {spec}, {pluralize(world, 'rank')}, {device}", grid, *notes):
        console().print(item)


def _parse_spec(
    op: str, extents: tuple[int | None, ...], sizes: str | None, dtype: torch.dtype
) -> Spec:
    """Return the spec for --m, --n, --k (``extents``) if ``op`` has a matmul, else for --bytes."""
    check_known("op", [op], OPS)
    if OPS[op].has_matmul and (sizes is not None or None in extents):
        raise UsageError(f"{op} needs --m, --n and --k, without --bytes")
    if not OPS[op].has_matmul and (sizes is None or extents != (None,) * 3):
        raise UsageError(f"{op} needs --bytes, without --m, --n and --k")
    return make_spec(op, ",".join(map(str, extents)), sizes or "", dtype)


# A layer of a model.


def _explain_model(
    model: str,
    worlds: list[int],
    machine_name: str | None,
    phases: dict[str, int],
    dtype: torch.dtype,
    as_json: bool,
) -> None:
    """Show the layer for each world size. ``phases``: rows of the activations, by phase."""
    check_known("model", [model], _MODELS)
    require_at_least(1, **phases)
    heads = MODELS[model].heads
    if max(worlds) > heads:
        raise UsageError(
            f"--tp is {max(worlds)}; {model} has {heads} attention heads, and a head cannot be "
            f"split: it must be at most {heads}"
        )
    profile = profile_by_name(
        machine_name, max(worlds), "cuda" if torch.cuda.is_available() else "cpu"
    )
    layers: list[dict[str, Any]] = [
        {"phase": phase, "tp": world}
        | layer_costs(model, world, rows, phase == "prefill", profile, dtype.itemsize)
        for phase, rows in phases.items()
        for world in worlds
    ]
    if as_json:
        typer.echo(json.dumps({"machine": profile.title, "layers": layers}, indent=2))
        return
    times = ("matmuls", "communication", "unfused", "overlapped")
    grid = table("phase", ("TP", "nodes", "weights/rank", *times), "overlap")
    for layer in layers:
        phase, world, weight_bytes, *seconds = layer.values()
        *_, unfused, overlapped = seconds
        grid.add_row(
            *(phase, str(world), str(ceil_div(world, profile.node)), byte_size(weight_bytes)),
            *(milliseconds(1e3 * value) for value in seconds),
            f"{unfused / overlapped:.2f}x" if overlapped < _NO_GAIN * unfused else "no gain",
        )
    screen = console()
    sizes = " and ".join(f"{phase} {rows}" for phase, rows in phases.items())
    screen.print(f"One layer of {model} on {profile.title}, rows: {sizes}", markup=False)
    screen.print(grid)
    screen.print(_LEGEND, markup=False)


def layer_costs(
    model: str, world: int, rows: int, sequence_parallel: bool, profile: Profile, itemsize: int
) -> dict[str, Any]:
    """Predict the cost of the matmuls of a layer.

    Args:
        sequence_parallel: whether rows are sharded between the matmuls; otherwise replicated.

    Returns:
        ``weight_bytes``: bytes of the weights of a rank. Then seconds. ``matmul``: matmuls without
        communication; ``communication``: collectives without matmuls; ``unfused``: their sum;
        ``overlapped``: each collective fused with its matmul.
    """
    costs = []
    for name in LAYER:
        matmul = projection(MODELS[model], name, world)
        k = matmul.k if matmul.column else ceil_div(matmul.k, world)
        n = ceil_div(matmul.n, world) if matmul.column else matmul.n
        communication_time = 0.0
        if sequence_parallel or not matmul.column:
            nbytes = rows * (k if matmul.column else n) * itemsize
            passes = 1 if sequence_parallel else 2
            communication_time = collective_seconds(profile, nbytes, world, passes=passes)
        matmul_time = matmul_seconds(profile, rows, k, n, itemsize)
        fused = fused_seconds(profile, (rows, k, n), 0, communication_time, world, itemsize)
        costs.append(
            (
                k * n * itemsize,
                matmul_time,
                communication_time,
                matmul_time + communication_time,
                fused,
            )
        )
    names = ("weight_bytes", "matmul", "communication", "unfused", "overlapped")
    return dict(zip(names, map(sum, zip(*costs, strict=True)), strict=True))
