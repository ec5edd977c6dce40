// _C.cuda: the kernels, and queries of the driver. Memory and streams are passed as integers.
// tpkernels/cuda checks the arguments.
#include "cuda/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding_errors.h"
#include "cuda/copies.h"
#include "cuda/kernels.h"

namespace py = pybind11;

namespace tpkernels::cuda {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// The parameters are the keys of DeviceWorkspace.arguments().
Space make_space(Address regions, Address state, Address control, int rank, std::int64_t signature,
                 std::uint64_t timeout_ns, int words, std::uint64_t buffers_at,
                 std::uint64_t buffer_stride, int world, std::uint64_t seed, std::uint64_t chaos) {
  return {pointer<const u64>(regions),
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
}

Epilogue make_epilogue(int out_dtype, Address bias, std::uint64_t cols, int bias_dtype,
                       Address residual, int residual_dtype) {
  return {pointer<const void>(bias),
          cols,
          pointer<const void>(residual),
          bias_dtype,
          residual_dtype,
          out_dtype};
}

std::unique_ptr<Kernels> make_kernels(int device, const std::optional<std::string>& image) {
  if (image) return std::make_unique<Kernels>(device, image->data());
  const Image& embedded = embedded_image();
  if (embedded.size == 0) throw Unsupported("this extension was built without nvcc");
  return std::make_unique<Kernels>(device, embedded.bytes);
}

void bind_calls(py::class_<Kernels>& kernels) {
  kernels
      .def(
          "all_reduce",
          [](Kernels& k, Stream stream, const Space& space, int way, int blocks, bool early,
             Address x, Address out, std::uint64_t count, std::uint64_t begin, int wire,
             const Epilogue& epilogue, std::uint64_t segment, std::uint64_t slot_bytes,
             std::uint64_t results_at, Address multicast) {
            k.all_reduce(stream, space, static_cast<Way>(way), {blocks, 1, early},
                         {pointer<const void>(x), pointer<void>(out), count, begin, wire, epilogue,
                          segment, slot_bytes, results_at, multicast});
          },
          py::arg("stream"), py::arg("space"), py::arg("way"), py::arg("blocks"), py::arg("early"),
          py::arg("x"), py::arg("out"), py::arg("count"), py::arg("begin"), py::arg("wire"),
          py::arg("epilogue"), py::arg("segment"), py::arg("slot_bytes"), py::arg("results_at"),
          py::arg("multicast"), ReleaseGil())
      .def(
          "sum_partials",
          [](Kernels& k, Stream stream, int blocks, Address out,
             const std::vector<Address>& partials, int wire, std::uint64_t begin,
             std::uint64_t count, const Epilogue& epilogue) {
            SumPartials call{};
            if (partials.size() > std::size(call.partials)) {
              throw py::value_error(std::to_string(partials.size()) + " partials; at most " +
                                    std::to_string(kMaxWorld));
            }
            for (std::size_t r = 0; r < partials.size(); ++r) {
              call.partials[r] = pointer<const void>(partials[r]);
            }
            call.world = static_cast<int>(partials.size());
            call.wire = wire;
            call.out = pointer<void>(out);
            call.begin = begin;
            call.count = count;
            call.epilogue = epilogue;
            k.sum_partials(stream, blocks, call);
          },
          py::arg("stream"), py::arg("blocks"), py::arg("out"), py::arg("partials"),
          py::arg("wire"), py::arg("begin"), py::arg("count"), py::arg("epilogue"), ReleaseGil())
      .def(
          "paced_copy",
          [](Kernels& k, Stream stream, int blocks, Address dst, Address src, std::uint64_t bytes,
             std::uint64_t latency_ns, double ns_per_byte) {
            k.paced_copy(
                stream, blocks,
                {pointer<void>(dst), pointer<const void>(src), bytes, latency_ns, ns_per_byte});
          },
          py::arg("stream"), py::arg("blocks"), py::arg("dst"), py::arg("src"), py::arg("nbytes"),
          py::arg("latency_ns"), py::arg("ns_per_byte"), ReleaseGil());
}

RmsNorm make_norm(Address normed, Address weight, std::uint64_t cols, int weight_dtype, float eps) {
  return {pointer<void>(normed), pointer<const void>(weight), cols, weight_dtype, eps};
}

void bind_norms(py::class_<Kernels>& kernels) {
  kernels
      .def(
          "normed_all_reduce",
          [](Kernels& k, Stream stream, const Space& space, int way, int blocks, int cluster,
             bool early, Address x, Address out, std::uint64_t count, int wire,
             const Epilogue& epilogue, std::uint64_t segment, std::uint64_t slot_bytes,
             std::uint64_t results_at, const RmsNorm& norm) {
            k.normed_all_reduce(stream, space, static_cast<Way>(way), {blocks, cluster, early},
                                {pointer<const void>(x), pointer<void>(out), count, 0, wire,
                                 epilogue, segment, slot_bytes, results_at, 0},
                                norm);
          },
          py::arg("stream"), py::arg("space"), py::arg("way"), py::arg("blocks"),
          py::arg("cluster"), py::arg("early"), py::arg("x"), py::arg("out"), py::arg("count"),
          py::arg("wire"), py::arg("epilogue"), py::arg("segment"), py::arg("slot_bytes"),
          py::arg("results_at"), py::arg("norm"), ReleaseGil())
      .def(
          "rms_norm",
          [](Kernels& k, Stream stream, int blocks, int cluster, Address x, std::uint64_t count,
             int dtype, const RmsNorm& norm) {
            k.rms_norm(stream, {blocks, cluster, false}, {pointer<const void>(x), count, dtype},
                       norm);
          },
          py::arg("stream"), py::arg("blocks"), py::arg("cluster"), py::arg("x"), py::arg("count"),
          py::arg("dtype"), py::arg("norm"), ReleaseGil());
}

// `starts` is the address of world + 1 ints in device memory.
void bind_shards(py::class_<Kernels>& kernels) {
  using Function = void (Kernels::*)(Stream, const Space&, int, const Shards&);
  const auto bind = [&](const char* name, Function function) {
    kernels.def(
        name,
        [function](Kernels& k, Stream stream, const Space& space, int blocks, Address x,
                   Address out, Address starts, std::uint64_t row, int wire,
                   std::uint64_t slot_bytes, const Epilogue& epilogue) {
          (k.*function)(stream, space, blocks,
                        {pointer<const void>(x), pointer<void>(out), pointer<const int>(starts),
                         row, wire, slot_bytes, epilogue});
        },
        py::arg("stream"), py::arg("space"), py::arg("blocks"), py::arg("x"), py::arg("out"),
        py::arg("starts"), py::arg("row"), py::arg("wire"), py::arg("slot_bytes"),
        py::arg("epilogue"), ReleaseGil());
  };
  bind("gather", &Kernels::gather);
  bind("scatter", &Kernels::scatter);
  bind("low_latency_gather", &Kernels::low_latency_gather);
  bind("low_latency_scatter", &Kernels::low_latency_scatter);
}

// Of (address, bytes) pairs.
Results make_results(const std::vector<std::pair<Address, std::uint64_t>>& given) {
  Results results{};
  if (given.size() > std::size(results.outputs)) {
    throw py::value_error(std::to_string(given.size()) + " results; at most " +
                          std::to_string(kMostResults));
  }
  for (const auto& [out, bytes] : given) {
    results.outputs[results.count++] = {pointer<void>(out), bytes};
  }
  return results;
}

void bind_signals(py::class_<Kernels>& kernels) {
  kernels.def("barrier", &Kernels::barrier, py::arg("stream"), py::arg("space"), ReleaseGil())
      .def("begin", &Kernels::begin, py::arg("stream"), py::arg("space"), py::arg("flags"),
           ReleaseGil())
      .def(
          "end",
          [](Kernels& k, Stream stream, const Space& space,
             const std::vector<std::pair<Address, std::uint64_t>>& results) {
            k.end(stream, space, make_results(results));
          },
          py::arg("stream"), py::arg("space"), py::arg("results"), ReleaseGil())
      .def(
          "publish",
          [](Kernels& k, Stream stream, const Space& space, int to, int index) {
            k.publish(stream, space, {to, index});
          },
          py::arg("stream"), py::arg("space"), py::arg("to"), py::arg("index"), ReleaseGil())
      .def("raise_flag", &raise_flag, py::arg("stream"), py::arg("space"), py::arg("index"),
           py::arg("captured"), ReleaseGil())
      .def("streams_write", &Kernels::streams_write, py::arg("captured"))
      .def(
          "copy",
          [](const Kernels& k, Stream stream, Address dst, Address src, std::size_t bytes) {
            copy(k, stream, dst, src, bytes);
          },
          py::arg("stream"), py::arg("dst"), py::arg("src"), py::arg("nbytes"), ReleaseGil())
      .def(
          "wait",
          [](Kernels& k, Stream stream, const Space& space, int source, int index) {
            k.wait(stream, space, {source, index});
          },
          py::arg("stream"), py::arg("space"), py::arg("source"), py::arg("index"), ReleaseGil());
}

}  // namespace

void bind(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Unsupported& unsupported) {
      PyErr_SetString(PyExc_NotImplementedError, unsupported.what());
    }
  });
  py::class_<Space>(m, "Space")
      .def(py::init(&make_space), py::arg("regions"), py::arg("state"), py::arg("control"),
           py::arg("rank"), py::arg("signature"), py::arg("timeout_ns"), py::arg("words"),
           py::arg("buffers_at"), py::arg("buffer_stride"), py::arg("WORLD"), py::arg("seed"),
           py::arg("CHAOS"));
  py::class_<Epilogue>(m, "Epilogue")
      .def(py::init(&make_epilogue), py::arg("out_dtype"), py::arg("bias") = 0, py::arg("cols") = 1,
           py::arg("bias_dtype") = 0, py::arg("residual") = 0, py::arg("residual_dtype") = 0);
  py::class_<RmsNorm>(m, "RmsNorm")
      .def(py::init(&make_norm), py::arg("normed"), py::arg("weight"), py::arg("cols"),
           py::arg("weight_dtype"), py::arg("eps"));
  py::class_<Kernels> kernels(m, "Kernels");
  kernels.def(py::init(&make_kernels), py::arg("device"), py::arg("image"));
  bind_calls(kernels);
  bind_norms(kernels);
  bind_shards(kernels);
  bind_signals(kernels);
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

}  // namespace tpkernels::cuda
