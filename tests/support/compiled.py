"""A compiler for tests. Inductor makes its graphs with all passes, and they are run as graphs: no
code is generated. Inductor's own patterns are off, because their set-up takes most of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._guards import detect_fake_mode

from tests.support.ordered import called


def graph_runner(seen: list[Counter[str]]) -> Callable[..., Any]:
    """A backend for ``torch.compile``. ``seen`` gets the count of each op in each graph."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def run(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(module, options.get("is_inference", False))
        module.recompile()
        overloads = [name for name in called(module) if isinstance(name, torch._ops.OpOverload)]
        seen.append(Counter(each._schema.name for each in overloads))
        return make_boxed_func(module.forward)

    without = {"pattern_matcher": False}
    return lambda module, inputs: compile_fx(
        module, inputs, inner_compile=run, config_patches=without
    )
