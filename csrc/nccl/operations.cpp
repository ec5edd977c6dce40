// The operations of a communicator: collectives, transfers, and registration of memory.
#include <algorithm>
#include <iterator>

#include "nccl/communicator.h"

namespace tpkernels::nccl {
namespace {

const char* name_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllGather:
      return "all_gather";
    case OperationKind::kReduceScatter:
      return "reduce_scatter";
    case OperationKind::kAllReduce:
      return "all_reduce";
    case OperationKind::kBroadcast:
      return "broadcast";
    case OperationKind::kSend:
      return "send";
    case OperationKind::kRecv:
      break;
  }
  return "recv";
}

std::string describe(const std::vector<Operation>& operations) {
  const Operation& first = operations.front();
  if (operations.size() > 1) {
    return "group of " + std::to_string(operations.size()) + " operations (" + name_of(first.kind) +
           ", ...)";
  }
  return std::string(name_of(first.kind)) + " of " + std::to_string(first.count) + " elements";
}

}  // namespace

std::vector<Operation> all_to_all(const void* send, void* recv,
                                  const std::vector<std::size_t>& send_counts,
                                  const std::vector<std::size_t>& recv_counts, host::DType dtype,
                                  void* stream) {
  std::vector<Operation> operations;
  const auto* from = static_cast<const std::byte*>(send);
  auto* to = static_cast<std::byte*>(recv);
  for (std::size_t r = 0; r < send_counts.size(); ++r) {
    const int peer = static_cast<int>(r);
    operations.push_back(
        {OperationKind::kSend, from, nullptr, send_counts[r], dtype, peer, stream});
    operations.push_back({OperationKind::kRecv, nullptr, to, recv_counts[r], dtype, peer, stream});
    from += send_counts[r] * host::size_of(dtype);
    to += recv_counts[r] * host::size_of(dtype);
  }
  return operations;
}

void Communicator::enqueue(const std::vector<Operation>& operations) {
  std::vector<Operation> nonempty;  // all ranks skip the same empty operations
  std::copy_if(operations.begin(), operations.end(), std::back_inserter(nonempty),
               [](const Operation& operation) { return operation.count > 0; });
  if (nonempty.empty()) return check();
  call(describe(nonempty), [&](Comm* comm) {
    if (nonempty.size() == 1) return run(nonempty.front(), comm);
    const Functions& f = library_->functions();
    Result code = f.GroupStart();
    if (code != kSuccess) return code;
    for (const Operation& operation : nonempty) {
      code = run(operation, comm);
      if (code != kSuccess && code != kInProgress) break;
    }
    // Even after a failure: otherwise the thread's next call would join this group.
    const Result ended = f.GroupEnd();
    return code != kSuccess && code != kInProgress ? code : ended;
  });
}

Result Communicator::run(const Operation& o, Comm* comm) const {
  const Functions& f = library_->functions();
  const int type = data_type(o.dtype);
  switch (o.kind) {
    case OperationKind::kAllGather:
      return f.AllGather(o.send, o.recv, o.count, type, comm, o.stream);
    case OperationKind::kReduceScatter:
      return f.ReduceScatter(o.send, o.recv, o.count, type, kSum, comm, o.stream);
    case OperationKind::kAllReduce:
      return f.AllReduce(o.send, o.recv, o.count, type, kSum, comm, o.stream);
    case OperationKind::kBroadcast:
      return f.Broadcast(o.send, o.recv, o.count, type, o.peer, comm, o.stream);
    case OperationKind::kSend:
      return f.Send(o.send, o.count, type, o.peer, comm, o.stream);
    case OperationKind::kRecv:
      break;
  }
  return f.Recv(o.recv, o.count, type, o.peer, comm, o.stream);
}

void* Communicator::register_window(void* memory, std::size_t bytes, int flags) {
  auto* const function =
      library_->need(library_->functions().CommWindowRegister, "ncclCommWindowRegister");
  auto window = std::make_shared<void*>(nullptr);
  call("register_window", [&](Comm* comm) {
    handle_->result = window;
    return function(comm, memory, bytes, window.get(), flags);
  });
  return *window;
}

void Communicator::deregister_window(void* window) {
  auto* const function =
      library_->need(library_->functions().CommWindowDeregister, "ncclCommWindowDeregister");
  call("deregister_window", [&](Comm* comm) { return function(comm, window); });
}

void* Communicator::register_buffer(void* memory, std::size_t bytes) {
  auto* const function = library_->need(library_->functions().CommRegister, "ncclCommRegister");
  auto registration = std::make_shared<void*>(nullptr);
  call("register_buffer", [&](Comm* comm) {
    handle_->result = registration;
    return function(comm, memory, bytes, registration.get());
  });
  return *registration;
}

void Communicator::deregister_buffer(void* registration) {
  auto* const function = library_->need(library_->functions().CommDeregister, "ncclCommDeregister");
  call("deregister_buffer", [&](Comm* comm) { return function(comm, registration); });
}

}  // namespace tpkernels::nccl
