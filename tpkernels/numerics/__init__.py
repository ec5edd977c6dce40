"""Where and how far a result is from its reference.

    print(tpkernels.numerics.compare(expected, y, atol=1e-2, rtol=1.6e-2, region_grid=(sizes, 4)))

`compare` sees a tensor as a matrix: all leading dims flattened, times the last one. Regions cut it
in a grid, so that a wrong share stands out among the right ones.
"""

from tpkernels.numerics.comparison import compare
from tpkernels.numerics.report import Element, Region, Report

__all__ = ["Element", "Region", "Report", "compare"]
