// The Python line that makes a call, for the records of calls (host/call_records.h).
#pragma once

namespace tpkernels::calls {

// Passes the innermost Python line outside torch and this package to the records during its
// lifetime, for example "train.py:41 in step". The caller holds the GIL.
class RecordCaller {
 public:
  RecordCaller();
  ~RecordCaller();
  RecordCaller(const RecordCaller&) = delete;
  RecordCaller& operator=(const RecordCaller&) = delete;
};

}  // namespace tpkernels::calls
