#include "calls/caller.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "calls/python.h"
#include "host/call_records.h"

namespace tpkernels::calls {
namespace {

constexpr int kMaxFrames = 24;  // outer frames are not searched

// Text of a position in Python code. On Python 3.11 and later a position is an instruction, because
// finding the line of an instruction takes longer than everything else here.
struct CallerText {
  PyCodeObject* code;  // a reference, so no other code object gets this address
  int position;
  unsigned size;  // 0: code of torch or of this package
  char text[112];
};

// A direct-mapped cache, under the GIL: a call touches two cache lines per frame.
CallerText caller_texts[1024];

std::string to_string(PyObject* text) {
  Py_ssize_t size = 0;
  const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size);
  if (!utf8) return PyErr_Clear(), "?";  // surrogates in a path
  return {utf8, static_cast<std::size_t>(size)};
}

std::string describe(PyFrameObject* frame, PyCodeObject* code) {
  static const std::string* const folders = [] {
    const auto folder = [](const char* module) {
      const std::string file =
          to_string(py::object(py::module_::import(module).attr("__file__")).ptr());
      return file.substr(0, file.rfind('/') + 1);
    };
    return new std::string[2]{folder("torch"), folder("tpkernels")};
  }();
  const std::string file = to_string(code->co_filename);
  for (int i = 0; i < 2; ++i) {
    if (file.compare(0, folders[i].size(), folders[i]) == 0) return "";
  }
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame)) +
         " in " + to_string(code->co_name);
}

const CallerText& find_text(PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
#if PY_VERSION_HEX >= 0x030B0000
  const int position = PyFrame_GetLasti(frame);
#else
  const int position = PyFrame_GetLineNumber(frame);
#endif
  const std::uint64_t key =
      reinterpret_cast<std::uintptr_t>(code) + static_cast<unsigned>(position);
  CallerText& entry = caller_texts[key * 0x9E3779B97F4A7C15 >> 54];
  if (entry.code != code || entry.position != position) {
    const std::string text = describe(frame, code);
    entry.size = static_cast<unsigned>(std::min(text.size(), sizeof(entry.text)));
    std::copy_n(text.data(), entry.size, entry.text);
    entry.position = position;
    std::swap(entry.code, code);
  }
  Py_XDECREF(code);
  return entry;
}

}  // namespace

std::string_view find_caller() {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string_view caller;
  for (int i = 0; frame && i < kMaxFrames && caller.empty(); ++i) {
    const CallerText& entry = find_text(frame);
    caller = {entry.text, entry.size};
    PyFrameObject* const outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  return caller;
}

RecordCaller::RecordCaller() { host::set_caller(find_caller()); }

RecordCaller::~RecordCaller() { host::set_caller({}); }

}  // namespace tpkernels::calls
