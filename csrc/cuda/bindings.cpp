// _C.cuda: the kernels, and queries of the driver. Memory and streams are passed as integers.
// tpkernels/cuda checks the arguments.
#include "bindings.h"

#include <pybind11/stl.h>

#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels.h"

namespace py = pybind11;

namespace tpkernels::cuda {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

std::unique_ptr<Kernels> make_kernels(int device, const std::optional<std::string>& image) {
  if (image) return std::make_unique<Kernels>(device, image->data());
  const Image& embedded = embedded_image();
  if (embedded.size == 0) throw Unsupported("this extension was built without nvcc");
  return std::make_unique<Kernels>(device, embedded.bytes);
}

SumPartials make_sum(Address out, const std::vector<Address>& partials, int wire, u64 begin,
                     u64 count, const Epilogue& epilogue) {
  SumPartials call{};
  if (partials.size() > std::size(call.partials)) {
    throw py::value_error(std::to_string(partials.size()) + " partials; at most " +
                          std::to_string(kMaxWorld));
  }
  for (Address partial : partials) call.partials[call.world++] = pointer(partial);
  call.wire = wire;
  call.out = pointer(out);
  call.begin = begin;
  call.count = count;
  call.epilogue = epilogue;
  return call;
}

// Of (address, bytes) pairs.
Results make_results(const std::vector<std::pair<Address, u64>>& outputs) {
  Results results{};
  if (outputs.size() > std::size(results.outputs)) {
    throw py::value_error(std::to_string(outputs.size()) + " results; at most " +
                          std::to_string(kMostResults));
  }
  for (const auto& [out, bytes] : outputs) results.outputs[results.count++] = {pointer(out), bytes};
  return results;
}

// The arguments of kernels.
void bind_arguments(py::module_& m) {
  // The keys are those of DeviceWorkspace.arguments().
  py::class_<Space>(m, "Space")
      .def(py::init([](Address regions, Address state, Address control, int rank,
                       std::int64_t signature, u64 timeout_ns, int words, u64 buffers_at,
                       u64 buffer_stride, int world, u64 seed, u64 chaos) {
             return Space{pointer<const u64>(regions),
                          pointer<u64>(state),
                          pointer<u64>(control),
                          rank,
                          world,
                          static_cast<unsigned>(signature),
                          words,
                          timeout_ns,
                          buffers_at,
                          buffer_stride,
                          seed,
                          chaos};
           }),
           py::arg("regions"), py::arg("state"), py::arg("control"), py::arg("rank"),
           py::arg("signature"), py::arg("timeout_ns"), py::arg("words"), py::arg("buffers_at"),
           py::arg("buffer_stride"), py::arg("WORLD"), py::arg("seed"), py::arg("CHAOS"));
  py::class_<Epilogue>(m, "Epilogue")
      .def(py::init([](int out_dtype, Address bias, u64 cols, int bias_dtype, Address residual,
                       int residual_dtype) {
             return Epilogue{pointer(bias), cols,           pointer(residual),
                             bias_dtype,    residual_dtype, out_dtype};
           }),
           py::arg("out_dtype"), py::arg("bias") = 0, py::arg("cols") = 1,
           py::arg("bias_dtype") = 0, py::arg("residual") = 0, py::arg("residual_dtype") = 0);
  py::class_<Multicast>(m, "Multicast")
      .def(py::init([](Address regions, Address x) { return Multicast{regions, x}; }),
           py::arg("regions") = 0, py::arg("x") = 0);
  py::class_<AllReduce>(m, "AllReduce")
      .def(py::init([](Address x, Address out, u64 count, u64 begin, int wire,
                       const Epilogue& epilogue, u64 segment, u64 slot_bytes, u64 results_at,
                       const Multicast& everywhere) {
        return AllReduce{pointer(x), pointer(out), count,      begin,      wire,
                         epilogue,   segment,      slot_bytes, results_at, everywhere};
      }));
  py::class_<RmsNorm>(m, "RmsNorm")
      .def(py::init([](Address normed, Address weight, u64 cols, int weight_dtype, float eps) {
        return RmsNorm{pointer(normed), pointer(weight), cols, weight_dtype, eps};
      }));
  py::class_<Rows>(m, "Rows").def(
      py::init([](Address x, u64 count, int dtype) { return Rows{pointer(x), count, dtype}; }));
  // `starts` is the address of world + 1 ints in device memory.
  py::class_<Shards>(m, "Shards")
      .def(py::init([](Address x, Address out, Address starts, u64 row, int wire, u64 slot_bytes,
                       const Epilogue& epilogue, const Multicast& everywhere) {
        return Shards{pointer(x), pointer(out), pointer<const int>(starts), row, wire, slot_bytes,
                      epilogue,   everywhere};
      }));
  // All but k, the numbers and the dtype are addresses.
  py::class_<Routed>(m, "Routed")
      .def(py::init([](Address x, Address out, Address order, Address places, Address weights,
                       Address rows, Address tokens, int k, u64 most, u64 row, int dtype) {
        return Routed{pointer(x),
                      pointer(out),
                      pointer<const i64>(order),
                      pointer<const i64>(places),
                      pointer<const float>(weights),
                      pointer<const i64>(rows),
                      pointer<const int>(tokens),
                      k,
                      most,
                      row,
                      dtype};
      }));
  py::class_<SumPartials>(m, "SumPartials").def(py::init(&make_sum));
  py::class_<Litmus>(m, "Litmus")
      .def(py::init([](Address found, int records, unsigned round, u64 bytes, Address multicast) {
        return Litmus{pointer<u64>(found), records, round, bytes, multicast};
      }));
  py::class_<Signal>(m, "Signal").def(py::init([](int rank, int index) {
    return Signal{rank, index};
  }));
  py::class_<Results>(m, "Results").def(py::init(&make_results));
}

// A method that queues one kernel of the table.
template <class... Arguments>
void bind_kernel(py::class_<Kernels>& kernels, const char* name) {
  kernels.def(
      name,
      [name](Kernels& k, Stream stream, const Arguments&... arguments, int blocks, int cluster,
             bool early) { k.launch(name, stream, {blocks, cluster, early}, arguments...); },
      py::arg("stream"), (static_cast<void>(sizeof(Arguments)), py::arg())...,
      py::arg("blocks") = 1, py::arg("cluster") = 1, py::arg("early") = false, ReleaseGil());
}

}  // namespace

}  // namespace tpkernels::cuda

void tpkernels::bind_cuda(pybind11::module_& m) {
  using namespace cuda;
  bind_arguments(m);
  py::class_<Kernels> kernels(m, "Kernels");
  kernels.def(py::init(&make_kernels), py::arg("device"), py::arg("image"))
      .def("copy", &Kernels::copy, py::arg("stream"), py::arg("dst"), py::arg("src"),
           py::arg("nbytes"), ReleaseGil())
      .def("raise_flag", &Kernels::raise_flag, py::arg("stream"), py::arg("space"),
           py::arg("index"), py::arg("captured"), ReleaseGil())
      .def("streams_write", &Kernels::streams_write);
#define TPK_BIND(name, threads, ...) bind_kernel<__VA_ARGS__>(kernels, #name);
  TPK_KERNELS(TPK_BIND)
#undef TPK_BIND
  m.attr("MAX_WORLD") = kMaxWorld;
  m.attr("MOST_RESULTS") = kMostResults;
  m.def("architectures", [] { return std::string(embedded_image().architectures); });
  m.def("image", [] {
    const Image& image = embedded_image();
    return py::bytes(reinterpret_cast<const char*>(image.bytes), image.size);
  });
  m.def("sources", [] { return embedded_image().sources; });
  m.def("driver_version", &driver_version);
  m.def("device_count", &device_count);
  m.def("compute_capability", &compute_capability, py::arg("device"));
}
