// _C.cuda: the kernels, and queries of the driver. Addresses and streams are passed as integers.
// tpkernels/cuda checks the arguments.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/kernels.h"

namespace py = pybind11;

namespace tpkernels::cuda {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

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
    throw py::value_error("partials has " + std::to_string(partials.size()) + " tensors; at most " +
                          std::to_string(kMaxWorld) + " are supported");
  }
  for (Address partial : partials) call.partials[call.world++] = pointer(partial);
  call.wire = wire;
  call.out = pointer(out);
  call.begin = begin;
  call.count = count;
  call.epilogue = epilogue;
  return call;
}

// Creates Results from (address, bytes) pairs.
Results make_results(const std::vector<std::pair<Address, u64>>& outputs) {
  Results results{};
  if (outputs.size() > std::size(results.outputs)) {
    throw py::value_error("the call has " + std::to_string(outputs.size()) + " results; at most " +
                          std::to_string(kMaxResults) + " are supported");
  }
  for (const auto& [out, bytes] : outputs) results.outputs[results.count++] = {pointer(out), bytes};
  return results;
}

// The type that Python passes for a struct member. Pointers are passed as addresses.
template <class T>
using PythonType = std::conditional_t<std::is_pointer_v<T>, Address, T>;
template <class T>
T from_python(const PythonType<T>& value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(value);
  else
    return value;
}

// Binds a struct of cuda/arguments.h, with a constructor from these members.
template <class Struct, class... Members>
void bind_struct(py::module_& m, const char* name, Members Struct::*... members) {
  py::class_<Struct>(m, name).def(py::init([members...](const PythonType<Members>&... args) {
    Struct result{};
    ((result.*members = from_python<Members>(args)), ...);
    return result;
  }));
}

// Binds the argument structs of the kernels.
void bind_arguments(py::module_& m) {
  bind_struct(m, "Workspace", &Workspace::regions, &Workspace::state, &Workspace::control,
              &Workspace::rank, &Workspace::world, &Workspace::signature, &Workspace::timeout_ns,
              &Workspace::signals, &Workspace::buffers_offset, &Workspace::buffer_stride,
              &Workspace::seed, &Workspace::chaos);
  bind_struct(m, "Epilogue", &Epilogue::out_dtype, &Epilogue::bias, &Epilogue::cols,
              &Epilogue::bias_dtype, &Epilogue::residual, &Epilogue::residual_dtype);
  bind_struct(m, "AllReduce", &AllReduce::x, &AllReduce::out, &AllReduce::count, &AllReduce::wire,
              &AllReduce::epilogue, &AllReduce::segment, &AllReduce::slot_bytes,
              &AllReduce::results_offset);
  bind_struct(m, "RmsNorm", &RmsNorm::normed, &RmsNorm::weight, &RmsNorm::cols,
              &RmsNorm::weight_dtype, &RmsNorm::eps);
  bind_struct(m, "Rows", &Rows::x, &Rows::count, &Rows::dtype);
  bind_struct(m, "Shards", &Shards::x, &Shards::out, &Shards::starts, &Shards::cols, &Shards::wire,
              &Shards::slot_bytes, &Shards::epilogue);
  bind_struct(m, "Routed", &Routed::x, &Routed::out, &Routed::permutation,
              &Routed::inverse_permutation, &Routed::weights, &Routed::rank_offsets,
              &Routed::token_offsets, &Routed::k, &Routed::max_rows, &Routed::cols, &Routed::dtype);
  bind_struct(m, "Litmus", &Litmus::report, &Litmus::records, &Litmus::round, &Litmus::bytes);
  bind_struct(m, "Signal", &Signal::rank, &Signal::index);
  py::class_<SumPartials>(m, "SumPartials").def(py::init(&make_sum));
  py::class_<Results>(m, "Results").def(py::init(&make_results));
}

// Queues a kernel of the table with positional arguments.
template <class... Arguments>
void launch(Kernels& kernels, const char* name, Stream stream, Shape shape, const py::args& args) {
  const auto arguments = args.cast<std::tuple<Arguments...>>();
  const GilReleased released;
  std::apply([&](const auto&... argument) { kernels.launch(name, stream, shape, argument...); },
             arguments);
}

struct Entry {
  const char* name;
  decltype(&launch<>) launch;
};
#define TPK_ENTRY(name, threads, ...) {#name, &launch<__VA_ARGS__>},
constexpr Entry kEntries[] = {TPK_KERNELS(TPK_ENTRY)};
#undef TPK_ENTRY

void launch_by_name(Kernels& kernels, const std::string& name, Stream stream, const py::args& args,
                    int blocks, int cluster, bool early) {
  const auto* const entry =
      std::find_if(std::begin(kEntries), std::end(kEntries),
                   [&](const Entry& candidate) { return name == candidate.name; });
  if (entry == std::end(kEntries)) throw py::value_error("unknown kernel '" + name + "'");
  entry->launch(kernels, entry->name, stream, {blocks, cluster, early}, args);
}

}  // namespace

}  // namespace tpkernels::cuda

void tpkernels::bind_cuda(pybind11::module_& m) {
  using namespace cuda;
  bind_arguments(m);
  py::class_<Kernels>(m, "Kernels")
      .def(py::init(&make_kernels), py::arg("device"), py::arg("image"))
      .def("launch", &launch_by_name, py::arg("name"), py::arg("stream"), py::arg("blocks") = 1,
           py::arg("cluster") = 1, py::arg("early") = false)
      .def("copy", &Kernels::copy, py::arg("stream"), py::arg("dst"), py::arg("src"),
           py::arg("nbytes"), ReleaseGil())
      .def("set_flag", &Kernels::set_flag, py::arg("stream"), py::arg("workspace"),
           py::arg("index"), py::arg("captured"), ReleaseGil())
      .def("streams_write", &Kernels::streams_write);
  m.attr("MAX_WORLD") = kMaxWorld;
  m.attr("MAX_RESULTS") = kMaxResults;
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
