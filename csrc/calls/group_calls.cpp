#include "calls/group_calls.h"

#include <stdexcept>

#include "calls/python.h"
#include "host/channel.h"

namespace tpkernels::calls {
namespace {

constexpr double kSignalCheckSeconds = 0.02;    // between checks for Python signals, in a wait
constexpr std::size_t kMaxPlannedCalls = 4096;  // per group

// Never destroyed: groups may outlive the static objects of this library.
std::unordered_map<std::string, GroupCalls*>& registry() {
  static auto* const groups = new std::unordered_map<std::string, GroupCalls*>;
  return *groups;
}

// Whether torch has registered this process group and not destroyed it. Also false for a process
// group that was not created with `init_process_group` or `new_group`.
bool is_registered_with_torch(const py::object& group) {
  static const Global groups("torch.distributed.distributed_c10d", "_pg_map");
  if (!groups.value() || !PyDict_Check(groups.value())) return false;
  const int present = PyDict_Contains(groups.value(), group.ptr());
  if (present < 0) PyErr_Clear();
  return present == 1;
}

// The process group of that name, or null. Costs 3 us with cold caches.
py::object resolve_process_group(PyObject* name) {
  static PyObject* const resolve =
      import_static("torch.distributed.distributed_c10d", "_resolve_process_group");
  auto group = py::reinterpret_steal<py::object>(PyObject_CallOneArg(resolve, name));
  if (!group) PyErr_Clear();
  return group;
}

// Whether the order of calls on this thread is compared with the peers. Not compared are:
// - the main thread, because a peer may make the same calls on a different thread (a server, a
//   streamer),
// - threads that Python did not start, such as the threads of autograd,
// - pool workers, which get tasks in any order.
bool is_compared_thread() {
  const py::module_ threading = py::module_::import("threading");
  const py::object thread = threading.attr("current_thread")();
  if (thread.is(threading.attr("main_thread")())) return false;
  if (py::isinstance(thread, threading.attr("_DummyThread"))) return false;
  const auto name = thread.attr("name").cast<std::string>();
  const std::size_t end = name.find_last_not_of("0123456789");  // pool workers: prefix_0
  return end == std::string::npos || end + 1 == name.size() || name[end] != '_';
}

void identify_caller() {
  static std::uint64_t count = 0;  // under the GIL
  thread_local bool identified = false;
  if (identified) return;
  identified = true;
  if (is_compared_thread()) host::caller_id = ++count;
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
    const std::uint64_t seen = released_.value.load();
    {
      const GilReleased released;  // a release needs the GIL, so `seen` is current until here
      host::sleep_on({&released_}, kSignalCheckSeconds, 0,
                     [=](std::uint64_t value) { return value != seen; });
    }
    if (PyErr_CheckSignals() != 0) {
      --waiting_;
      throw pybind11::error_already_set();
    }
  }
  --waiting_;
}

bool Lock::is_held() const { return depth_ > 0 && owner_ == PyThread_get_thread_ident(); }

void Lock::release() {
  if (owner_ != PyThread_get_thread_ident()) {
    throw std::runtime_error("cannot release the group lock: this thread does not hold it");
  }
  if (--depth_ != 0) return;
  owner_ = 0;
  if (waiting_ == 0) return;
  ++released_.value;
  released_.wake();
}

GroupCalls::~GroupCalls() { unregister(); }

void GroupCalls::register_group(const std::string& name, py::object group) {
  unregister();
  name_ = name;
  process_group_ = std::move(group);
  registry()[name] = this;
}

void GroupCalls::unregister() {
  clear();  // breaks a reference cycle: planned calls refer to the group
  const auto entry = registry().find(name_);
  if (entry != registry().end() && entry->second == this) registry().erase(entry);
}

GroupCalls* GroupCalls::lookup(PyObject* name) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (!text) return PyErr_Clear(), nullptr;
  const auto entry = registry().find(std::string(text, static_cast<std::size_t>(size)));
  if (entry == registry().end()) return nullptr;
  GroupCalls* const group = entry->second;
  const auto process_group =
      py::reinterpret_steal<py::object>(PyObject_CallNoArgs(group->process_group_.ptr()));
  if (!process_group) return PyErr_Clear(), nullptr;
  if (is_registered_with_torch(process_group)) return group;
  if (!process_group.is(resolve_process_group(name))) return nullptr;
  // `resolve_process_group` ran Python code that may have changed the registry.
  const auto current = registry().find(std::string(text, static_cast<std::size_t>(size)));
  return current != registry().end() && current->second == group ? group : nullptr;
}

std::shared_ptr<PlannedCall> GroupCalls::find(const std::string& key) const {
  const auto entry = planned_.find(key);
  return entry == planned_.end() ? nullptr : entry->second;
}

void GroupCalls::insert(const std::string& key, std::shared_ptr<PlannedCall> planned) {
  if (planned->generation != generation_) return;  // the cache was cleared during planning
  std::unordered_map<std::string, std::shared_ptr<PlannedCall>> dropped;  // as in `clear`
  if (planned_.size() >= kMaxPlannedCalls) dropped.swap(planned_);
  planned_[key].swap(planned);
}

py::list GroupCalls::planned_calls() const {
  py::list calls;
  for (const auto& [key, planned] : planned_) calls.append(planned->call);
  return calls;
}

}  // namespace tpkernels::calls
