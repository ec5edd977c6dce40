"""This rank's place in its groups as a part of the key of torch's compile caches.

A call of an op in a graph has the name of its group, not how many ranks that has nor which of them
this is, and the shape of its result may depend on both: the latter where shards are uneven. Torch's
own collectives take the size as an argument for that reason. Without it, a graph that was compiled
for one rank would be found in the cache by a job of two, or by the other rank.
"""

from __future__ import annotations

import re

import torch

from tpkernels import groups

_OURS = re.compile(r" ?tpkernels\{[^}]*\}")


def add_positions() -> None:
    """Has the caches tell graphs apart by this rank's place in the groups that the ops have used.
    Called while a graph is traced, before its key is made. What the user has set stays."""
    places = ", ".join(f"{name}: {rank} of {world}" for name, rank, world in groups.positions())
    config = torch.compiler.config
    theirs = _OURS.sub("", config.cache_key_tag)
    tag = f"{theirs} tpkernels{{{places}}}".strip()
    if config.cache_key_tag != tag:
        config.cache_key_tag = tag
