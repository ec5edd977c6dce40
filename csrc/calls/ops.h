// The bound calls of the algorithm `direct`, one class for each op: the local matmul where the op
// has one, then one collective. For contiguous tensors and results of x's dtype;
// tpkernels/algorithms/direct/cpu.py has the rest.
#pragma once

#include <pybind11/pybind11.h>

namespace tpkernels::calls {

// Adds the classes to _C.calls. `shape` is that of the op's result on this rank; for the all-gather
// and matmul that of the gathered x, and `result_shapes` has those of the results.
void bind_ops(pybind11::module_& m);
void bind_norm_ops(pybind11::module_& m);

}  // namespace tpkernels::calls
