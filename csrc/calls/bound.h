// A planned call that the extension runs by itself: its collective with everything that does not
// change from call to call.
#pragma once

#include <pybind11/pybind11.h>

#include "calls/arguments.h"

namespace tpkernels::calls {

class Bound {
 public:
  Bound() = default;
  virtual ~Bound() = default;
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  // Whether it can run a call with these arguments. It sees what the key of the call does not
  // tell, such as strides; the other calls go through Python.
  virtual bool takes(const Slots&, const Tensor& x) const { return is_contiguous(x); }

  // Runs it, with the group's turn: the op's result. Throws what the collective throws, and
  // error_already_set.
  virtual pybind11::object run(const Slots& slots, const Tensor& x) const = 0;
};

}  // namespace tpkernels::calls
