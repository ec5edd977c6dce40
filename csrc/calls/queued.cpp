#include "calls/queued.h"

#include <algorithm>
#include <utility>

#include "calls/python.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

bool deterministic_now() {
  static PyObject* const flag = lasting("torch._C", "_get_deterministic_algorithms");
  return checked(PyObject_CallNoArgs(flag)).is(py::bool_(true));
}

}  // namespace

void Alarm::unwatch(std::uint64_t word) {
  words_.erase(std::remove(words_.begin(), words_.end(), word), words_.end());
}

bool Alarm::rings() const {
  return raised || std::any_of(words_.begin(), words_.end(), [](std::uint64_t word) {
           return *reinterpret_cast<const volatile std::int64_t*>(word) != 0;
         });
}

Queued::Queued(std::shared_ptr<const Arguments> arguments, py::object execute, py::object call,
               std::shared_ptr<const Alarm> alarm, std::optional<bool> deterministic)
    : arguments_(std::move(arguments)),
      execute_(std::move(execute)),
      call_(std::move(call)),
      alarm_(std::move(alarm)),
      deterministic_(deterministic) {}

// It may ring after this, too: kernels fail at any time, and the next call finds it.
bool Queued::takes(const Slots&, const Tensor&) const {
  return !alarm_->rings() && (!deterministic_ || *deterministic_ == deterministic_now());
}

py::object Queued::run(const Slots& slots, const Tensor&) const {
  const py::object given = arguments_->named(slots);
  PyObject* const both[] = {call_.ptr(), given.ptr()};
  return checked(PyObject_Vectorcall(execute_.ptr(), both, 2, nullptr));
}

}  // namespace tpkernels::calls
