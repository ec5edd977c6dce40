#include "calls/turns.h"

#include <utility>

#include "calls/python.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

constexpr std::size_t kMostCalls = 4096;  // remembered of one group

// Never destroyed: groups may go after the library's own objects.
std::unordered_map<std::string, Turns*>& admitted() {
  static auto* const turns = new std::unordered_map<std::string, Turns*>;
  return *turns;
}

}  // namespace

Turns::~Turns() { retire(); }

void Turns::admit(const std::string& name, py::object group) {
  retire();
  name_ = name;
  group_ = std::move(group);
  admitted()[name] = this;
}

void Turns::retire() {
  forget();  // which refer to the group, and so to this
  const auto found = admitted().find(name_);
  if (found != admitted().end() && found->second == this) admitted().erase(found);
}

Turns* Turns::of(PyObject* name) {
  static PyObject* const resolve =
      lasting("torch.distributed.distributed_c10d", "_resolve_process_group");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (!text) return PyErr_Clear(), nullptr;
  const auto found = admitted().find(std::string(text, static_cast<std::size_t>(size)));
  if (found == admitted().end()) return nullptr;
  Turns* const turns = found->second;
  const auto now = py::reinterpret_steal<py::object>(PyObject_CallOneArg(resolve, name));
  if (!now) return PyErr_Clear(), nullptr;
  const auto own = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(turns->group_.ptr()));
  if (!own) return PyErr_Clear(), nullptr;
  return own.is(now) ? turns : nullptr;
}

std::shared_ptr<Planned> Turns::find(const std::string& key) const {
  const auto found = planned_.find(key);
  return found == planned_.end() ? nullptr : found->second;
}

void Turns::remember(const std::string& key, std::shared_ptr<Planned> planned) {
  if (planned_.size() >= kMostCalls) forget();
  planned_[key] = std::move(planned);
}

py::list Turns::planned() const {
  py::list calls;
  for (const auto& [key, planned] : planned_) calls.append(planned->call);
  return calls;
}

void Turns::set_lock(const py::object& lock) {
  lock_ = lock;
  acquire_ = lock.attr("acquire");
  release_ = lock.attr("release");
}

}  // namespace tpkernels::calls
