"""Where a result differs from its reference, and by how much::

    print(tpkernels.numerics.compare(expected, y, atol=1e-2, rtol=1.6e-2, region_grid=(sizes, 4)))

`compare` views a tensor as a matrix: all leading dims flattened, by the last dim. It cuts the
matrix into a grid of regions, so that one wrong shard stands out.
"""

from tpkernels.numerics.comparison import compare
from tpkernels.numerics.report import Element, Region, Report

__all__ = ["Element", "Region", "Report", "compare"]
