// Planned calls on CUDA tensors: Python queues their work, and the extension does what comes before
// each call and takes the same in all: whose turn it is, and whether anything has failed.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "calls/arguments.h"
#include "calls/bound.h"

namespace tpkernels::calls {

// Says that something may have failed on the GPUs of a group, so that Python has to look before
// the next call. All of it under the GIL.
class Alarm {
 public:
  // A word in host memory that a kernel sets to nonzero. It must stay there until `unwatch`.
  void watch(std::uint64_t word) { words_.push_back(word); }
  void unwatch(std::uint64_t word);

  bool rings() const;

  bool raised = false;  // by the host

 private:
  std::vector<std::uint64_t> words_;
};

// Runs `execute(call, arguments)`. `deterministic` is the value of torch's flag for deterministic
// algorithms that the call was planned with; none: it does not matter.
class Queued : public Bound {
 public:
  Queued(std::shared_ptr<const Arguments> arguments, pybind11::object execute,
         pybind11::object call, std::shared_ptr<const Alarm> alarm,
         std::optional<bool> deterministic);

  bool takes(const Slots& slots, const Tensor& x) const override;
  pybind11::object run(const Slots& slots, const Tensor& x) const override;

 private:
  std::shared_ptr<const Arguments> arguments_;
  pybind11::object execute_;
  pybind11::object call_;
  std::shared_ptr<const Alarm> alarm_;
  std::optional<bool> deterministic_;
};

}  // namespace tpkernels::calls
