#include "calls/turns.h"

#include <stdexcept>

#include "calls/python.h"
#include "host/channel.h"

namespace tpkernels::calls {
namespace {

constexpr double kSlice = 0.02;           // s of a wait for the lock, between looks for signals
constexpr std::size_t kMostCalls = 4096;  // remembered of one group

// Never destroyed: groups may go after the library's own objects.
std::unordered_map<std::string, Turns*>& admitted() {
  static auto* const turns = new std::unordered_map<std::string, Turns*>;
  return *turns;
}

// Whether a process group has not been destroyed. False: perhaps, it was not made in the usual way.
bool is_present(const py::object& group) {
  static const Global groups("torch.distributed.distributed_c10d", "_pg_map");
  if (!groups.value() || !PyDict_Check(groups.value())) return false;
  const int found = PyDict_Contains(groups.value(), group.ptr());
  if (found < 0) PyErr_Clear();
  return found == 1;
}

// The process group of that name; null: there is none. It takes 3 us with cold caches.
py::object resolved(PyObject* name) {
  static PyObject* const resolve =
      lasting("torch.distributed.distributed_c10d", "_resolve_process_group");
  auto group = py::reinterpret_steal<py::object>(PyObject_CallOneArg(resolve, name));
  if (!group) PyErr_Clear();
  return group;
}

// Whether the order of this thread's calls must be that of a thread on every rank. Not of the main
// thread, in whose place another rank may have a thread (a server, a streamer), nor of those that
// have no fixed part: autograd's and others that Python did not start, and a pool's workers.
bool is_told_apart() {
  const py::module_ threading = py::module_::import("threading");
  const py::object thread = threading.attr("current_thread")();
  if (thread.is(threading.attr("main_thread")())) return false;
  if (py::isinstance(thread, threading.attr("_DummyThread"))) return false;
  const auto name = thread.attr("name").cast<std::string>();
  const std::size_t end = name.find_last_not_of("0123456789");  // a pool's: prefix_0
  return end == std::string::npos || end + 1 == name.size() || name[end] != '_';
}

void identify_caller() {
  static std::uint64_t count = 0;  // under the GIL
  thread_local bool known = false;
  if (known) return;
  known = true;
  if (is_told_apart()) host::caller = ++count;
}

}  // namespace

bool Lock::acquire(bool blocking) {
  identify_caller();
  const unsigned long self = PyThread_get_thread_ident();
  if (owner_ == self) {
    ++depth_;
    return true;
  }
  if (owner_ != 0) {
    if (!blocking) return false;
    wait();
  }
  owner_ = self;
  depth_ = 1;
  return true;
}

void Lock::wait() {
  ++waiting_;
  while (owner_ != 0) {
    const std::uint64_t seen = released_.word.load();
    {
      const GilReleased released;  // nobody can have released the lock since `seen`
      host::sleep_on({&released_}, kSlice, 0, [=](std::uint64_t word) { return word != seen; });
    }
    if (PyErr_CheckSignals() != 0) {
      --waiting_;
      throw pybind11::error_already_set();
    }
  }
  --waiting_;
}

void Lock::release() {
  if (owner_ != PyThread_get_thread_ident()) {
    throw std::runtime_error("cannot release the group lock: this thread does not hold it");
  }
  if (--depth_ != 0) return;
  owner_ = 0;
  if (waiting_ == 0) return;
  ++released_.word;
  released_.wake();
}

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
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (!text) return PyErr_Clear(), nullptr;
  const auto found = admitted().find(std::string(text, static_cast<std::size_t>(size)));
  if (found == admitted().end()) return nullptr;
  Turns* const turns = found->second;
  const auto own = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(turns->group_.ptr()));
  if (!own) return PyErr_Clear(), nullptr;
  if (is_present(own)) return turns;
  if (!own.is(resolved(name))) return nullptr;
  const auto again = admitted().find(std::string(text, static_cast<std::size_t>(size)));
  return again != admitted().end() && again->second == turns ? turns : nullptr;  // Python has run
}

std::shared_ptr<Planned> Turns::find(const std::string& key) const {
  const auto found = planned_.find(key);
  return found == planned_.end() ? nullptr : found->second;
}

void Turns::remember(const std::string& key, std::shared_ptr<Planned> planned) {
  if (planned->generation != generation_) return;  // forgotten while it was planned
  std::unordered_map<std::string, std::shared_ptr<Planned>> dropped;  // see `forget`
  if (planned_.size() >= kMostCalls) dropped.swap(planned_);
  planned_[key].swap(planned);
}

py::list Turns::planned() const {
  py::list calls;
  for (const auto& [key, planned] : planned_) calls.append(planned->call);
  return calls;
}

}  // namespace tpkernels::calls
