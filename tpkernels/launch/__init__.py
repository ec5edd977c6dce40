"""Ranks on this machine: ``Ranks(4).run(function, ...)`` calls a function on every rank,
``Ranks(4, Class).call("method", ...)`` a method of an object on every rank."""

from tpkernels.launch.ranks import Outcome, RankError, Ranks, fork_server

__all__ = ["Outcome", "RankError", "Ranks", "fork_server"]
