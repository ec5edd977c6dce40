"""Starting ranks on this machine, and calling what they hold: ``Ranks(4).run(function, ...)``,
``Ranks(4, Class).call("method", ...)``."""

from tpkernels.launch.ranks import Outcome, RankError, Ranks, fork_server

__all__ = ["Outcome", "RankError", "Ranks", "fork_server"]
