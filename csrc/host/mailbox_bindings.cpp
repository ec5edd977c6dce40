// _C.host.Mailbox.
#include <pybind11/stl.h>

#include <cstddef>
#include <memory>

#include "binding_errors.h"
#include "host/arena.h"
#include "host/bindings.h"
#include "host/mailbox.h"

namespace py = pybind11;
namespace tpkernels::host {
namespace {

py::buffer_info bytes_of(const py::buffer& buffer, bool writable = false) {
  py::buffer_info info = buffer.request(writable);
  if (info.itemsize != 1 || info.ndim != 1 || (info.size > 1 && info.strides[0] != 1)) {
    throw py::value_error("a mailbox moves vectors of bytes");
  }
  return info;
}

}  // namespace

void bind_mailbox(py::module_& m) {
  py::class_<Mailbox>(m, "Mailbox")
      .def(py::init<std::shared_ptr<Arena>, int, int, int, double>(), py::arg("arena"),
           py::arg("region"), py::arg("readers"), py::arg("bell_region"), py::arg("spin_us"))
      .def_static("region_bytes", &Mailbox::region_bytes, py::arg("capacity"), py::arg("readers"))
      .def_property_readonly("capacity", &Mailbox::capacity)
      .def(
          "write",
          [](Mailbox& box, const py::buffer& data, double seconds) {
            const py::buffer_info bytes = bytes_of(data);
            const GilReleased released;
            return box.write(static_cast<const std::byte*>(bytes.ptr),
                             static_cast<std::size_t>(bytes.size), seconds);
          },
          py::arg("data"), py::arg("seconds"))
      .def(
          "read",
          [](Mailbox& box, int reader, const py::buffer& out, double seconds) {
            const py::buffer_info bytes = bytes_of(out, /*writable=*/true);
            const GilReleased released;
            return box.read(reader, static_cast<std::byte*>(bytes.ptr),
                            static_cast<std::size_t>(bytes.size), seconds);
          },
          py::arg("reader"), py::arg("out"), py::arg("seconds"))
      .def_static("wait_any", &Mailbox::wait_any, py::arg("boxes"), py::arg("seconds"),
                  py::call_guard<GilReleased>());
}

}  // namespace tpkernels::host
