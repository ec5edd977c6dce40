// Causal attention on tensors: the kernel of csrc/host/attention.h on the torch thread pool.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace tpkernels::calls {

// Returns the attention of q [B, H, T, D] to k [B, Hkv, Tk, D] and v [B, Hkv, Tk, Dv], as
// contiguous [B, T, H, Dv] of their dtype: fp32, fp16 or bf16. Elements are contiguous, all other
// strides are free. H is a multiple of Hkv.
//   sequences  int64 [S, 6], whose rows are host::Sequence. Their queries do not overlap. Queries
//              of no sequence give 0. None: the queries of a batch entry are the last T of Tk.
//   window     maximum keys that a query sees, including its own; 0: no limit
//   cap        a score becomes cap * tanh(score / cap); 0: no cap
//   sinks      fp32 [H]: a logit of each head that has no value; or None
// Throws std::invalid_argument.
pybind11::object attention(const pybind11::object& q, const pybind11::handle& k,
                           const pybind11::handle& v, float scale,
                           const pybind11::handle& sequences, std::int64_t window, float cap,
                           const pybind11::handle& sinks);

}  // namespace tpkernels::calls
