// The c10d::Backend of "tpkernels". It passes collectives to the Python class Backend (backend.py)
// and point-to-point operations to gloo.
//
// torch calls it with or without the GIL. Collectives in Python release the GIL while they wait.
#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace {

using c10::intrusive_ptr;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// Drops a reference to a Python object on any thread.
void release(py::object& object) {
  if (Py_IsInitialized()) {
    const py::gil_scoped_acquire gil;
    object = py::object();
  } else {
    object.release();
  }
}

// Passes the calls of torch to a CallWork (async_calls.py).
class PythonWork final : public Work {
 public:
  explicit PythonWork(py::object work) : work_(std::move(work)) {}
  ~PythonWork() override { release(work_); }

  bool isCompleted() override { return call<bool>("is_completed"); }
  bool isSuccess() const override { return call<bool>("is_success"); }
  void synchronize() override { call<void>("synchronize"); }
  bool wait(std::chrono::milliseconds timeout) override { return call<bool>("wait", timeout); }
  std::vector<at::Tensor> result() override { return call<Tensors>("result"); }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const py::gil_scoped_acquire gil;
    return work_.attr("get_future")().cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  }
  std::exception_ptr exception() const override {
    const py::gil_scoped_acquire gil;
    const py::object error = work_.attr("exception")();
    if (error.is_none()) return nullptr;
    return std::make_exception_ptr(std::runtime_error(py::str(error).cast<std::string>()));
  }

 private:
  template <class Result, class... Args>
  Result call(const char* name, const Args&... args) const {
    const py::gil_scoped_acquire gil;
    return work_.attr(name)(args...).template cast<Result>();
  }

  py::object work_;
};

class Bridge final : public c10d::Backend {
 public:
  Bridge(py::object backend, intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        backend_(std::move(backend)),
        gloo_(std::move(gloo)) {}
  ~Bridge() override { release(backend_); }

  const std::string getBackendName() const override { return "tpkernels"; }
  intrusive_ptr<Options> getBackendOptions() override {
    const py::gil_scoped_acquire gil;
    const auto timeout = backend_.attr("timeout").cast<std::chrono::milliseconds>();
    return c10::make_intrusive<Options>("tpkernels", timeout);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
    notify("set_timeout", timeout);
  }
  void shutdown() override { notify("shutdown"); }
  void abort() override { notify("abort"); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    const py::gil_scoped_acquire gil;
    return backend_.attr("num_collectives").cast<uint64_t>();
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return start("allreduce", tensors, opts);
  }
  intrusive_ptr<Work> allreduce_sparse(Tensors& tensors,
                                       const c10d::AllreduceOptions& opts) override {
    return gloo_->allreduce_sparse(tensors, opts);
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) override {
    return start("allreduce_coalesced", tensors, static_cast<c10d::AllreduceOptions>(opts));
  }
  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return start("broadcast", tensors, opts);
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return start("reduce", tensors, opts);
  }
  intrusive_ptr<Work> allgather(TensorLists& outs, Tensors& tensors,
                                const c10d::AllgatherOptions& opts) override {
    return start("allgather", outs, tensors, opts);
  }
  intrusive_ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& x,
                                      const c10d::AllgatherOptions& opts) override {
    return start("_allgather_base", out, x, opts);
  }
  // `outs` has a list per rank, of a tensor for each input.
  intrusive_ptr<Work> allgather_coalesced(TensorLists& outs, Tensors& tensors,
                                          const c10d::AllgatherOptions& opts) override {
    TensorLists by_input(tensors.size());
    for (const Tensors& of_rank : outs) {
      TORCH_CHECK_VALUE(of_rank.size() == tensors.size(),
                        "allgather_coalesced needs one output per input and rank");
      for (std::size_t i = 0; i < of_rank.size(); ++i) by_input[i].push_back(of_rank[i]);
    }
    return start("allgather", by_input, tensors, opts);
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& tensors,
                                                      const c10d::AllgatherOptions& opts) override {
    return start("allgather_into_tensor_coalesced", outs, tensors, opts);
  }
  intrusive_ptr<Work> gather(TensorLists& outs, Tensors& tensors,
                             const c10d::GatherOptions& opts) override {
    return start("gather", outs, tensors, opts);
  }
  intrusive_ptr<Work> scatter(Tensors& outs, TensorLists& tensors,
                              const c10d::ScatterOptions& opts) override {
    return start("scatter", outs, tensors, opts);
  }
  intrusive_ptr<Work> reduce_scatter(Tensors& outs, TensorLists& tensors,
                                     const c10d::ReduceScatterOptions& opts) override {
    return start("reduce_scatter", outs, tensors, opts);
  }
  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& x,
                                           const c10d::ReduceScatterOptions& opts) override {
    return start("_reduce_scatter_base", out, x, opts);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& tensors, const c10d::ReduceScatterOptions& opts) override {
    return start("reduce_scatter_tensor_coalesced", outs, tensors, opts);
  }
  intrusive_ptr<Work> alltoall_base(at::Tensor& out, at::Tensor& x,
                                    std::vector<int64_t>& out_splits,
                                    std::vector<int64_t>& in_splits,
                                    const c10d::AllToAllOptions& opts) override {
    return start("alltoall_base", out, x, out_splits, in_splits, opts);
  }
  intrusive_ptr<Work> alltoall(Tensors& outs, Tensors& tensors,
                               const c10d::AllToAllOptions& opts) override {
    return start("alltoall", outs, tensors, opts);
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    return start("barrier", opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    gloo_->monitoredBarrier(opts, wait_all_ranks);
  }
  intrusive_ptr<Work> send(Tensors& tensors, int dst_rank, int tag) override {
    return gloo_->send(tensors, dst_rank, tag);
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int src_rank, int tag) override {
    return gloo_->recv(tensors, src_rank, tag);
  }
  intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    return gloo_->recvAnysource(tensors, tag);
  }

 private:
  // Starts a collective. Returns null if it has run.
  template <class... Args>
  intrusive_ptr<Work> start(const char* name, const Args&... args) {
    const py::gil_scoped_acquire gil;
    py::object work = backend_.attr(name)(args...);
    if (work.is_none()) return nullptr;
    if (py::hasattr(work, "finish")) return c10::make_intrusive<PythonWork>(std::move(work));
    return work.cast<intrusive_ptr<Work>>();  // of gloo
  }

  template <class... Args>
  void notify(const char* name, const Args&... args) {
    const py::gil_scoped_acquire gil;
    backend_.attr(name)(args...);
  }

  py::object backend_;
  intrusive_ptr<c10d::Backend> gloo_;
};

void fail_future(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future,
                 const std::string& message) {
  const py::gil_scoped_release released;
  future->fut->setError(std::make_exception_ptr(std::runtime_error(message)));
}

}  // namespace

PYBIND11_MODULE(_tpkernels_c10d_bridge, m) {
  py::module_::import("torch.distributed");  // registers the classes of the arguments
  py::class_<Bridge, intrusive_ptr<Bridge>, c10d::Backend>(m, "Bridge")
      .def(py::init<py::object, intrusive_ptr<c10d::Backend>>(), py::arg("backend"),
           py::arg("gloo"));
  m.def("fail_future", &fail_future, py::arg("future"), py::arg("message"));
}
