// The bound calls of the algorithm `direct`: the local matmul where the op has one, then one
// collective. For contiguous tensors and results of x's dtype; tpkernels/algorithms/direct/cpu.py
// has the rest.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "calls/bound.h"
#include "calls/collective.h"

namespace tpkernels::calls {

using SharedCollective = std::shared_ptr<const Collective>;
using SharedLayout = std::shared_ptr<const host::ShardLayout>;

// `shape` is that of the op's result on this rank; of `all_gather_matmul` that of the gathered x,
// and `result_shapes` has those of the results.
std::shared_ptr<Bound> bind_all_reduce(SharedCollective collective, pybind11::tuple shape);
std::shared_ptr<Bound> bind_all_reduce_in_place(SharedCollective collective);
std::shared_ptr<Bound> bind_all_gather(SharedCollective collective, SharedLayout layout,
                                       pybind11::tuple shape);
std::shared_ptr<Bound> bind_reduce_scatter(SharedCollective collective, SharedLayout layout,
                                           pybind11::tuple shape);
std::shared_ptr<Bound> bind_all_gather_matmul(SharedCollective collective, SharedLayout layout,
                                              pybind11::tuple shape, pybind11::list result_shapes,
                                              bool return_gathered);
std::shared_ptr<Bound> bind_matmul_all_reduce(SharedCollective collective, pybind11::tuple shape);
std::shared_ptr<Bound> bind_matmul_reduce_scatter(SharedCollective collective, SharedLayout layout,
                                                  pybind11::tuple shape);

}  // namespace tpkernels::calls
