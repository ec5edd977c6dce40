"""The way past torch's dispatcher is taken where the dispatcher has nothing to do, and nowhere
else."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.processes import output_of
from tests.support.ranked import fresh_group, functions_called, on_ranks
from tests.support.tiers import sweep
from tpkernels import _C
from tpkernels.common import defaults
from tpkernels.ops import shortcut
from tpkernels.ops.shortcut import is_plain

WORLD = 2


class Counting:
    """Counts calls of the ops."""

    seen = 0

    def count(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += "tpkernels" in str(function)
        return function(*args, **(kwargs or {}))


class Functions(Counting, TorchFunctionMode):
    __torch_function__ = Counting.count


class Dispatches(Counting, TorchDispatchMode):
    __torch_dispatch__ = Counting.count


class Own(torch.Tensor):
    """A subclass that counts the functions it is passed to."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        cls.seen += "tpkernels" in str(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@on_ranks(WORLD)
def test_modes_subclasses_and_profilers_see_the_op() -> None:
    with fresh_group(autotune=False) as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        for _ in range(3):
            tpkernels.all_reduce(x, group)
            tpkernels.matmul_all_reduce(x, w, group)
        for mode in (Functions(), Dispatches()):
            with mode:
                tpkernels.all_reduce(x, group)
                tpkernels.matmul_all_reduce(x, w, group)
            assert mode.seen == 2, f"{type(mode).__name__} saw {mode.seen} calls"
        tpkernels.all_reduce(x.as_subclass(Own), group)
        assert Own.seen == 1, f"the subclass saw {Own.seen} calls"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            tpkernels.all_reduce(x, group)
        assert any(event.name == "tpkernels::all_reduce" for event in profile.events())


@on_ranks(WORLD)
def test_what_the_dispatcher_does_is_done() -> None:
    with fresh_group(autotune=False) as group:
        world = group.size()
        x, w = torch.full((4, 8), 2.0), torch.ones(8, 6)
        for _ in range(3):
            tpkernels.all_reduce(x, group)
            tpkernels.all_reduce_(x.clone(), group)
            tpkernels.matmul_all_reduce(x, w, group)
        negative = torch._neg_view(x)  # contiguous, with a bit that torch resolves
        assert torch.equal(tpkernels.all_reduce(negative, group), x * -world), "negative"
        leaf = x.clone().requires_grad_()
        result = tpkernels.all_reduce(leaf, group)
        assert result.requires_grad, "gradient"
        result = tpkernels.matmul_all_reduce(x, w.clone().requires_grad_(), group)
        assert result.requires_grad, "gradient of a weight"
        bias = torch.ones(6, requires_grad=True)
        tpkernels.matmul_all_reduce(x, w, group, bias=bias.detach())
        result = tpkernels.matmul_all_reduce(x, w, group, bias=bias)
        assert result.requires_grad, "gradient of a bias"
        with pytest.raises(NotImplementedError):
            tpkernels.all_reduce_(leaf, group)
        with torch.no_grad():
            assert not tpkernels.all_reduce(leaf, group).requires_grad, "no_grad"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = tpkernels.matmul_all_reduce(x, w, group)
        assert result.dtype == torch.bfloat16, "autocast"
        target = x.clone()
        before = target._version
        tpkernels.all_reduce_(target, group)
        assert target._version > before, "version"
        with torch.inference_mode():
            inference = x.clone()
            tpkernels.all_reduce_(inference, group)
            tpkernels.all_reduce_(target, group)
            assert torch.equal(inference, x * world), "inference mode"
            assert tpkernels.all_reduce(x, group).is_inference(), "an inference result"
        assert target._version > before + 1, "version in inference mode"
        dual = torch.autograd.forward_ad
        with dual.dual_level(), pytest.raises(NotImplementedError):
            tpkernels.all_reduce(dual.make_dual(x, x), group)


def calls_of(group: dist.ProcessGroup, packed: bool) -> dict[str, Callable[[], object]]:
    """Each op with plain tensors, made in the mode that is on."""
    x, w, name = torch.ones(4, 8), torch.ones(8, 6), group.group_name
    bias = torch.nn.Parameter(torch.ones(6), requires_grad=False)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: tpkernels.all_reduce(x, group),
        "all_reduce_": lambda: tpkernels.all_reduce_(x, name),
        "all_gather": lambda: tpkernels.all_gather(x, group, 1),
        "reduce_scatter": lambda: tpkernels.reduce_scatter(x, group),
        "matmul_all_reduce": lambda: tpkernels.matmul_all_reduce(x, w, group, bias=bias),
        "matmul_reduce_scatter": lambda: tpkernels.matmul_reduce_scatter(x, w, group),
        "all_gather_matmul": lambda: tpkernels.all_gather_matmul(x, [w, w], group),
        "overload": lambda: torch.ops.tpkernels.all_reduce.default(x[1:], name),
    }
    if packed:
        factor = tpkernels.pack(w)
        calls["packed"] = lambda: tpkernels.matmul_all_reduce(x, factor, group)
    return calls


def dispatched(call: Callable[[], object]) -> bool:
    """Whether a call goes through the dispatcher."""
    with functions_called("tpkernels.ops.shortcut") as names:
        call()
    return any(name.endswith(".dispatched") for name in names)


@pytest.mark.parametrize("from_memory", [True, False])
@on_ranks(WORLD)
def test_warm_calls_of_plain_tensors_take_the_shortcut(from_memory: bool) -> None:
    """Also where the extension does not find key sets in torch's memory."""
    if not from_memory:
        _C.calls.find_key_sets([], (0, 0))
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with fresh_group(autotune=False) as group, context():
            for op, call in calls_of(group, packed=context is not torch.enable_grad).items():
                cold, warm = dispatched(call), dispatched(call)
                assert cold and not warm, f"{op} in {context.__name__}: {cold}, then {warm}"
    shortcut.outside_modes(shortcut.find_key_sets)


def warm_calls_job() -> list[tuple[str, str, bool, bool]]:
    """Of each op's warm call: its result, whether it is dispatched, and whether Python runs it."""
    found = []
    with fresh_group(autotune=False) as group, torch.no_grad():
        for op, call in calls_of(group, packed=True).items():
            call()
            with functions_called("tpkernels") as names:
                result = call()
            short = "tpkernels.ops.shortcut.dispatched" not in names
            found.append((op, str(result), short, "tpkernels.algorithms.backends.run" not in names))
        assert is_plain(torch.ones(1)) == all(short for _, _, short, _ in found)
    return found


@pytest.mark.thorough
def test_one_variable_turns_all_of_it_off(ranks: RanksFixture) -> None:
    """With the same results. The process that starts ranks reads the variable."""
    code = (
        "from tests.calls.test_shortcut import warm_calls_job\n"
        "from tpkernels.launch import Ranks\n"
        "with Ranks(2) as ranks: print(ranks.run(warm_calls_job))"
    )
    in_python: Any = ast.literal_eval(output_of("-c", code, TPKERNELS_PYTHON_CALLS="1"))
    for calls, short in zip(in_python, ranks(WORLD).run(warm_calls_job), strict=True):
        assert [call[:2] for call in calls] == [call[:2] for call in short]
        assert not any(call[2] or call[3] for call in calls)
        assert all(call[2] and call[3] for call in short)


def test_a_malformed_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPKERNELS_PYTHON_CALLS", "yes")
    with pytest.raises(ValueError, match="TPKERNELS_PYTHON_CALLS is 'yes'; it must be 0, or 1"):
        defaults.python_calls.__wrapped__()


@pytest.mark.parametrize("backend", sweep(["eager", "aot_eager", "inductor"], 2))
@on_ranks(WORLD)
def test_a_compiled_call_is_the_op(backend: str) -> list[str]:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with fresh_group(autotune=False) as group:
        x = torch.ones(4, 8)
        for _ in range(3):
            tpkernels.all_reduce(x, group)
        name = group.group_name
        torch.compile(lambda x: tpkernels.all_reduce(x, name) + 1, backend=keep, fullgraph=True)(x)
        function = torch.compile(lambda x: tpkernels.all_reduce(x, name) + 1, backend=backend)
        same = torch.equal(function(x), x * dist.get_world_size() + 1)
        with torch.no_grad():
            function(x)
            if backend == "inductor" and dispatched(lambda: function(x)):
                return ["the compiled graph goes through the dispatcher"]
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    found = any("tpkernels.all_reduce" in target for target in targets)
    return [] if same and found else [f"{same}, {targets}"]


def test_what_is_plain() -> None:
    """What decides whether a local op may be run as a function."""
    x, parameter = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 4))
    contexts: dict[str, Any] = {
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "dispatch mode": Dispatches(),
        "function mode": Functions(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "profiler": torch.profiler.profile(),
    }
    found = {}
    for name, context in contexts.items():
        with context:
            found[name] = is_plain(x, [parameter.detach()], "name", None)
    assert found == {name: name in ("no_grad", "inference") for name in contexts}
    with torch.no_grad():
        assert is_plain(x, [parameter], None)
        assert not is_plain(x.as_subclass(Own))
        assert not is_plain(x, [torch.ones(2, device="meta")])
    assert is_plain(x, [x]) and not is_plain(x, [parameter])


# Key sets that are read from torch's memory are those that torch reports.


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    """Key sets are read from memory after a test that has stopped it."""
    yield
    shortcut.outside_modes(shortcut.find_key_sets)


def check_keys(*tensors: torch.Tensor) -> None:
    assert _C.calls.keys_of_thread() == shortcut.keys_of_thread()
    for tensor in tensors:
        assert _C.calls.keys_of_tensor(tensor) == torch._C._dispatch_keys(tensor).raw_repr()


def in_transforms() -> None:
    torch.func.vmap(lambda x: (check_keys(x), x)[1])(torch.ones(3, 2))
    torch.func.grad(lambda x: (check_keys(x), x.sum())[1])(torch.ones(3))


def in_modes() -> None:
    contexts = (
        torch.no_grad,
        torch.inference_mode,
        Dispatches,
        FakeTensorMode,
        lambda: torch.autocast("cpu"),
        torch.autograd.forward_ad.dual_level,
        contextlib.nullcontext,
    )
    for context in contexts:
        with context():
            check_keys(torch.ones(2), torch.nn.Parameter(torch.ones(3)))


def of_kinds() -> None:
    x = torch.ones(4, 4)
    views = (x.t(), torch._neg_view(x), x.to(torch.complex64).conj(), x.requires_grad_())
    check_keys(
        *views, x.to_sparse(), x.detach().to_mkldnn(), x.to("meta"), x.double(), x.view(2, 8)
    )


def in_a_thread() -> None:
    def work() -> None:
        check_keys(torch.ones(2))
        with torch.inference_mode():
            check_keys(torch.ones(2))

    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("work", [in_transforms, in_modes, of_kinds, in_a_thread])
@pytest.mark.parametrize("from_memory", [True, False])
def test_key_sets_are_those_of_torch(work: Callable[[], None], from_memory: bool) -> None:
    if not from_memory:
        _C.calls.find_key_sets([], (0, 0))
    work()


def test_a_torch_that_keeps_them_elsewhere_is_asked() -> None:
    x, meta, thread = torch.ones(1), torch.ones(1, device="meta"), shortcut.keys_of_thread()
    right = [(each, each._cdata, torch._C._dispatch_keys(each).raw_repr()) for each in (x, meta)]
    (tensor, impl, keys), other = right
    assert not _C.calls.find_key_sets([(tensor, impl, keys + 1), other], thread)
    assert not _C.calls.find_key_sets([(tensor, impl + 8, keys), other], thread)
    assert not _C.calls.find_key_sets(
        [right[0], right[0]], thread
    )  # nothing to tell words apart by
    check_keys(x, meta)


def test_key_sets_are_found_in_torch_2_13() -> None:
    """Shows a torch in which the shortcut is slower than it could be."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("other versions may keep them elsewhere")
    assert shortcut.outside_modes(shortcut.find_key_sets)
