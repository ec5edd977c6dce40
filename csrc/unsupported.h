#pragma once

#include <stdexcept>

namespace tpkernels {

// A valid request that this machine or a library does not support. The message states the
// requirement.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tpkernels
