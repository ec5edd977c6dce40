"""Where ``fused_dtensor`` holds, and what deferred results are outside of it and to autograd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.fused import AG, AR
from tests.support.meshes import S0, S1, R, make_mesh
from tests.support.ranked import recorded_calls, report

ROWS, HIDDEN, INNER = 7, 8, 12


def context_job() -> list[str]:
    mesh = make_mesh((2,), ["context"])
    x = distribute_tensor(torch.ones(ROWS, HIDDEN), mesh, [S1])
    w = distribute_tensor(torch.ones(INNER, HIDDEN), mesh, [S1])
    own = DTensor.redistribute
    failures = []

    def summed() -> torch.Tensor:
        return F.linear(x, w).redistribute(placements=[R]).to_local()

    def expect(what: str, expected: list[str], run: Callable[[], torch.Tensor]) -> None:
        with recorded_calls() as calls:
            result = run()
        if calls != expected or not (result == HIDDEN).all():
            failures.append(f"{what}: ran {calls}, result {result}")

    def gathered() -> torch.Tensor:
        rows = distribute_tensor(torch.ones(ROWS, HIDDEN), mesh, [S0])
        columns = distribute_tensor(torch.ones(INNER, HIDDEN), mesh, [S0])
        whole = rows.redistribute(placements=[R])
        F.linear(whole, columns)
        return F.linear(whole, columns).to_local()

    def in_a_thread() -> torch.Tensor:
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(summed()))
        thread.start()
        thread.join()
        return results[0]

    def nested() -> torch.Tensor:
        with tpkernels.fused_dtensor():
            pass
        return summed()

    def interrupted() -> torch.Tensor:
        """An error leaves deferred results, which are computed later."""
        y = None
        with contextlib.suppress(KeyError), tpkernels.fused_dtensor():
            y = F.linear(x, w)
            raise KeyError
        assert y is not None
        return y.full_tensor()

    def recomputed() -> torch.Tensor:
        a = x.detach().requires_grad_()
        y = checkpoint(
            lambda a: F.linear(a, w).redistribute(placements=[R]),
            a,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), tpkernels.fused_dtensor()),
        )
        y.sum().backward()
        assert a.grad is not None
        assert (a.grad.to_local() == INNER).all()
        result: torch.Tensor = y.to_local()
        return result

    with tpkernels.fused_dtensor():
        expect("within", [AR], summed)
        expect("in a thread", [], in_a_thread)
        expect("nested", [AR], nested)
        expect("recomputed", [AR, AR], recomputed)
        with torch.no_grad():
            expect("no_grad", [AR], summed)
        with torch.inference_mode():
            expect("inference_mode", [AR], summed)
            expect("inference_mode, gather", [AG], gathered)
    expect("outside", [], summed)
    expect("interrupted", [], interrupted)
    if DTensor.redistribute is not own:
        failures.append("redistribute stayed replaced")
    return failures


def test_the_context(ranks: RanksFixture) -> None:
    report(text for rank in ranks(2).run(context_job) for text in rank)


def autograd_job() -> None:
    """What autograd sees without a torch function in between; and a result that is too late."""
    mesh = make_mesh((2,), ["autograd"])
    x = distribute_tensor(torch.ones(ROWS, HIDDEN), mesh, [S1]).requires_grad_()
    w = distribute_tensor(torch.ones(INNER, HIDDEN), mesh, [S1])
    with tpkernels.fused_dtensor():
        grad = distribute_tensor(torch.ones(ROWS, INNER), mesh, [R])
        torch.autograd.backward(F.linear(x, w), grad)
        assert x.grad is not None
        assert (x.grad.to_local() == INNER).all()  # type: ignore[attr-defined]
        a = x.detach()
        y = F.linear(a, w)
        assert (y.redistribute(placements=[R]).to_local() == HIDDEN).all()
        a.add_(1)
        with pytest.raises(RuntimeError, match="changed in place after its result was redistrib"):
            y.to_local()


def _summed(x: DTensor, w: DTensor) -> torch.Tensor:
    return F.linear(x, w).redistribute(placements=[R]).to_local()


def compiled_job() -> list[str]:
    mesh = make_mesh((2,), ["compiled"])
    x = distribute_tensor(torch.ones(ROWS, HIDDEN), mesh, [S1])
    w = distribute_tensor(torch.ones(INNER, HIDDEN), mesh, [S1])
    compiled = torch.compile(_summed, backend="aot_eager", fullgraph=True)
    with recorded_calls() as calls, tpkernels.fused_dtensor():
        assert (compiled(x, w) == HIDDEN).all()
    return calls


def test_compiled_code_is_left_alone(ranks: RanksFixture) -> None:
    assert ranks(2).run(compiled_job) == [[], []]


def test_autograd(ranks: RanksFixture) -> None:
    ranks(2).run(autograd_job)
