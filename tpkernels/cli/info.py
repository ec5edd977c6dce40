"""``tpkernels info``: what is here, and what is not, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels import _C, backends, cuda, dtypes, kernels, nccl
from tpkernels.backends import OPS, TABLES
from tpkernels.bench import environment
from tpkernels.bench.cases import MATMUL_OPS, Spec
from tpkernels.bench.options import DTYPES
from tpkernels.bench.output import byte_size, console, table
from tpkernels.local.matmul import native
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, unsupported_algorithms
from tpkernels.symm import colocation

_NATIVE = "native: torch multiplies it at full speed"
_CONVERTED = "converted to float32 by panels: no instructions for it on this processor"


def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of tables.")
    ] = False,
) -> None:
    """Show versions, devices, and which algorithms each op has here."""
    facts = gather()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(facts, console())


def gather() -> dict[str, Any]:
    """All that the command shows."""
    return {
        "versions": environment.versions(),
        "extension": {"file": _C.__file__, "holds": _public_names()},
        "vector_unit": environment.vector_units(),
        "local_matmul": {
            dtypes.name(dtype): "native" if native(dtype) else "converted"
            for dtype in DTYPES.values()
        },
        "devices": environment.devices(),
        "shared_memory": colocation.unsupported(),
        "cuda": {"kernels": cuda.image_status(), "driver": cuda.driver_status()},
        "nccl": nccl.facts(),
        "algorithms": {
            device: {op: algorithms(device, op, shared_memory=True) for op in OPS}
            for device in TABLES
        },
        "algorithms_across_hosts": {
            device: {op: algorithms(device, op, shared_memory=False) for op in OPS}
            for device in TABLES
        },
    }


def algorithms(device: str, op: str, *, shared_memory: bool) -> dict[str, str | None]:
    """Why each algorithm cannot run ``op``; None: it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return dict.fromkeys(ALGORITHMS, kernels.NO_GPU)
    shape = (1024, 1024, 1024) if op in MATMUL_OPS else (1024,)
    problem = replace(Spec(op, shape, torch.float32).problem(world=2), device=device)
    kernels_of = {
        name: backends.unsupported(name, device, torch.device(device)) for name in ALGORITHMS
    }
    missing = {name: why for name, why in kernels_of.items() if why is not None}
    found = unsupported_algorithms(problem, Means(shared_memory=shared_memory, unsupported=missing))
    for name in ALGORITHMS:
        if found[name] is None and (op, name) not in TABLES[device]:
            found[name] = f"is not built for {device}"
    return found


def _public_names() -> list[str]:
    submodules = {"host": _C.host, "nccl": _C.nccl, "cuda": _C.cuda}
    return [
        f"{submodule}.{name}"
        for submodule, module in submodules.items()
        for name in dir(module)
        if not name.startswith("_")
    ]


def _show(facts: dict[str, Any], out: Console) -> None:
    devices, units = facts["devices"], facts["vector_unit"]
    cores = ", ".join(map(str, devices["usable_cores"]))
    lines = {
        **facts["versions"],
        "extension": facts["extension"]["file"],
        "holds": ", ".join(facts["extension"]["holds"]),
        "vector unit": f"{units['in_use']} (available: {', '.join(units['available'])})",
        **{
            f"{name} matmul": _NATIVE if how == "native" else _CONVERTED
            for name, how in facts["local_matmul"].items()
        },
        "processor": devices["cpu"],
        "cores": f"{len(devices['usable_cores'])} of {devices['cores']} usable: {cores}",
        "memory": f"{byte_size(devices['memory_bytes'])}, "
        f"{byte_size(devices['available_bytes'])} available",
        "shared memory": _shared_memory_text(facts["shared_memory"]),
        "GPUs": ", ".join(devices["gpus"]) or "none that torch sees",
        "CUDA driver": facts["cuda"]["driver"],
        "CUDA kernels": facts["cuda"]["kernels"],
        "NCCL": _nccl_text(facts["nccl"]),
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        grid.add_row(f"[bold]{name}[/bold]", escape(str(text)))
    out.print(grid)
    for device in TABLES:
        reasons = {why for each in facts["algorithms"][device].values() for why in each.values()}
        out.print(
            f"on {device}: nothing, it {kernels.NO_GPU}"
            if reasons == {kernels.NO_GPU}
            else _algorithm_table(device, facts)
        )


def _shared_memory_text(reason: str | None) -> str:
    if reason is None:
        return "between ranks of one user, on one machine and in one network namespace"
    return f"none: this process {reason}"


def _nccl_text(found: dict[str, Any]) -> str:
    if "unsupported" in found:
        return str(found["unsupported"])
    lacking = [name for name, present in found["features"].items() if not present]
    rest = f", without {', '.join(lacking)}" if lacking else ""
    return f"{found['version']}, {found['origin']}: {found['path']}{rest}"


def _algorithm_table(device: str, facts: dict[str, Any]) -> Table:
    """One row an op; the last column gives the reasons."""
    result = table(f"on {device}", tuple(ALGORITHMS), "why not")
    for op, found in facts["algorithms"][device].items():
        marks = ["yes" if found[name] is None else "no" for name in ALGORITHMS]
        reasons = [f"{name} {why}" for name, why in found.items() if why is not None]
        result.add_row(op, *marks, escape("; ".join(reasons)))
    everywhere = facts["algorithms_across_hosts"][device].values()
    left = [name for name in ALGORITHMS if all(found[name] is None for found in everywhere)]
    result.caption_justify = "left"
    result.caption = f"Where the ranks of a group share no memory: {', '.join(left)}."
    return result
