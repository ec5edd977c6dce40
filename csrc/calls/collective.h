// A collective on CPU tensors with what the ranks agreed on when it was planned.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "calls/tensor.h"
#include "host/collectives.h"

namespace tpkernels::calls {

// Added to a sum; absent where `data` is null.
struct Addends {
  Tensor bias{};
  Tensor residual{};
};

// The normalisation of a sum's rows; absent where `out` has no data.
struct Norm {
  Tensor weight{};
  Tensor out{};
  double eps = 0;
};

class Collective {
 public:
  // Keeps `channel`, Python's object, alive.
  Collective(const pybind11::object& channel, std::shared_ptr<host::Segments> segments,
             std::uint32_t signature, std::string text);

  // Contiguous tensors of supported dtypes; collectives.h has their shapes. All give up the GIL,
  // and throw what the channel throws.
  void all_gather(const Tensor& x, const Tensor& out, const host::ShardLayout& layout) const;
  void reduce_scatter(const Tensor& x, const Tensor& out, const host::ShardLayout& layout,
                      const Addends& addends) const;
  void all_to_all(const Tensor& x, const Tensor& out, const host::ShardLayout& given,
                  const host::ShardLayout& taken, std::size_t largest) const;
  // `out` may be `x`. Peers cannot read `x` in place then, as it is being overwritten.
  void all_reduce(const Tensor& x, const Tensor& out, const Addends& addends,
                  const Norm& norm = {}) const;

 private:
  host::CallId id() const { return {signature_, text_}; }
  host::Source source(const Tensor& x) const;

  pybind11::object keep_;
  host::Channel& channel_;
  std::shared_ptr<host::Segments> segments_;
  std::uint32_t signature_;
  std::string text_;
};

// What DLPack calls a dtype; throws std::invalid_argument for one that the ops do not take.
host::DType dtype_of(const Tensor& x);

}  // namespace tpkernels::calls
