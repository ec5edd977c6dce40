"""Predicted times of a transformer layer on any number of ranks, by the cost model of products on
meshes. Pure.

A layer here is its four products and their collectives. In prefill the activations between them are
sharded by rows: all-gather and product, product and reduce-scatter. In decode they are replicated:
product, product and all-reduce. Attention itself and norms are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpkernels.bench.models import LAYER, MODELS, Model, projection
from tpkernels.integers import ceil_div
from tpkernels.mesh.cost import fused_seconds
from tpkernels.planning.machines import Profile
from tpkernels.planning.rates import collective_seconds, product_seconds
from tpkernels.terminal import UsageError, at_least, check_known, number_in

PHASES = ("prefill", "decode")
_HELPS = 0.98  # of the time without overlap; less is within the spread of a measurement
_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """A layer in one phase on so many ranks, in seconds.

    Attributes:
        product: the products alone.
        communication: the collectives alone.
        overlapped: both, each collective as one op with the product next to it.
    """

    tp: int
    nodes: int
    phase: str
    product: float
    communication: float
    overlapped: float

    @property
    def unfused(self) -> float:
        """Products and collectives one after the other."""
        return self.product + self.communication

    @property
    def exposed(self) -> float:
        """What overlap leaves of the communication."""
        return self.overlapped - self.product

    @property
    def helps(self) -> bool:
        """Whether overlap makes the layer faster."""
        return self.overlapped < _HELPS * self.unfused

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "unfused": self.unfused,
            "exposed": self.exposed,
            "overlap_helps": self.helps,
        }


def tps_of(text: str) -> list[int]:
    """Numbers of ranks: ``"1..64"`` for the powers of two from 1 to 64, or ``"1,2,6"``."""
    span = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", text.strip())
    if span is not None:
        first, last = int(span[1]), int(span[2])
        tps = [1 << i for i in range(_MOST_RANKS.bit_length()) if first <= 1 << i <= last]
    else:
        tps = sorted({number_in(part) for part in text.split(",")})
    if not tps or not 1 <= tps[0] <= tps[-1] <= _MOST_RANKS:
        raise UsageError(
            f"--tp is '{text}'; pass numbers from 1 to {_MOST_RANKS}, such as 1,2,8, or 1..64 for "
            "the powers of two between"
        )
    return tps


def layer_times(
    model: str,
    tps: Sequence[int],
    profile: Profile,
    *,
    nodes: int | None,
    prefill: int,
    decode: int,
    itemsize: int,
) -> list[LayerTime]:
    """Both phases on each number of ranks.

    Args:
        nodes: how many there are; None: as many as the ranks need.
        prefill, decode: rows of the activations, over all ranks.

    Raises:
        UsageError: an unknown model, or more ranks than heads or than the nodes have.
    """
    check_known("model", [model], MODELS)
    at_least(1, prefill=prefill, decode=decode)
    heads = MODELS[model].heads
    for tp in tps:
        if tp > heads:
            raise UsageError(f"--tp {tp}: {model} has {heads} heads, which are not split")
        if nodes is not None and tp > nodes * profile.node:
            raise UsageError(
                f"--tp {tp}: {nodes} nodes of {profile.node} have {nodes * profile.node} devices; "
                "pass more --nodes"
            )
    rows = dict(zip(PHASES, (prefill, decode), strict=True))
    return [
        _layer(MODELS[model], tp, profile, phase, rows[phase], itemsize)
        for phase in PHASES
        for tp in tps
    ]


def _layer(
    model: Model, tp: int, profile: Profile, phase: str, rows: int, itemsize: int
) -> LayerTime:
    product = communication = overlapped = 0.0
    for name in LAYER:
        matmul = projection(model, name, tp)
        k, n = matmul.k, matmul.n
        shape = (rows, k, ceil_div(n, tp)) if matmul.column else (rows, ceil_div(k, tp), n)
        multiply = product_seconds(profile, *shape, itemsize)
        move = 0.0
        if phase == "prefill" or not matmul.column:
            nbytes = rows * (k if matmul.column else n) * itemsize
            move = collective_seconds(profile, nbytes, tp, passes=1 if phase == "prefill" else 2)
        product += multiply
        communication += move
        overlapped += fused_seconds(profile, shape, 0, move, tp, itemsize)
    return LayerTime(
        tp=tp,
        nodes=ceil_div(tp, profile.node),
        phase=phase,
        product=product,
        communication=communication,
        overlapped=overlapped,
    )


def summary(times: Sequence[LayerTime], phase: str) -> str:
    """Where overlap helps in a phase, where it stops, and the fastest number of ranks."""
    of_phase = [each for each in times if each.phase == phase]
    fastest = min(of_phase, key=lambda each: each.overlapped)
    helped = [each for each in of_phase if each.helps]
    if not helped:
        text = "overlap does not help"
    else:
        best = max(helped, key=lambda each: each.unfused / each.overlapped)
        text = (
            f"overlap helps with TP {', '.join(str(each.tp) for each in helped)}, most with TP "
            f"{best.tp} ({best.unfused / best.overlapped:.2f}x)"
        )
        beyond = [each.tp for each in of_phase if each.tp > helped[-1].tp]
        if beyond:
            text += f", and no more from TP {beyond[0]} on"
    over = next((each.tp for each in of_phase if each.communication > each.product), None)
    if over is not None:
        text += f"; from TP {over} on communication takes longer than the products"
    return f"{phase}: {text}; the fastest layer is that of TP {fastest.tp}"
