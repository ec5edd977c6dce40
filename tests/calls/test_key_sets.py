"""Key sets that are read from torch's memory are those that torch reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.calls.test_shortcut import Dispatches
from tpkernels import _C
from tpkernels.ops import shortcut

calls = _C.calls


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    yield
    shortcut.outside_modes(shortcut.find_key_sets)


def check_thread() -> None:
    assert calls.keys_of_thread() == shortcut.keys_of_thread()


def check(*tensors: torch.Tensor) -> None:
    check_thread()
    for tensor in tensors:
        assert calls.keys_of_tensor(tensor) == torch._C._dispatch_keys(tensor).raw_repr()


def in_transforms() -> None:
    torch.func.vmap(lambda x: (check(x), x)[1])(torch.ones(3, 2))
    torch.func.grad(lambda x: (check(x), x.sum())[1])(torch.ones(3))


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
            check(torch.ones(2), torch.nn.Parameter(torch.ones(3)))


def of_kinds() -> None:
    x = torch.ones(4, 4)
    views = (x.t(), torch._neg_view(x), x.to(torch.complex64).conj(), x.requires_grad_())
    check(*views, x.to_sparse(), x.detach().to_mkldnn(), x.to("meta"), x.double(), x.view(2, 8))


def in_a_thread() -> None:
    def work() -> None:
        check(torch.ones(2))
        with torch.inference_mode():
            check(torch.ones(2))

    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("work", [in_transforms, in_modes, of_kinds, in_a_thread])
@pytest.mark.parametrize("from_memory", [True, False])
def test_key_sets_are_those_of_torch(work: Callable[[], None], from_memory: bool) -> None:
    if not from_memory:
        calls.find_key_sets([], (0, 0))
    work()


def test_a_torch_that_keeps_them_elsewhere_is_asked() -> None:
    x, meta, thread = torch.ones(1), torch.ones(1, device="meta"), shortcut.keys_of_thread()
    right = [(each, each._cdata, torch._C._dispatch_keys(each).raw_repr()) for each in (x, meta)]
    (tensor, impl, keys), other = right
    assert not calls.find_key_sets([(tensor, impl, keys + 1), other], thread)
    assert not calls.find_key_sets([(tensor, impl + 8, keys), other], thread)
    assert not calls.find_key_sets([right[0], right[0]], thread)  # nothing to tell words apart by
    check(x, meta)


def test_key_sets_are_found_in_torch_2_13() -> None:
    """Shows a torch in which the shortcut is slower than it could be."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("other versions may keep them elsewhere")
    assert shortcut.outside_modes(shortcut.find_key_sets)
