#include "cuda/copies.h"

namespace tpkernels::cuda {
namespace {

constexpr int kNotSupported = 801;      // CUDA_ERROR_NOT_SUPPORTED
constexpr int kRelaxed = 2;             // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kNonBlocking = 0x1;  // CU_STREAM_NON_BLOCKING

// Whether a write to `to`, captured on the stream, makes a graph that could run. It does not run.
bool records_write(Handle stream, Address to) {
  const Driver& d = driver();
  if (d.begin_capture(stream, kRelaxed) != 0) return false;
  const bool taken = d.write_value(stream, to, kRaised, 0) == 0;
  Handle graph = nullptr, executable = nullptr;
  const bool ended = d.end_capture(stream, &graph) == 0 && graph != nullptr;
  const bool runs = ended && taken && d.instantiate(&executable, graph, 0) == 0;
  if (runs) d.destroy_executable(executable);
  if (ended) d.destroy_graph(graph);
  return runs;
}

// The same on a stream of its own. Relaxed, so that it does not disturb other threads' captures.
bool captures_write(Address to) {
  const Driver& d = driver();
  int mode = kRelaxed;
  if (d.exchange_capture_mode(&mode) != 0) return false;
  Handle stream = nullptr;
  const bool made = d.create_stream(&stream, kNonBlocking) == 0;
  const bool taken = made && records_write(stream, to);
  if (made) d.destroy_stream(stream);
  d.exchange_capture_mode(&mode);
  return taken;
}

}  // namespace

void copy(const Kernels& kernels, Stream stream, Address dst, Address src, std::size_t bytes) {
  if (bytes == 0) return;
  const ContextGuard guard(kernels.context());
  driver().check(driver().copy_async(dst, src, bytes, reinterpret_cast<Handle>(stream)),
                 "cuMemcpyAsync");
}

void raise_flag(Kernels& kernels, Stream stream, const Space& space, int index, bool captured) {
  if (!kernels.streams_write(captured)) return kernels.flag(stream, space, index);
  const ContextGuard guard(kernels.context());
  const auto to = reinterpret_cast<Address>(space.state + kStateFlags + index);
  const int code = driver().write_value(reinterpret_cast<Handle>(stream), to, kRaised, 0);
  if (code == kNotSupported && !captured) {
    kernels.no_stream_writes();
    return kernels.flag(stream, space, index);
  }
  driver().check(code, "cuStreamWriteValue64");
  if (!captured && !kernels.tried_captured_writes()) kernels.captured_writes(captures_write(to));
}

}  // namespace tpkernels::cuda
