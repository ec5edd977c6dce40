// Memory for results and large temporaries on the CPU.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace tpkernels::calls {

// From this size on, fresh memory comes straight from the kernel, page by page. For a 32 MiB fp32
// all_reduce on a 2-core AMD EPYC (Zen 4), 2026-11-22, that nearly doubles the time:
// benchmarks/results/cpu-2core-functional.md.
constexpr std::size_t kLargeBytes = std::size_t{4} << 20;

// `torch.empty(shape, dtype=dtype, device="cpu")`. A large tensor's memory comes from the pool and
// goes back to it with the tensor's storage, which cannot be resized; if the pool has none, it is
// torch's, with huge pages.
pybind11::object empty(const pybind11::tuple& shape, const pybind11::handle& dtype);

}  // namespace tpkernels::calls
