"""``tpkernels bench``: checks ops, then times them beside what they replace and consist of.

sweep (and models)  what is measured; refuses what cannot be
measuring           one case on the ranks, with inputs, baselines and roofline
statistics          what samples say
results, file       the figures, and the file they are kept in
validation          whether a file holds a report
run, command        the loop over the cases; the command line
table, plots, page  how it is shown
compare             ``tpkernels compare``: two files
"""

from tpkernels.cli.bench.command import bench
from tpkernels.cli.bench.compare import compare

__all__ = ["bench", "compare"]
