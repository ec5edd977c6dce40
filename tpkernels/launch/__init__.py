"""Starting ranks on this machine: ``Ranks(4).run(function, ...)``."""

from tpkernels.launch.rank_process import fork_server
from tpkernels.launch.ranks import RankError, Ranks
from tpkernels.launch.worker import Outcome

__all__ = ["Outcome", "RankError", "Ranks", "fork_server"]
