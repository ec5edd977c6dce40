// The algorithm `direct` on CPU tensors: one collective on shared memory, and the planned calls
// that are a matmul, the collective, and matmuls, without Python code.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "calls/tensor.h"
#include "calls/turns.h"
#include "host/collectives.h"

namespace tpkernels::calls {

// What follows a sum. Tensors without data are absent.
host::Epilogue epilogue(const Tensor& out, const Tensor& bias = {}, const Tensor& residual = {});
host::RmsNorm rms_norm(const Tensor& out, const Tensor& weight, double eps);

// A collective with what the ranks agreed on when it was planned.
class Collective {
 public:
  // One of host::collective()'s. Keeps `channel`, Python's object, alive.
  Collective(const pybind11::object& channel, std::shared_ptr<host::Segments> segments,
             std::uint32_t signature, std::string text, const std::string& name,
             host::Shards shards);

  // Contiguous tensors of supported dtypes; collectives.h has their shapes. Gives up the GIL, and
  // throws what the channel throws. `out` of an all-reduce may be `x`; then peers cannot read `x`
  // in place, as it is being overwritten.
  void run(const Tensor& x, const Tensor& out, const host::Epilogue& after,
           const host::RmsNorm& norm = {}, const host::Routing* routing = nullptr,
           const Tensor& weights = {}) const;

  // Whether there is only one shard, of which nothing has to be copied to others.
  bool is_alone() const { return shards_.layout.sizes.size() == 1; }
  // Whether the result has the shape of this rank's input.
  bool keeps_shape() const { return shards_.layout.sizes.empty() || is_alone(); }

 private:
  pybind11::object keep_;
  host::Channel& channel_;
  std::shared_ptr<host::Segments> segments_;
  std::uint32_t signature_;
  std::string text_;
  host::Shards shards_;
  host::Collective run_;
};

// out [tokens, width] = sum over j of weights[., j] * rows[places[., j]], in order: host::weigh of
// rows of one rank. places [tokens, k] of int64. Throws std::invalid_argument for other operands.
void weigh_rows(const Tensor& rows, const Tensor& places, const Tensor& weights, const Tensor& out);

// A planned call on contiguous tensors of one dtype. tpkernels/algorithms/direct/cpu.py has the
// rest.
class Direct final : public Bound {
 public:
  // `shape` is that of the tensor that the collective makes on this rank. `multiplies`: the second
  // argument is a weight, or a list of them, of an op that `gathers`.
  Direct(std::shared_ptr<const Collective> collective, const Arguments& arguments, bool in_place,
         pybind11::tuple shape, bool multiplies, bool gathers, bool return_gathered, double eps);

  bool takes(const Slots& slots, const Tensor& x) const override;
  pybind11::object run(const Slots& slots, const Tensor& x) const override;

 private:
  pybind11::object gather_and_multiply(const Slots& slots, const Tensor& x) const;

  std::shared_ptr<const Collective> collective_;
  int bias_, residual_, norm_weight_;  // where they are; -1: nowhere
  bool in_place_;
  pybind11::tuple shape_;
  bool multiplies_;
  bool gathers_;
  bool return_gathered_;
  double eps_;
};

}  // namespace tpkernels::calls
