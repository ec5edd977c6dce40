// _C.nccl: a NCCL library and its communicators. Memory and streams are passed as integers, dtypes
// as the codes of host/vector.h.
#include "bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "nccl/communicator.h"

namespace py = pybind11;

namespace tpkernels::nccl {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;
using Address = std::uintptr_t;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

py::bytes unique_id(const Library& library) {
  UniqueId id;
  {
    const GilReleased released;
    id = library.unique_id();
  }
  return py::bytes(id.bytes, sizeof(id.bytes));
}

// Destroying a communicator may wait for NCCL.
struct DeleteWithoutGil {
  void operator()(Communicator* communicator) const {
    const GilReleased released;
    delete communicator;
  }
};
using CommunicatorPtr = std::unique_ptr<Communicator, DeleteWithoutGil>;

CommunicatorPtr make_communicator(std::shared_ptr<Library> library, const std::string& id, int rank,
                                  int world, const std::string& name, double timeout) {
  UniqueId unique{};
  if (id.size() != sizeof(unique.bytes)) {
    throw py::value_error("a unique id has " + std::to_string(sizeof(unique.bytes)) +
                          " bytes, not " + std::to_string(id.size()));
  }
  std::memcpy(unique.bytes, id.data(), sizeof(unique.bytes));
  const GilReleased released;
  return CommunicatorPtr(
      new Communicator(std::move(library), unique, rank, world, name, timeout, &poll_signals));
}

Operation make_operation(const std::string& name, Address send, Address recv, std::size_t count,
                         int dtype, int peer, Address stream) {
  const auto* found = std::find(std::begin(kOperations), std::end(kOperations), name);
  if (found == std::end(kOperations)) throw py::value_error("no operation '" + name + "'");
  return {static_cast<OperationKind>(found - std::begin(kOperations)),
          pointer(send),
          pointer(recv),
          count,
          static_cast<host::DType>(dtype),
          peer,
          pointer(stream)};
}

}  // namespace

}  // namespace tpkernels::nccl

void tpkernels::bind_nccl(pybind11::module_& m) {
  using namespace nccl;
  py::class_<Library, std::shared_ptr<Library>>(m, "Library")
      .def(py::init<const std::string&>(), py::arg("name"), ReleaseGil())
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version)
      .def("unique_id", &unique_id);

  py::class_<Operation>(m, "Operation")
      .def(py::init(&make_operation), py::arg("kind"), py::arg("send"), py::arg("recv"),
           py::arg("count"), py::arg("dtype"), py::arg("peer"), py::arg("stream"));

  py::class_<Communicator, CommunicatorPtr>(m, "Communicator")
      .def(py::init(&make_communicator), py::arg("library"), py::arg("unique_id"), py::arg("rank"),
           py::arg("world"), py::kw_only(), py::arg("name"), py::arg("timeout"))
      .def("enqueue", &Communicator::enqueue, py::arg("operations"), ReleaseGil())
      .def("check", &Communicator::check, ReleaseGil())
      .def("close", &Communicator::close, ReleaseGil())
      .def("abort", &Communicator::abort, py::arg("why"), ReleaseGil());
}
