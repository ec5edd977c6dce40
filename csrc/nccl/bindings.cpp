// _C.nccl: non-blocking calls of a NCCL library, without the GIL. tpkernels/nccl.py waits for their
// completion. Memory and streams are passed as integers, results as ncclResult_t.
#include "bindings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "nccl/library.h"

namespace py = pybind11;

namespace tpkernels::nccl {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;
using Address = std::uintptr_t;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

std::string version_text(const Library& library) {
  int version = 0;
  library.GetVersion(&version);
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

std::pair<Result, py::bytes> unique_id(const Library& library) {
  UniqueId id{};
  const auto get_id = [&] {
    const GilReleased released;  // ncclGetUniqueId opens a socket
    return library.GetUniqueId(&id);
  };
  const Result code = get_id();
  return {code, py::bytes(id.bytes, sizeof(id.bytes))};
}

// (kind, send buffer, receive buffer, count, ncclDataType_t, peer or root, stream). The count
// follows NCCL: the elements sent, or received by a reduce-scatter.
using Operation = std::tuple<std::string, Address, Address, std::size_t, int, int, Address>;

Result run(const Library& nccl, const Operation& operation, Comm* comm) {
  const auto& [kind, send_address, recv_address, count, dtype, peer, stream_address] = operation;
  void *send = pointer(send_address), *recv = pointer(recv_address),
       *stream = pointer(stream_address);
  if (kind == "all_gather") return nccl.AllGather(send, recv, count, dtype, comm, stream);
  if (kind == "reduce_scatter") {
    return nccl.ReduceScatter(send, recv, count, dtype, kSum, comm, stream);
  }
  if (kind == "all_reduce") return nccl.AllReduce(send, recv, count, dtype, kSum, comm, stream);
  if (kind == "broadcast") return nccl.Broadcast(send, recv, count, dtype, peer, comm, stream);
  if (kind == "send") return nccl.Send(send, count, dtype, peer, comm, stream);
  return nccl.Recv(recv, count, dtype, peer, comm, stream);
}

// A non-blocking communicator. NCCL runs everything that may wait on a separate thread.
class Communicator {
 public:
  // Starts the initialization on the current device. `async_error` returns its result.
  Communicator(std::shared_ptr<const Library> nccl, const std::string& id, int rank, int world)
      : nccl_(std::move(nccl)) {
    UniqueId unique;
    if (id.size() != sizeof(unique.bytes)) throw py::value_error("unique_id must have 128 bytes");
    std::memcpy(unique.bytes, id.data(), sizeof(unique.bytes));
    Config config;
    init_result_ = nccl_->CommInitRankConfig(comm_.get(), world, unique, rank, &config);
  }

  // Starts the operations as one group.
  Result enqueue(const std::vector<Operation>& operations) const {
    Result code = nccl_->GroupStart();
    if (has_failed(code)) return code;
    for (const Operation& operation : operations) {
      if (has_failed(code = run(*nccl_, operation, *comm_))) break;
    }
    // Also called after a failure. Otherwise the next call of this thread would join the group.
    const Result end_code = nccl_->GroupEnd();
    return has_failed(code) ? code : end_code;
  }

  Result finalize() const { return nccl_->CommFinalize(*comm_); }

  // Returns the result of the last call, in progress until it completes, or the error of an
  // enqueued operation.
  Result async_error() const {
    if (has_failed(init_result_)) return init_result_;
    Result code = kSuccess;
    const Result query = nccl_->CommGetAsyncError(*comm_, &code);
    return query == kSuccess ? code : query;
  }

  // Aborts or destroys the NCCL communicator on a separate thread, because both may join NCCL
  // threads. Returns false, and abandons the thread, if this takes longer than `seconds`.
  bool free(bool aborts, double seconds) const {
    if (*comm_ == nullptr) return true;
    const auto function = aborts ? nccl_->CommAbort : nccl_->CommDestroy;
    std::packaged_task<void()> task([comm = comm_, function] { function(*comm); });
    const std::future<void> done = task.get_future();
    std::thread(std::move(task)).detach();
    return done.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
  }

 private:
  const std::shared_ptr<const Library> nccl_;
  // NCCL threads write to the pointee, so it must outlive them.
  const std::shared_ptr<Comm*> comm_ = std::make_shared<Comm*>(nullptr);
  Result init_result_ = kSuccess;
};

}  // namespace
}  // namespace tpkernels::nccl

void tpkernels::bind_nccl(pybind11::module_& m) {
  using namespace nccl;
  py::class_<Library, std::shared_ptr<Library>>(m, "Library")
      .def(py::init<const std::string&>(), py::arg("name"), ReleaseGil())
      .def_readonly("path", &Library::path)
      .def_property_readonly("version", &version_text)
      .def("unique_id", &unique_id)
      .def("error_message", &Library::error_message, py::arg("code"));

  py::class_<Communicator>(m, "Communicator")
      .def(py::init<std::shared_ptr<Library>, const std::string&, int, int>(), py::arg("library"),
           py::arg("unique_id"), py::arg("rank"), py::arg("world"), ReleaseGil())
      .def("enqueue", &Communicator::enqueue, py::arg("operations"), ReleaseGil())
      .def("finalize", &Communicator::finalize, ReleaseGil())
      .def("async_error", &Communicator::async_error, ReleaseGil())
      .def("free", &Communicator::free, py::arg("aborts"), py::arg("seconds"), ReleaseGil());
}
