// _C.calls: the kernels of the ops and the cache of planned calls.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "calls/attention.h"
#include "calls/caller.h"
#include "calls/direct.h"
#include "calls/entry.h"
#include "calls/group_calls.h"
#include "calls/kernel.h"
#include "calls/matmul.h"
#include "calls/python.h"
#include "calls/tensor.h"
#include "host/matmul.h"

namespace tpkernels::calls {
namespace {

// Reads a contiguous CPU tensor. None becomes a tensor without data.
Tensor contiguous(const py::object& object) {
  Tensor x{};
  if (object.is_none()) return x;
  if (!read(object.ptr(), &x) || x.device.type != dlpack::kCpu || !is_contiguous(x)) {
    throw std::invalid_argument("a collective needs contiguous CPU tensors");
  }
  return x;
}

void bind_direct(py::module_& m) {
  py::class_<host::SumTree, std::shared_ptr<host::SumTree>>(m, "SumTree")
      .def(py::init<const std::vector<std::size_t>&, std::size_t, std::size_t>(), py::arg("sizes"),
           py::arg("unit"), py::arg("rank"))
      .def_property_readonly("max_nodes", &host::SumTree::max_nodes);
  m.def(
      "multiply_nodes",
      [](const py::object& x, const py::object& w, const host::SumTree& tree) {
        return multiply_nodes(contiguous(x), w, tree.local());
      },
      py::arg("x"), py::arg("w"), py::arg("tree"));
  py::class_<host::Routing, std::shared_ptr<host::Routing>>(m, "Routing")
      .def(py::init([](const py::object& topk_ids, std::vector<std::size_t> tokens,
                       const std::vector<std::size_t>& experts_per_rank) {
             const Tensor ids = contiguous(topk_ids);
             return host::Routing(data_ptr(ids), ids.dtype.bits == 64,
                                  static_cast<std::size_t>(ids.shape[1]), std::move(tokens),
                                  experts_per_rank);
           }),
           py::arg("topk_ids"), py::arg("tokens"), py::arg("experts_per_rank"))
      .def_readonly("counts", &host::Routing::counts)
      .def_readonly("rows", &host::Routing::rows);
  py::class_<Collective, std::shared_ptr<Collective>>(m, "Collective")
      .def(py::init([](const py::object& channel, std::shared_ptr<host::Segments> segments,
                       std::uint32_t signature, std::string description, const std::string& name,
                       host::ShardLayout layout, host::ShardLayout out_layout,
                       std::size_t max_slice_numel, std::shared_ptr<host::SumTree> tree) {
             host::Shards shards{std::move(layout), std::move(out_layout), max_slice_numel};
             return std::make_shared<Collective>(channel, std::move(segments), signature,
                                                 std::move(description), name, std::move(shards),
                                                 std::move(tree));
           }),
           py::arg("channel"), py::arg("segments"), py::arg("signature"), py::arg("description"),
           py::arg("name"), py::arg_v("layout", host::ShardLayout{}, "..."),
           py::arg_v("out_layout", host::ShardLayout{}, "..."), py::arg("max_slice_numel") = 0,
           py::arg("tree") = py::none())
      .def(
          "run",
          [](const Collective& self, const py::object& x, const py::object& out,
             const py::object& bias, const py::object& residual, const py::object& normed,
             const py::object& norm_weight, double eps, const host::Routing* routing,
             const py::object& weights) {
            const Tensor out_view = contiguous(out);
            self.run(contiguous(x), out_view,
                     make_epilogue(out_view, contiguous(bias), contiguous(residual)),
                     make_rms_norm(contiguous(normed), contiguous(norm_weight), eps), routing,
                     contiguous(weights));
          },
          py::arg("x"), py::arg("out"), py::arg("bias") = py::none(),
          py::arg("residual") = py::none(), py::arg("normed") = py::none(),
          py::arg("norm_weight") = py::none(), py::arg("eps") = 0.0,
          py::arg("routing") = py::none(), py::arg("weights") = py::none());
  m.def(
      "weigh_rows",
      [](const py::object& rows, const py::object& places, const py::object& weights,
         const py::object& out) {
        weigh_rows(contiguous(rows), contiguous(places), contiguous(weights), contiguous(out));
      },
      py::arg("rows"), py::arg("places"), py::arg("weights"), py::arg("out"));
  py::class_<Direct, BoundCall, std::shared_ptr<Direct>>(m, "Direct")
      .def(py::init<std::shared_ptr<Collective>, const Arguments&, bool, py::tuple, bool, bool,
                    bool, double>(),
           py::arg("collective"), py::arg("arguments"), py::kw_only(), py::arg("in_place"),
           py::arg("shape"), py::arg("has_matmul"), py::arg("gathers"), py::arg("return_gathered"),
           py::arg("eps"));
}

host::WeightLayout parse_layout(const std::string& layout) {
  return layout == "packed"    ? host::WeightLayout::kPanels
         : layout == "int8"    ? host::WeightLayout::kInt8Panels
         : layout == "columns" ? host::WeightLayout::kColumns
                               : host::WeightLayout::kRows;
}

void bind_matmul(py::module_& m) {
  m.attr("PANEL_COLUMNS") = host::Matmul::kPanelColumns;
  m.def("matmul", &matmul, py::arg("x"), py::arg("w"));
  m.def("make_columns_kernel", &make_columns_kernel, py::arg("run"));
  m.def(
      "has_matmul_kernel",
      [](int dtype, const std::string& layout, std::size_t rows) {
        return has_matmul_kernel(static_cast<host::DType>(dtype), parse_layout(layout), rows);
      },
      py::arg("dtype"), py::arg("layout"), py::arg("rows"));
  m.def("multiply", &multiply, py::arg("x"), py::arg("w"), py::arg("out"), py::arg("bias"),
        py::arg("full_shape"));
  m.def("grouped_multiply", &grouped_multiply, py::arg("x"), py::arg("w"), py::arg("counts"),
        py::arg("out"));
}

void bind_attention(py::module_& m) {
  m.def("attention", &attention, py::arg("q"), py::arg("k"), py::arg("v"), py::kw_only(),
        py::arg("scale"), py::arg("sequences") = py::none(), py::arg("window") = 0,
        py::arg("cap") = 0.0, py::arg("sinks") = py::none());
}

void bind_group_calls(py::module_& m) {
  m.def("find_caller", &find_caller);
  py::class_<Lock, std::shared_ptr<Lock>>(m, "Lock")
      .def("acquire", &Lock::acquire, py::arg("blocking") = true)
      .def("release", &Lock::release)
      .def("is_held", &Lock::is_held)
      .def("__enter__", [](Lock& self) { return self.acquire(); })
      .def("__exit__", [](Lock& self, const py::args&) { self.release(); });

  py::class_<GroupCalls>(m, "GroupCalls")
      .def(py::init<>())
      .def("register_group", &GroupCalls::register_group, py::arg("name"), py::arg("group"))
      .def("unregister", &GroupCalls::unregister)
      .def("clear_planned_calls", &GroupCalls::clear)
      .def("planned_calls", &GroupCalls::planned_calls)
      .def_property_readonly("generation", &GroupCalls::generation)
      .def_property_readonly("lock", &GroupCalls::lock)
      .def("renew_lock", &GroupCalls::renew_lock)
      .def_readwrite("in_call", &GroupCalls::in_call)
      .def_readwrite("has_pending_calls", &GroupCalls::has_pending_calls)
      .def_readwrite("open", &GroupCalls::open)
      .def_readwrite("untuned_in_capture", &GroupCalls::untuned_in_capture);
  py::class_<BoundCall, std::shared_ptr<BoundCall>>(m, "BoundCall");
}

void bind_kernels(py::module_& m) {
  m.def("open_exchange", &open_exchange, py::arg("tensor_class"));
  py::class_<Arguments, std::shared_ptr<Arguments>>(m, "Arguments")
      .def(py::init<std::string, const Arguments::Specs&, py::object>(), py::arg("op"),
           py::arg("specs"), py::arg("cls"))
      .def(
          "to_named_tuple",
          [](const Arguments& self, const py::tuple& args, const py::dict& kwargs) {
            std::vector<PyObject*> values;
            for (const py::handle value : args) values.push_back(value.ptr());
            py::list names;
            for (const auto& [name, value] : kwargs) {
              names.append(name);
              values.push_back(value.ptr());
            }
            const auto positional = static_cast<Py_ssize_t>(args.size());
            return self.to_named_tuple(
                self.parse({values.data(), positional, py::tuple(names).ptr()}));
          },
          py::arg("args"), py::arg("kwargs"));
  py::class_<Alarm, std::shared_ptr<Alarm>>(m, "Alarm")
      .def(py::init<>())
      .def("watch", &Alarm::watch, py::arg("flag"))
      .def("unwatch", &Alarm::unwatch, py::arg("flag"))
      .def("is_set", &Alarm::is_set)
      .def_readwrite("raised", &Alarm::raised);
  py::class_<PythonCall, BoundCall, std::shared_ptr<PythonCall>>(m, "PythonCall")
      .def(py::init<std::shared_ptr<Arguments>, py::object, py::object, std::shared_ptr<Alarm>,
                    std::optional<bool>>(),
           py::arg("arguments"), py::arg("execute"), py::arg("call"), py::arg("alarm"),
           py::arg("deterministic"));
  m.def("make_kernel", &make_kernel, py::arg("arguments"), py::arg("plan"), py::arg("run"),
        py::arg("on_failure"), py::arg("check") = py::none(), py::arg("overwrites") = false);
  m.def("make_entry", &make_entry, py::arg("arguments"), py::arg("op"), py::arg("record"),
        py::arg("custom"), py::arg("dispatched_op") = py::none());
}

}  // namespace

}  // namespace tpkernels::calls

void tpkernels::bind_calls(pybind11::module_& m) {
  using namespace calls;
  m.def("empty", &empty, py::arg("shape"), py::arg("dtype"));
  bind_matmul(m);
  bind_attention(m);
  bind_group_calls(m);
  bind_kernels(m);
  bind_direct(m);
}
