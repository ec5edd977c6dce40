#pragma once

#include <stdexcept>

namespace tpkernels {

// A valid request that this machine, or a library, does not support. The text says what is needed.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tpkernels
