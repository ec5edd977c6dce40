// The Python line that makes a call, for the records of calls (host/call_records.h).
#pragma once

#include <string_view>

namespace tpkernels::calls {

// Returns the innermost Python line outside torch and this package, for example
// "train.py:41 in step". Empty on a thread that runs no such line, such as a thread of autograd.
// Requires the GIL. The result is valid until the next call.
std::string_view find_caller();

// Passes `find_caller` to the records during its lifetime.
class RecordCaller {
 public:
  RecordCaller();
  ~RecordCaller();
  RecordCaller(const RecordCaller&) = delete;
  RecordCaller& operator=(const RecordCaller&) = delete;
};

}  // namespace tpkernels::calls
