#include "calls/caller.h"

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "calls/python.h"
#include "host/call_records.h"

namespace tpkernels::calls {
namespace {

constexpr int kMaxFrames = 24;               // outer frames are not searched
constexpr std::size_t kMaxPositions = 1024;  // in the cache

// A position in Python code. On Python 3.11 and later it is the instruction, because finding the
// line of an instruction takes longer than everything else here.
struct Position {
  PyCodeObject* code;  // the cache owns a reference, so the address is not reused
  int position;
  bool operator==(const Position& other) const {
    return code == other.code && position == other.position;
  }
};

struct Hash {
  std::size_t operator()(const Position& position) const {
    return std::hash<void*>()(position.code) * 31 + static_cast<std::size_t>(position.position);
  }
};

// Text by position. Empty for torch and this package. Under the GIL. Never destroyed, because the
// interpreter may end first.
std::unordered_map<Position, std::string, Hash>& known_positions() {
  static auto* const positions = new std::unordered_map<Position, std::string, Hash>;
  return *positions;
}

std::string to_string(PyObject* text) {
  Py_ssize_t size = 0;
  const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size);
  if (!utf8) return PyErr_Clear(), "?";  // surrogates in a path
  return {utf8, static_cast<std::size_t>(size)};
}

std::string describe(PyFrameObject* frame, PyCodeObject* code) {
  static const std::string* const folders = [] {
    const auto folder = [](const char* module) {
      std::string file = to_string(import_static(module, "__file__"));
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

const std::string& find_text(PyFrameObject* frame) {
  PyCodeObject* const code = PyFrame_GetCode(frame);
#if PY_VERSION_HEX >= 0x030B0000
  const Position position{code, PyFrame_GetLasti(frame)};
#else
  const Position position{code, PyFrame_GetLineNumber(frame)};
#endif
  auto& positions = known_positions();
  const auto known = positions.find(position);
  if (known != positions.end()) {
    Py_DECREF(code);
    return known->second;
  }
  std::string text = describe(frame, code);
  if (positions.size() >= kMaxPositions) {
    const auto dropped = std::exchange(positions, {});  // finalizers may make calls
    for (const auto& entry : dropped) Py_DECREF(entry.first.code);
  }
  const auto [entry, added] = positions.try_emplace(position, std::move(text));
  if (!added) Py_DECREF(code);
  return entry->second;
}

}  // namespace

std::string find_caller() {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::string caller;
  for (int i = 0; frame && i < kMaxFrames && caller.empty(); ++i) {
    caller = find_text(frame);
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
