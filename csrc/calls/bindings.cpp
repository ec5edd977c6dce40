// _C.calls: the ops' kernels, and what they find planned calls by.
#include "calls/bindings.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls/collective.h"
#include "calls/kernel.h"
#include "calls/key_sets.h"
#include "calls/matmul.h"
#include "calls/memory.h"
#include "calls/ops.h"
#include "calls/product.h"
#include "calls/queued.h"
#include "calls/shortcut.h"
#include "calls/tensor.h"
#include "calls/turns.h"
#include "host/pool.h"
#include "host/product.h"

namespace py = pybind11;
namespace tpkernels::calls {
namespace {

Tensor contiguous(const py::handle& given) {
  Tensor x{};
  if (!read(given.ptr(), &x) || x.device.type != dlpack::kCpu || !is_contiguous(x)) {
    throw std::invalid_argument("a collective takes contiguous CPU tensors");
  }
  return x;
}

Addends addends(const py::object& bias, const py::object& residual) {
  Addends given;
  if (!bias.is_none()) given.bias = contiguous(bias);
  if (!residual.is_none()) given.residual = contiguous(residual);
  return given;
}

void bind_collective(py::module_& m) {
  py::class_<Collective, std::shared_ptr<Collective>>(m, "Collective")
      .def(py::init<py::object, std::shared_ptr<host::Segments>, std::uint32_t, std::string>(),
           py::arg("channel"), py::arg("segments"), py::arg("signature"), py::arg("text"))
      .def(
          "all_gather",
          [](const Collective& self, const py::object& x, const py::object& out,
             const host::ShardLayout& layout) {
            self.all_gather(contiguous(x), contiguous(out), layout);
          },
          py::arg("x"), py::arg("out"), py::arg("layout"))
      .def(
          "reduce_scatter",
          [](const Collective& self, const py::object& x, const py::object& out,
             const host::ShardLayout& layout, const py::object& bias, const py::object& residual) {
            self.reduce_scatter(contiguous(x), contiguous(out), layout, addends(bias, residual));
          },
          py::arg("x"), py::arg("out"), py::arg("layout"), py::arg("bias") = py::none(),
          py::arg("residual") = py::none())
      .def(
          "all_to_all",
          [](const Collective& self, const py::object& x, const py::object& out,
             const host::ShardLayout& given, const host::ShardLayout& taken, std::size_t largest) {
            self.all_to_all(contiguous(x), contiguous(out), given, taken, largest);
          },
          py::arg("x"), py::arg("out"), py::arg("given"), py::arg("taken"), py::arg("largest"))
      .def(
          "all_reduce",
          [](const Collective& self, const py::object& x, const py::object& out,
             const py::object& bias, const py::object& residual) {
            self.all_reduce(contiguous(x), contiguous(out), addends(bias, residual));
          },
          py::arg("x"), py::arg("out"), py::arg("bias") = py::none(),
          py::arg("residual") = py::none())
      .def(
          "all_reduce_rms_norm",
          [](const Collective& self, const py::object& x, const py::object& out,
             const py::object& normed, const py::object& weight, double eps, const py::object& bias,
             const py::object& residual) {
            self.all_reduce(contiguous(x), contiguous(out), addends(bias, residual),
                            {contiguous(weight), contiguous(normed), eps});
          },
          py::arg("x"), py::arg("out"), py::arg("normed"), py::arg("weight"), py::arg("eps"),
          py::arg("bias") = py::none(), py::arg("residual") = py::none());

  py::class_<Bound, std::shared_ptr<Bound>>(m, "Bound");
  bind_ops(m);
  bind_norm_ops(m);
}

void bind_memory(py::module_& m) {
  m.def("empty", &empty, py::arg("shape"), py::arg("dtype"));
  m.def("result_pool", [] {
    const host::Pool::Usage usage = host::result_pool().usage();
    return py::dict(py::arg("limit") = usage.limit, py::arg("idle") = usage.idle,
                    py::arg("in_use") = usage.in_use);
  });
  m.def(
      "limit_result_pool", [](std::size_t bytes) { host::result_pool().set_limit(bytes); },
      py::arg("nbytes"));
}

host::Form form_of(const std::string& layout) {
  return layout == "packed"    ? host::Form::kPanels
         : layout == "columns" ? host::Form::kColumns
                               : host::Form::kRows;
}

void bind_product(py::module_& m) {
  m.attr("PANEL_COLUMNS") = host::Product::kPanel;
  py::class_<Panels>(m, "Panels")
      .def(py::init([](std::uintptr_t address, std::size_t pitch, std::int64_t k, std::int64_t n,
                       int dtype, py::object owner) {
             const Weight weight{reinterpret_cast<const void*>(address),
                                 pitch,
                                 k,
                                 n,
                                 static_cast<host::DType>(dtype),
                                 host::Form::kPanels};
             return Panels{weight, std::move(owner)};
           }),
           py::arg("address"), py::arg("pitch"), py::arg("k"), py::arg("n"), py::arg("dtype"),
           py::arg("owner") = py::none());
  m.def(
      "matmul",
      [](const py::object& x, const py::handle& w, bool packed) {
        return matmul(x, w.ptr(), packed);
      },
      py::arg("x"), py::arg("w"), py::arg("packed"));
  m.def(
      "multiplies",
      [](int dtype, const std::string& layout, std::size_t rows) {
        return multiplies(static_cast<host::DType>(dtype), form_of(layout), rows);
      },
      py::arg("dtype"), py::arg("layout"), py::arg("rows"));
  m.def(
      "multiply",
      [](const py::object& x, const py::handle& w, const py::handle& out, const py::handle& bias,
         bool packed, std::pair<std::size_t, std::size_t> whole) {
        return multiply(x, w.ptr(), out.ptr(), bias.ptr(), packed, {whole.first, whole.second});
      },
      py::arg("x"), py::arg("w"), py::arg("out"), py::arg("bias"), py::arg("packed"),
      py::arg("whole_shape"));
}

void bind_turns(py::module_& m) {
  py::class_<Lock, std::shared_ptr<Lock>>(m, "Lock")
      .def("acquire", &Lock::acquire, py::arg("blocking") = true)
      .def("release", &Lock::release)
      .def("__enter__", [](Lock& self) { return self.acquire(); })
      .def("__exit__", [](Lock& self, const py::args&) { self.release(); });

  py::class_<Turns>(m, "Turns")
      .def(py::init<>())
      .def("admit", &Turns::admit, py::arg("name"), py::arg("group"))
      .def("retire", &Turns::retire)
      .def("forget_calls", &Turns::forget)
      .def("planned_calls", &Turns::planned)
      .def_property_readonly("generation", &Turns::generation)
      .def_property_readonly("lock", &Turns::lock)
      .def("renew_lock", &Turns::renew_lock)
      .def_readwrite("in_call", &Turns::in_call)
      .def_readwrite("open", &Turns::open)
      .def_readwrite("untuned_in_capture", &Turns::untuned_in_capture);
}

void bind_kernels(py::module_& m) {
  m.def("open_exchange", &open_exchange, py::arg("tensor_class"), py::arg("plain_keys"));
  // (name, has a default, default, by keyword only) of each argument.
  using Described = std::tuple<py::str, bool, py::object, bool>;
  py::class_<Arguments, std::shared_ptr<Arguments>>(m, "Arguments")
      .def(py::init([](std::string op, const std::vector<Described>& described, py::object cls) {
             std::vector<Argument> each;
             for (const auto& [name, has_standard, standard, by_keyword] : described) {
               each.push_back({name, has_standard ? standard : py::object(), by_keyword});
             }
             return std::make_shared<Arguments>(std::move(op), std::move(each), std::move(cls));
           }),
           py::arg("op"), py::arg("described"), py::arg("cls"))
      .def(
          "named",
          [](const Arguments& self, const py::tuple& args, const py::dict& kwargs) {
            return self.named(self.parse(args.ptr(), kwargs.ptr()));
          },
          py::arg("args"), py::arg("kwargs"));
  py::class_<Alarm, std::shared_ptr<Alarm>>(m, "Alarm")
      .def(py::init<>())
      .def("watch", &Alarm::watch, py::arg("word"))
      .def("unwatch", &Alarm::unwatch, py::arg("word"))
      .def("rings", &Alarm::rings)
      .def_readwrite("raised", &Alarm::raised);
  py::class_<Queued, Bound, std::shared_ptr<Queued>>(m, "Queued")
      .def(py::init([](std::shared_ptr<Arguments> arguments, py::object execute, py::object call,
                       std::shared_ptr<Alarm> alarm, std::optional<bool> deterministic) {
             return std::make_shared<Queued>(std::move(arguments), std::move(execute),
                                             std::move(call), std::move(alarm), deterministic);
           }),
           py::arg("arguments"), py::arg("execute"), py::arg("call"), py::arg("alarm"),
           py::arg("deterministic"));
  m.def(
      "make_kernel",
      [](std::shared_ptr<Arguments> arguments, py::object plan, py::object run, py::object failed,
         py::object check) {
        return make_kernel(std::move(arguments),
                           {std::move(plan), std::move(run), std::move(failed), std::move(check)});
      },
      py::arg("arguments"), py::arg("plan"), py::arg("run"), py::arg("failed"),
      py::arg("check") = py::none());
  m.def(
      "make_above",
      [](py::object kernel, py::object otherwise, std::uint64_t below,
         std::vector<std::uint64_t> plain, bool overwrites) {
        return make_above(std::move(kernel), std::move(otherwise), {below, std::move(plain)},
                          overwrites);
      },
      py::arg("kernel"), py::arg("otherwise"), py::arg("below"), py::arg("plain"),
      py::arg("overwrites"));
}

void bind_shortcut(py::module_& m) {
  using Pair = std::pair<std::uint64_t, std::uint64_t>;  // included, excluded
  m.def("keys_of_thread", [] {
    const ThreadKeys keys = keys_of_thread();
    return Pair(keys.included, keys.excluded);
  });
  m.def(
      "keys_of_tensor", [](const py::handle& tensor) { return keys_of_tensor(tensor.ptr()); },
      py::arg("tensor"));
  using Sample = std::tuple<py::object, std::uint64_t, std::uint64_t>;
  m.def(
      "find_key_sets",
      [](const std::vector<Sample>& given, const Pair& thread) {
        std::vector<KeySample> samples;
        for (const auto& [tensor, impl, keys] : given) samples.push_back({tensor, impl, keys});
        return find_key_sets(samples, {thread.first, thread.second});
      },
      py::arg("samples"), py::arg("thread"));
  // (included, excluded, records, key sets of tensors) of each plain state.
  using State = std::tuple<std::uint64_t, std::uint64_t, bool, std::vector<std::uint64_t>>;
  const auto plain = [](const std::vector<State>& states) {
    std::vector<PlainState> result;
    for (const auto& [included, excluded, records, tensors] : states) {
      result.push_back({{included, excluded}, records, tensors});
    }
    return result;
  };
  m.def(
      "make_is_plain",
      [plain](const std::vector<State>& states) { return make_is_plain(plain(states)); },
      py::arg("states"));
  m.def(
      "make_shortcut",
      [plain](std::shared_ptr<Arguments> arguments, py::object kernel, py::object op,
              const std::vector<State>& states, std::uint64_t versioned, bool overwrites) {
        return make_shortcut(std::move(arguments), std::move(kernel), std::move(op), plain(states),
                             versioned, overwrites);
      },
      py::arg("arguments"), py::arg("kernel"), py::arg("op"), py::arg("states"),
      py::arg("versioned"), py::arg("overwrites"));
  m.def(
      "make_matmul_shortcut",
      [plain](std::shared_ptr<Arguments> arguments, py::object op,
              const std::vector<State>& states) {
        return make_matmul_shortcut(std::move(arguments), std::move(op), plain(states));
      },
      py::arg("arguments"), py::arg("op"), py::arg("states"));
}

}  // namespace

void bind(py::module_& m) {
  bind_collective(m);
  bind_memory(m);
  bind_product(m);
  bind_turns(m);
  bind_kernels(m);
  bind_shortcut(m);
}

}  // namespace tpkernels::calls
