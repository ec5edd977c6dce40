"""Starting ranks on this machine, and calling what they hold: ``Ranks(4).run(function, ...)``,
``Executor(4, "module:Class").call("method", ...)``."""

from tpkernels.launch.executor import Executor
from tpkernels.launch.group_executor import GroupExecutor, serve_group
from tpkernels.launch.rank_process import fork_server
from tpkernels.launch.ranks import RankError, Ranks
from tpkernels.launch.worker import Outcome

__all__ = [
    "Executor",
    "GroupExecutor",
    "Outcome",
    "RankError",
    "Ranks",
    "fork_server",
    "serve_group",
]
