// The bound calls of the ops that normalise the rows of their sum.
#include <cstddef>
#include <memory>
#include <utility>

#include "calls/bound.h"
#include "calls/collective.h"
#include "calls/operands.h"
#include "calls/ops.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

// Both ops; a result is a pair of the normalised rows and the sum, of one shape.
class Normalised : public Bound {
 public:
  Normalised(SharedCollective collective, py::tuple shape, double eps)
      : shape_(std::move(shape)), collective_(std::move(collective)), eps_(eps) {}

 protected:
  static bool takes_weight(const Slots& slots, std::size_t at) {
    Tensor weight{};
    return read(slots[at], &weight) && is_contiguous(weight);
  }

  py::tuple run(const Tensor& x, py::object sum, const Addends& addends, PyObject* weight) const {
    py::object normed = empty_like(sum.ptr(), shape_);
    collective_->all_reduce(x, tensor(sum), addends, {tensor(weight), tensor(normed), eps_});
    return py::make_tuple(std::move(normed), std::move(sum));
  }

  py::tuple shape_;

 private:
  SharedCollective collective_;
  double eps_;
};

class AllReduceRmsNorm final : public Normalised {
 public:
  using Normalised::Normalised;

  bool takes(const Slots& slots, const Tensor& x) const override {
    Tensor residual{};
    return is_contiguous(x) && takes_weight(slots, kWeight) &&
           (slots[kResidual] == Py_None ||
            (read(slots[kResidual], &residual) && is_contiguous(residual)));
  }

  py::object run(const Slots& slots, const Tensor& x) const override {
    Addends addends;
    if (slots[kResidual] != Py_None) addends.residual = tensor(slots[kResidual]);
    return Normalised::run(x, empty_like(slots[0], shape_), addends, slots[kWeight]);
  }

 private:
  static constexpr std::size_t kWeight = 1, kResidual = 3;  // behind the group
};

class MatmulAllReduceRmsNorm final : public Normalised {
 public:
  MatmulAllReduceRmsNorm(SharedCollective collective, py::tuple shape, double eps, bool packed)
      : Normalised(std::move(collective), std::move(shape), eps), packed_(packed) {}

  bool takes(const Slots& slots, const Tensor& x) const override {
    return takes_operands(slots, x, kAdded) && takes_weight(slots, kNormWeight);
  }

  py::object run(const Slots& slots, const Tensor& x) const override {
    const Added added(slots, kAdded);
    py::object sum = viewed(partial_of(slots, x, packed_), shape_);  // the partial, until then
    const Tensor partial = tensor(sum);
    return Normalised::run(partial, std::move(sum), added.addends, slots[kNormWeight]);
  }

 private:
  static constexpr std::size_t kNormWeight = 2, kAdded = 4;
  bool packed_;  // the weight of the product
};

}  // namespace

void bind_norm_ops(py::module_& m) {
  const auto collective = py::arg("collective");
  const auto shape = py::arg("shape");
  const auto eps = py::arg("eps");
  py::class_<AllReduceRmsNorm, Bound, std::shared_ptr<AllReduceRmsNorm>>(m, "AllReduceRmsNorm")
      .def(py::init<SharedCollective, py::tuple, double>(), collective, shape, eps);
  py::class_<MatmulAllReduceRmsNorm, Bound, std::shared_ptr<MatmulAllReduceRmsNorm>>(
      m, "MatmulAllReduceRmsNorm")
      .def(py::init<SharedCollective, py::tuple, double, bool>(), collective, shape, eps,
           py::arg("packed"));
}

}  // namespace tpkernels::calls
