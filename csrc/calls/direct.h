// The algorithm `direct` on CPU tensors: a collective on shared memory, and planned calls that run
// the collective and the matmul before or after it without Python code.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "calls/group_calls.h"
#include "calls/tensor.h"
#include "host/collectives.h"

namespace tpkernels::calls {

// Operations after the reduction. A tensor without data is an absent operand.
host::Epilogue make_epilogue(const Tensor& out, const Tensor& bias = {},
                             const Tensor& residual = {});
host::RmsNorm make_rms_norm(const Tensor& out, const Tensor& weight, double eps);

// A collective and its parameters, agreed on by the ranks when the call was planned.
class Collective {
 public:
  // `name` is an argument of host::collective(). Keeps the Python object `channel` alive.
  // `tree` of an all-reduce: its input has the local nodes, [nodes, ...], instead of a partial sum.
  Collective(const pybind11::object& channel, std::shared_ptr<host::Segments> segments,
             std::uint32_t signature, std::string description, const std::string& name,
             host::Shards shards, std::shared_ptr<const host::SumTree> tree);

  // Requires contiguous tensors of supported dtypes, with the shapes in host/collectives.h.
  // Releases the GIL. Throws the errors of the channel. `out` of an all-reduce may be `x`; peers
  // then do not read `x` in place, because it is overwritten.
  void run(const Tensor& x, const Tensor& out, const host::Epilogue& epilogue,
           const host::RmsNorm& norm = {}, const host::Routing* routing = nullptr,
           const Tensor& weights = {}) const;

  // Whether the tensor has a single shard, so that no data is exchanged.
  bool has_single_shard() const { return shards_.layout.sizes.size() == 1; }
  // Whether the output has the shape of the local input.
  bool keeps_shape() const {
    return !tree_ && (shards_.layout.sizes.empty() || has_single_shard());
  }
  const host::SumTree* tree() const { return tree_.get(); }

 private:
  pybind11::object channel_owner_;
  host::Channel& channel_;
  std::shared_ptr<host::Segments> segments_;
  std::uint32_t signature_;
  std::string description_;
  host::Shards shards_;
  std::shared_ptr<const host::SumTree> tree_;
  host::Collective run_;
};

// Computes out[t] = sum over j of weights[t, j] * rows[places[t, j]], in the order of j, with
// host::weighted_sum. out [tokens, width], places int64 [tokens, k]. Throws std::invalid_argument
// if the operands do not fit.
void weigh_rows(const Tensor& rows, const Tensor& places, const Tensor& weights, const Tensor& out);

// A planned call on contiguous tensors of one dtype. tpkernels/algorithms/direct/cpu.py runs all
// other calls.
class Direct final : public BoundCall {
 public:
  // `shape` is the shape of the local output of the collective. `has_matmul`: the op has a matmul,
  // and its second argument is the weight, or a list of weights if it `gathers`.
  Direct(std::shared_ptr<const Collective> collective, const Arguments& arguments, bool in_place,
         pybind11::tuple shape, bool has_matmul, bool gathers, bool return_gathered, double eps);

  bool accepts(const Slots& slots, const Tensor& x) const override;
  pybind11::object run(const Slots& slots, const Tensor& x) const override;

 private:
  pybind11::object gather_and_multiply(const Slots& slots, const Tensor& x) const;

  std::shared_ptr<const Collective> collective_;
  int bias_, residual_, norm_weight_;  // slots, or -1
  bool in_place_;
  pybind11::tuple shape_;
  bool has_matmul_;
  bool gathers_;
  bool return_gathered_;
  double eps_;
};

}  // namespace tpkernels::calls
