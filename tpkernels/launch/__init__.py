"""Starting ranks on this machine, and calling what they hold: ``Ranks(4).run(function, ...)``,
``Ranks(4, "module:Class").call("method", ...)``."""

from tpkernels.launch.group_executor import GroupExecutor, serve_group
from tpkernels.launch.ranks import Executor, Outcome, RankError, Ranks, fork_server

__all__ = [
    "Executor",
    "GroupExecutor",
    "Outcome",
    "RankError",
    "Ranks",
    "fork_server",
    "serve_group",
]
