"""The baselines that ops are compared with.

unfused        the op with algorithm "unfused": the same local matmul, nothing overlapped
torch          a torch.distributed collective and torch.matmul
matmul         torch.matmul of the local sizes, no communication
local_matmul   the local matmul that the algorithms use, no communication
nccl           torch.matmul and NCCL through `tpkernels.nccl.Communicator` (CUDA)
symm_mem       torch.ops.symm_mem.fused_* (CUDA)

A fused op cannot be faster than the faster of `matmul` and `local_matmul`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from tpkernels import nccl
from tpkernels.bench.cases import Case, run_local_matmul, run_matmul, run_torch, with_norm
from tpkernels.bench.inputs import Inputs
from tpkernels.errors import TpkernelsError
from tpkernels.launch.session import gather_objects
from tpkernels.local.packed import native
from tpkernels.local.scaled import torch_takes

BASELINES = ("unfused", "torch", "matmul", "local_matmul", "nccl", "symm_mem")
LOCAL = ("matmul", "local_matmul")  # without communication

Runs = dict[str, Callable[[], object]]


@contextlib.contextmanager
def baselines(
    case: Case, inputs: Inputs, *, torch_matmul_seconds: float, most: float, wanted: bool
) -> Iterator[tuple[Runs, dict[str, str]]]:
    """Prepare the baselines of a case except `unfused`, and say why others are left out.
    Collective.

    Args:
        torch_matmul_seconds: expected time of one local torch.matmul.
        most: seconds above which baselines that use torch.matmul are left out.
        wanted: whether to include baselines that use torch.matmul at all.
    """
    runs: Runs = {}
    left_out: dict[str, str] = {}
    if case.weights:
        runs["local_matmul"] = lambda: run_local_matmul(inputs.whole())
    with contextlib.ExitStack() as stack:
        if not wanted:
            yield runs, left_out
            return
        with_torch: Runs = {"torch": lambda: run_torch(inputs.sharded())}
        if case.weights:
            with_torch["matmul"] = lambda: run_matmul(inputs.whole())
        if not torch_multiplies(case):
            reason = "torch._scaled_mm does not take these operands on this GPU"
            left_out, with_torch = dict.fromkeys(with_torch, reason), {}
        if case.x.is_cuda:
            on_gpu = {
                "nccl": lambda: _nccl(case, inputs, stack),
                "symm_mem": lambda: _symm_mem(case),
            }
            for name, prepare in on_gpu.items():
                run, reason = _prepared_on_all(prepare)
                if run is None:
                    left_out[name] = reason
                else:
                    with_torch[name] = lambda run=run: run(inputs.sharded())  # type: ignore[misc]
        if torch_matmul_seconds > most:
            slow = "" if native(case.x.dtype) else ": no instructions for this dtype"
            reason = f"torch.matmul would take about {torch_matmul_seconds:.2g} s a call{slow}"
            left_out |= dict.fromkeys(with_torch, reason)
            with_torch = {}
        yield runs | with_torch, left_out


def torch_multiplies(case: Case) -> bool:
    """Return whether torch has the product of a case. On CPUs it has all that are in cases."""
    if not (case.scales and case.x.is_cuda):
        return True
    (x, scale_x), (w, scale_w) = case.operands
    return torch_takes(x, w, scale_x, scale_w, case.out_dtype)


def _prepared_on_all(
    prepare: Callable[[], Callable[[Case], object]],
) -> tuple[Callable[[Case], object] | None, str]:
    """Return the result of ``prepare`` if it succeeds on every rank; otherwise None and the first
    reason."""
    run, reason = None, ""
    try:
        run = prepare()
    except (NotImplementedError, RuntimeError, AttributeError, TpkernelsError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    reasons = [each for each in gather_objects(reason) if each]
    return (None, reasons[0]) if reasons else (run, "")


def _nccl(case: Case, inputs: Inputs, stack: contextlib.ExitStack) -> Callable[[Case], object]:
    """Prepare the op's collective by NCCL and torch.matmul; run it once."""
    if case.scales or case.op == "all_to_all":
        raise NotImplementedError(f"no {case.op} is made of tpkernels.nccl here")
    if min(case.sizes) != max(case.sizes):
        raise NotImplementedError("NCCL needs equal shards")
    assert dist.group.WORLD is not None
    comm = stack.enter_context(nccl.Communicator(dist.group.WORLD))

    def run(copy: Case) -> object:
        if copy.op == "all_gather_matmul":
            whole = comm.all_gather(copy.x)
            return [torch.matmul(whole, w) for w in copy.weights]
        y = torch.matmul(copy.x, copy.weights[0]) if copy.weights else copy.x
        if copy.op == "all_gather":
            return comm.all_gather(y)
        if "scatter" in copy.op:
            return comm.reduce_scatter(y)
        return with_norm(copy, comm.all_reduce(y))

    run(inputs.sharded())
    comm.wait()
    return run


def _symm_mem(case: Case) -> Callable[[Case], object]:
    """Prepare torch's own fused op; run it once."""
    if case.op not in ("all_gather_matmul", "matmul_reduce_scatter"):
        raise NotImplementedError(f"torch.ops.symm_mem has no fused {case.op}")
    if min(case.sizes) != max(case.sizes):
        raise NotImplementedError("torch.ops.symm_mem needs equal shards")
    import torch.distributed._symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
    symmetric.enable_symm_mem_for_group(name)

    def run(copy: Case) -> object:
        if copy.op == "all_gather_matmul":
            return ops.fused_all_gather_matmul(copy.x, list(copy.weights), 0, name)
        return ops.fused_matmul_reduce_scatter(copy.x, copy.weights[0], "sum", 0, name)

    run(case)
    torch.cuda.synchronize()
    return run
