#include "calls/ops.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "calls/bound.h"
#include "calls/collective.h"
#include "calls/matmul.h"
#include "calls/operands.h"

namespace tpkernels::calls {
namespace {

namespace py = pybind11;

using SharedLayout = std::shared_ptr<host::ShardLayout>;

class AllReduceInPlace final : public Bound {
 public:
  explicit AllReduceInPlace(SharedCollective collective) : collective_(std::move(collective)) {}

  py::object run(const Slots&, const Tensor& x) const override {
    collective_->all_reduce(x, x, {});
    return py::none();
  }

 private:
  SharedCollective collective_;
};

class AllReduce final : public Bound {
 public:
  AllReduce(SharedCollective collective, py::tuple shape)
      : collective_(std::move(collective)), shape_(std::move(shape)) {}

  py::object run(const Slots& slots, const Tensor& x) const override {
    py::object out = empty_like(slots[0], shape_);
    collective_->all_reduce(x, tensor(out), {});
    return out;
  }

 private:
  SharedCollective collective_;
  py::tuple shape_;
};

// Collectives of shards, whose result has another shape.
class OfShards : public Bound {
 public:
  OfShards(SharedCollective collective, SharedLayout layout, py::tuple shape)
      : collective_(std::move(collective)), layout_(std::move(layout)), shape_(std::move(shape)) {}

 protected:
  // The one rank, which has nothing to copy.
  bool is_alone() const { return layout_->sizes.size() == 1; }

  SharedCollective collective_;
  SharedLayout layout_;
  py::tuple shape_;
};

class AllGather final : public OfShards {
 public:
  using OfShards::OfShards;

  py::object run(const Slots& slots, const Tensor& x) const override {
    py::object out = empty_like(slots[0], shape_);
    collective_->all_gather(x, tensor(out), *layout_);
    return out;
  }
};

class ReduceScatter final : public OfShards {
 public:
  using OfShards::OfShards;

  py::object run(const Slots& slots, const Tensor& x) const override {
    py::object out = empty_like(slots[0], shape_);
    collective_->reduce_scatter(x, tensor(out), *layout_, {});
    return out;
  }
};

class AllToAll final : public OfShards {
 public:
  AllToAll(SharedCollective collective, SharedLayout given, SharedLayout taken, std::size_t largest,
           py::tuple shape)
      : OfShards(std::move(collective), std::move(taken), std::move(shape)),
        given_(std::move(given)),
        largest_(largest) {}

  py::object run(const Slots& slots, const Tensor& x) const override {
    py::object out = empty_like(slots[0], shape_);
    collective_->all_to_all(x, tensor(out), *given_, *layout_, largest_);
    return out;
  }

 private:
  SharedLayout given_;
  std::size_t largest_;
};

class MatmulAllReduce final : public Bound {
 public:
  MatmulAllReduce(SharedCollective collective, py::tuple shape, bool packed)
      : collective_(std::move(collective)), shape_(std::move(shape)), packed_(packed) {}

  bool takes(const Slots& slots, const Tensor& x) const override {
    return takes_operands(slots, x, kAddedToAll);
  }

  py::object run(const Slots& slots, const Tensor& x) const override {
    const Added added(slots, kAddedToAll);
    py::object out = partial_of(slots, x, packed_);  // and then the sum
    const Tensor partial = tensor(out);
    collective_->all_reduce(partial, partial, added.addends);
    return viewed(std::move(out), shape_);
  }

 private:
  SharedCollective collective_;
  py::tuple shape_;
  bool packed_;  // the weight, which the key of the call tells
};

class MatmulReduceScatter final : public OfShards {
 public:
  MatmulReduceScatter(SharedCollective collective, SharedLayout layout, py::tuple shape,
                      bool packed)
      : OfShards(std::move(collective), std::move(layout), std::move(shape)), packed_(packed) {}

  bool takes(const Slots& slots, const Tensor& x) const override {
    return takes_operands(slots, x, kAddedToShard);
  }

  py::object run(const Slots& slots, const Tensor& x) const override {
    const Added added(slots, kAddedToShard);
    const py::object partial = partial_of(slots, x, packed_);
    py::object out = is_alone() ? viewed(partial, shape_) : empty_like(partial.ptr(), shape_);
    collective_->reduce_scatter(tensor(partial), tensor(out), *layout_, added.addends);
    return out;
  }

 private:
  bool packed_;
};

// x gathered, then multiplied by each weight; without biases.
class AllGatherMatmul final : public OfShards {
 public:
  AllGatherMatmul(SharedCollective collective, SharedLayout layout, py::tuple shape,
                  py::list result_shapes, std::vector<bool> packed, bool return_gathered)
      : OfShards(std::move(collective), std::move(layout), std::move(shape)),
        result_shapes_(std::move(result_shapes)),
        packed_(std::move(packed)),
        return_gathered_(return_gathered) {}

  py::object run(const Slots& slots, const Tensor& x) const override {
    py::object whole;
    if (is_alone() && !return_gathered_) {
      whole = py::reinterpret_borrow<py::object>(slots[kX]);
    } else {
      whole = empty_like(slots[kX], shape_);
      collective_->all_gather(x, tensor(whole), *layout_);
    }
    const py::object rows = as_rows(whole, x);
    py::list results;
    for (std::size_t i = 0; i < result_shapes_.size(); ++i) {
      PyObject* const w = PySequence_Fast_GET_ITEM(slots[kW], static_cast<Py_ssize_t>(i));
      py::object result = matmul(rows, w, packed_[i]);
      results.append(viewed(std::move(result), py::tuple(result_shapes_[i])));
    }
    if (!return_gathered_) whole = empty_like(slots[kX], py::make_tuple(0));
    return py::make_tuple(std::move(whole), std::move(results));
  }

 private:
  py::list result_shapes_;  // of this rank's results
  std::vector<bool> packed_;
  bool return_gathered_;
};

}  // namespace

void bind_ops(py::module_& m) {
  const auto collective = py::arg("collective");
  const auto layout = py::arg("layout");
  const auto shape = py::arg("shape");
  const auto packed = py::arg("packed");
  py::class_<AllReduceInPlace, Bound, std::shared_ptr<AllReduceInPlace>>(m, "AllReduceInPlace")
      .def(py::init<SharedCollective>(), collective);
  py::class_<AllReduce, Bound, std::shared_ptr<AllReduce>>(m, "AllReduce")
      .def(py::init<SharedCollective, py::tuple>(), collective, shape);
  py::class_<AllGather, Bound, std::shared_ptr<AllGather>>(m, "AllGather")
      .def(py::init<SharedCollective, SharedLayout, py::tuple>(), collective, layout, shape);
  py::class_<ReduceScatter, Bound, std::shared_ptr<ReduceScatter>>(m, "ReduceScatter")
      .def(py::init<SharedCollective, SharedLayout, py::tuple>(), collective, layout, shape);
  py::class_<AllToAll, Bound, std::shared_ptr<AllToAll>>(m, "AllToAll")
      .def(py::init<SharedCollective, SharedLayout, SharedLayout, std::size_t, py::tuple>(),
           collective, py::arg("given"), py::arg("taken"), py::arg("largest"), shape);
  py::class_<AllGatherMatmul, Bound, std::shared_ptr<AllGatherMatmul>>(m, "AllGatherMatmul")
      .def(py::init<SharedCollective, SharedLayout, py::tuple, py::list, std::vector<bool>, bool>(),
           collective, layout, shape, py::arg("result_shapes"), packed, py::arg("return_gathered"));
  py::class_<MatmulAllReduce, Bound, std::shared_ptr<MatmulAllReduce>>(m, "MatmulAllReduce")
      .def(py::init<SharedCollective, py::tuple, bool>(), collective, shape, packed);
  py::class_<MatmulReduceScatter, Bound, std::shared_ptr<MatmulReduceScatter>>(
      m, "MatmulReduceScatter")
      .def(py::init<SharedCollective, SharedLayout, py::tuple, bool>(), collective, layout, shape,
           packed);
}

}  // namespace tpkernels::calls
