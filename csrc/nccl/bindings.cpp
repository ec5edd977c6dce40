// _C.nccl: a NCCL library and its communicators. Memory, streams, windows and registrations are
// passed as integers, dtypes as the codes of host/vector.h.
#include "nccl/bindings.h"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding_errors.h"
#include "nccl/communicator.h"

namespace py = pybind11;

namespace tpkernels::nccl {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;

const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kPeerLost:
      return "PeerLostError";
    case ErrorKind::kTimeout:
      return "CollectiveTimeoutError";
    case ErrorKind::kBroken:
      return "GroupBrokenError";
    case ErrorKind::kFailed:
      break;
  }
  return "TpkernelsError";
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error& failure) {
    raise_error(class_of(failure.kind), failure.what(), -1);
  } catch (const Unsupported& unsupported) {
    PyErr_SetString(PyExc_NotImplementedError, unsupported.what());
  }
}

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
std::uintptr_t address(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

UniqueId unique_id(const py::bytes& bytes) {
  const std::string text = bytes;
  UniqueId id{};
  if (text.size() != sizeof(id.bytes)) {
    throw py::value_error("a unique id has " + std::to_string(sizeof(id.bytes)) + " bytes, not " +
                          std::to_string(text.size()));
  }
  std::memcpy(id.bytes, text.data(), sizeof(id.bytes));
  return id;
}

// Destroying a communicator may wait for NCCL.
struct DeleteWithoutGil {
  void operator()(Communicator* communicator) const {
    const GilReleased released;
    delete communicator;
  }
};
using CommunicatorPtr = std::unique_ptr<Communicator, DeleteWithoutGil>;

CommunicatorPtr make_communicator(std::shared_ptr<Library> library, const py::bytes& id, int rank,
                                  int world, double timeout, const std::string& name,
                                  std::optional<int> cta_policy, std::optional<int> min_ctas,
                                  std::optional<int> max_ctas) {
  Options options;
  options.timeout = timeout;
  options.name = name;
  options.cta_policy = cta_policy.value_or(kUnset);
  options.min_ctas = min_ctas.value_or(kUnset);
  options.max_ctas = max_ctas.value_or(kUnset);
  options.poll = &poll_signals;
  const UniqueId unique = unique_id(id);
  const GilReleased released;
  return CommunicatorPtr(new Communicator(std::move(library), unique, rank, world, options));
}

void bind_library(py::module_& m) {
  py::class_<Library, std::shared_ptr<Library>>(m, "Library")
      .def(py::init<const std::string&>(), py::arg("name"), ReleaseGil())
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version",
                             [](const Library& library) { return version_text(library.version()); })
      .def_property_readonly("features",
                             [](const Library& library) {
                               py::dict features;
                               for (const Feature& feature : library.features()) {
                                 features[feature.symbol] = feature.present;
                               }
                               return features;
                             })
      .def("unique_id",
           [](const Library& library) {
             UniqueId id;
             {
               const GilReleased released;
               id = library.unique_id();
             }
             return py::bytes(id.bytes, sizeof(id.bytes));
           })
      .def(
          "mem_alloc",
          [](const Library& library, std::size_t bytes) {
            return address(library.mem_alloc(bytes));
          },
          py::arg("nbytes"), ReleaseGil())
      .def(
          "mem_free",
          [](const Library& library, std::uintptr_t memory) { library.mem_free(pointer(memory)); },
          py::arg("address"), ReleaseGil());
}

void bind_operations(py::module_& m) {
  py::enum_<OperationKind>(m, "OperationKind")
      .value("ALL_GATHER", OperationKind::kAllGather)
      .value("REDUCE_SCATTER", OperationKind::kReduceScatter)
      .value("ALL_REDUCE", OperationKind::kAllReduce)
      .value("BROADCAST", OperationKind::kBroadcast)
      .value("SEND", OperationKind::kSend)
      .value("RECV", OperationKind::kRecv);

  py::class_<Operation>(m, "Operation")
      .def(py::init([](OperationKind kind, std::uintptr_t send, std::uintptr_t recv,
                       std::size_t count, int dtype, int peer, std::uintptr_t stream) {
             return Operation{
                 kind, pointer(send),  pointer(recv), count, static_cast<host::DType>(dtype),
                 peer, pointer(stream)};
           }),
           py::arg("kind"), py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("dtype"),
           py::arg("peer"), py::arg("stream"));

  m.def(
      "all_to_all",
      [](std::uintptr_t send, std::uintptr_t recv, const std::vector<std::size_t>& send_counts,
         const std::vector<std::size_t>& recv_counts, int dtype, std::uintptr_t stream) {
        if (send_counts.size() != recv_counts.size()) {
          throw py::value_error("send_counts has " + std::to_string(send_counts.size()) +
                                " entries and recv_counts has " +
                                std::to_string(recv_counts.size()) + "; both need one per rank");
        }
        return all_to_all(pointer(send), pointer(recv), send_counts, recv_counts,
                          static_cast<host::DType>(dtype), pointer(stream));
      },
      py::arg("send"), py::arg("recv"), py::arg("send_counts"), py::arg("recv_counts"),
      py::arg("dtype"), py::arg("stream"));
}

void bind_communicator(py::module_& m) {
  py::class_<Communicator, CommunicatorPtr>(m, "Communicator")
      .def(py::init(&make_communicator), py::arg("library"), py::arg("unique_id"), py::arg("rank"),
           py::arg("world"), py::kw_only(), py::arg("timeout"), py::arg("name") = "",
           py::arg("cta_policy") = py::none(), py::arg("min_ctas") = py::none(),
           py::arg("max_ctas") = py::none())
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world", &Communicator::world)
      .def("enqueue", &Communicator::enqueue, py::arg("operations"), ReleaseGil())
      .def("check", &Communicator::check, ReleaseGil())
      .def(
          "split",
          [](Communicator& c, std::optional<int> color, int key, const std::string& name) {
            const GilReleased released;
            return CommunicatorPtr(c.split(color.value_or(kNoColor), key, name).release());
          },
          py::arg("color"), py::arg("key"), py::arg("name") = "")
      .def(
          "register_window",
          [](Communicator& c, std::uintptr_t memory, std::size_t bytes, int flags) {
            return address(c.register_window(pointer(memory), bytes, flags));
          },
          py::arg("address"), py::arg("nbytes"), py::arg("flags"), ReleaseGil())
      .def(
          "deregister_window",
          [](Communicator& c, std::uintptr_t window) { c.deregister_window(pointer(window)); },
          py::arg("window"), ReleaseGil())
      .def(
          "register_buffer",
          [](Communicator& c, std::uintptr_t memory, std::size_t bytes) {
            return address(c.register_buffer(pointer(memory), bytes));
          },
          py::arg("address"), py::arg("nbytes"), ReleaseGil())
      .def(
          "deregister_buffer",
          [](Communicator& c, std::uintptr_t registration) {
            c.deregister_buffer(pointer(registration));
          },
          py::arg("registration"), ReleaseGil())
      .def("close", &Communicator::close, ReleaseGil())
      .def("abort", &Communicator::abort, py::arg("why"), ReleaseGil());
}

}  // namespace

void bind(py::module_& m) {
  py::register_exception_translator(&translate);
  bind_library(m);
  bind_operations(m);
  bind_communicator(m);
}

}  // namespace tpkernels::nccl
