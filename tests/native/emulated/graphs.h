// Captured graphs of the emulated driver, and its failures on request.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

std::string failing;
int failing_code = 0;

int code_of(const char* function) { return failing == function ? failing_code : 0; }

// One capture at a time: what is queued on its stream goes into the graph, and runs at each launch.
struct Graph {
  void* stream;
  bool invalid = false;
  std::vector<std::function<void()>> nodes;
};
std::unique_ptr<Graph> capture;
int streams = 0, graphs = 0, executables = 0, capture_mode = 0;  // made but not destroyed

void run_or_capture(void* stream, const std::function<void()>& node) {
  if (capture && capture->stream == stream) {
    capture->nodes.push_back(node);
  } else {
    node();
  }
}

bool captures_writes = true;

// Whether a write on the stream is captured that cannot be.
bool spoils_capture(void* stream) {
  if (captures_writes || !capture || capture->stream != stream) return false;
  capture->invalid = true;
  return true;
}

}  // namespace

extern "C" {

// For tests: from now on the driver function `function` fails with `code`; "": none does.
void emulated_fail(const char* function, int code) {
  failing = function;
  failing_code = code;
}
// Whether a write can be captured; if not, it spoils the capture.
void emulated_captures_writes(bool can) { captures_writes = can; }
// Streams, graphs, executable graphs and captures that nobody has ended or destroyed, and whether
// the thread's capture mode is not the one that it began with.
int emulated_left() {
  return streams + graphs + executables + (capture != nullptr) + (capture_mode != 0);
}

int cuStreamCreate(void** stream, unsigned) {
  if (const int code = code_of("cuStreamCreate"); code != 0) return code;
  *stream = new char;
  ++streams;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  delete static_cast<char*>(stream);
  --streams;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (const int code = code_of("cuThreadExchangeStreamCaptureMode"); code != 0) return code;
  std::swap(*mode, capture_mode);
  return 0;
}
int cuStreamBeginCapture_v2(void* stream, int) {
  if (const int code = code_of("cuStreamBeginCapture"); code != 0) return code;
  capture = std::make_unique<Graph>(Graph{stream});
  return 0;
}
int cuStreamEndCapture(void*, Graph** graph) {
  const std::unique_ptr<Graph> ended = std::move(capture);
  if (const int code = code_of("cuStreamEndCapture"); code != 0) return code;
  *graph = ended->invalid ? nullptr : new Graph(*ended);
  graphs += !ended->invalid;
  return ended->invalid ? 901 : 0;
}
int cuGraphInstantiateWithFlags(Graph** executable, const Graph* graph, std::uint64_t) {
  if (const int code = code_of("cuGraphInstantiate"); code != 0) return code;
  *executable = new Graph(*graph);
  ++executables;
  return 0;
}
int cuGraphLaunch(const Graph* executable, void*) {
  for (const auto& node : executable->nodes) node();
  return 0;
}
int cuGraphExecDestroy(Graph* executable) {
  delete executable;
  --executables;
  return 0;
}
int cuGraphDestroy(Graph* graph) {
  delete graph;
  --graphs;
  return 0;
}

}  // extern "C"
