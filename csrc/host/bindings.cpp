// _C.host. Memory is passed as integer addresses, dtypes as the codes of host/vector.h.
#include "bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/arena.h"
#include "host/call_records.h"
#include "host/channel.h"
#include "host/collectives.h"
#include "host/vector.h"

namespace py = pybind11;
namespace tpkernels::host {
namespace {

using ReleaseGil = py::call_guard<GilReleased>;

// A range of the region of a rank, as a Python buffer. The range and all tensors that view it keep
// the mapping alive.
struct Region {
  std::shared_ptr<Arena> arena;
  std::byte* data;
  std::size_t bytes;
};

Region make_region(std::shared_ptr<Arena> arena, int rank, std::size_t offset,
                   std::optional<std::size_t> bytes) {
  const std::size_t size = arena->region_bytes();
  const std::size_t length = bytes.value_or(offset > size ? 0 : size - offset);
  std::byte* const data = arena->address(rank, offset, length);
  return {std::move(arena), data, length};
}

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void bind_memory(py::module_& m) {
  m.def("open_memfd", &open_memfd, py::arg("name"));
  m.def("open_pidfd", &open_pidfd, py::arg("pid"));
  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init<int, std::size_t, int, bool>(), py::arg("fd"), py::arg("region_bytes"),
           py::arg("world"), py::arg("keep_fd") = false)
      .def_static("create", &Arena::create, py::arg("region_bytes"), py::arg("world"),
                  py::arg("name") = "tpkernels")
      .def("commit", &Arena::commit, py::arg("rank"), py::arg("offset"), py::arg("nbytes"),
           ReleaseGil())
      .def("decommit", &Arena::decommit, py::arg("rank"), py::arg("offset"), py::arg("nbytes"),
           ReleaseGil())
      .def("region", &make_region, py::arg("rank"), py::arg("offset") = 0,
           py::arg("nbytes") = py::none())
      .def_property_readonly("region_bytes", &Arena::region_bytes)
      .def_property_readonly("world", &Arena::world);

  py::class_<Region>(m, "Region", py::buffer_protocol())
      .def_buffer([](Region& region) {
        return py::buffer_info(region.data, 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(region.bytes));
      })
      .def_readonly("arena", &Region::arena)
      .def_property_readonly(
          "address", [](const Region& r) { return reinterpret_cast<std::uintptr_t>(r.data); })
      .def_readonly("nbytes", &Region::bytes);
}

// Calls f() with the GIL. A Python error must not leave it, because the caller is within a wait.
template <class F>
void call_in_wait(const char* where, F&& f) {
  park_if_finalizing();
  const py::gil_scoped_acquire gil;
  try {
    f();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();  // raised when the wait polls for Unix signals
    } else {
      error.discard_as_unraisable(where);
    }
  }
}

void log_warning(const std::string& text) {
  call_in_wait("a log handler", [&] {
    py::module_::import("logging").attr("getLogger")("tpkernels").attr("warning")("%s", text);
  });
}

void bind_channel(py::module_& m) {
  py::enum_<Phase>(m, "Phase")
      .value("DATA", Phase::kData)
      .value("RESULT", Phase::kResult)
      .value("READ", Phase::kRead);

  py::class_<Channel>(m, "Channel")
      .def(py::init([](std::shared_ptr<Arena> arena, int rank, std::vector<int> pidfds,
                       std::vector<int> pids, double timeout, double spin_us, double yield_us,
                       std::size_t capacity, std::vector<int> group_ranks, std::string group) {
             ChannelOptions options{timeout, spin_us, yield_us, std::move(group_ranks),
                                    std::move(group)};
             auto channel = std::make_unique<Channel>(std::move(arena), rank, std::move(pidfds),
                                                      std::move(pids), options, capacity, 0);
             channel->set_poll(&poll_signals);
             channel->set_warn(&log_warning);
             return channel;
           }),
           py::arg("arena"), py::arg("rank"), py::arg("pidfds"), py::arg("pids"),
           py::arg("timeout"), py::arg("spin_us"), py::arg("yield_us"), py::arg("capacity"),
           py::arg("group_ranks") = std::vector<int>{}, py::arg("group") = "")
      .def_static("region_bytes", &Channel::region_bytes, py::arg("world"), py::arg("limit"))
      .def_static("commit_ranges", &Channel::commit_ranges, py::arg("world"),
                  py::arg("region_bytes"), py::arg("begin"), py::arg("end"))
      .def("grow", &Channel::grow, py::arg("capacity"))
      .def_property_readonly("rank", &Channel::rank)
      .def_property_readonly("world", &Channel::world)
      .def_property_readonly("epoch", &Channel::epoch)
      .def_property_readonly("capacity", &Channel::capacity)
      .def_property_readonly("broken", &Channel::broken)
      .def("buffer_offset", &Channel::buffer_offset, py::arg("parity"))
      .def("begin", &Channel::begin, py::arg("signature"), py::arg("description"))
      .def(
          "set_caller", [](Channel&, const std::string& caller) { set_caller(caller); },
          py::arg("caller"))
      .def("end_call", &Channel::end_call, py::arg("completed") = true)
      .def("publish", &Channel::publish, py::arg("phase"), py::arg("index") = 0)
      .def("wait", &Channel::wait, py::arg("peer"), py::arg("phase"), py::arg("index") = 0,
           ReleaseGil())
      .def("wait_any", &Channel::wait_any, py::arg("peers"), py::arg("phase"), py::arg("index") = 0,
           ReleaseGil())
      .def("barrier", &Channel::barrier, ReleaseGil())
      .def_property("timeout", &Channel::timeout, &Channel::set_timeout)
      .def("check_peers", &Channel::check_peers)
      .def("watch", &Channel::watch, py::arg("phase"), py::arg("waited"))
      .def(
          "abandon",
          [](Channel& c, const std::string& reason, bool late, int culprit) {
            c.abandon(reason, late ? FailureKind::kTimeout : FailureKind::kPeerLost, culprit);
          },
          py::arg("reason"), py::arg("late") = false, py::arg("culprit") = -1)
      .def(
          "add_segment",
          [](Channel& c, std::uint64_t id, const std::shared_ptr<Arena>& arena) {
            c.add_segment(id, arena);
          },
          py::arg("identity"), py::arg("arena"))
      .def("set_location", &Channel::set_location, py::arg("segment"), py::arg("offset"))
      .def(
          "peer_segment",
          [](const Channel& c, int peer, std::size_t bytes) {
            auto [segment, offset] = c.peer_segment(peer, bytes);
            if (!segment)
              throw py::value_error("the data of rank " + std::to_string(peer) +
                                    " is not in a segment");
            return make_region(std::move(segment), peer, offset, bytes);
          },
          py::arg("peer"), py::arg("nbytes"))
      .def("in_segment", &Channel::in_segment, py::arg("peer"))
      .def("end_read", &Channel::end_read, py::arg("peer"))
      .def(
          "set_on_wait",
          [](Channel& c, const py::object& f) {
            if (f.is_none()) return c.set_on_wait(nullptr);
            c.set_on_wait(
                [f](bool begin) { call_in_wait("the callback around a wait", [&] { f(begin); }); });
          },
          py::arg("f"))
      .def(
          "set_chaos",
          [](Channel& c, std::uint64_t seed, unsigned max_delay_us, bool single_buffer,
             bool skip_waits) { c.set_chaos({seed | 1, max_delay_us, single_buffer, skip_waits}); },
          py::arg("seed"), py::arg("max_delay_us"), py::arg("single_buffer") = false,
          py::arg("skip_waits") = false);
}

// The records of calls as Python values. Their text may come from a damaged process.
void bind_call_records(py::module_& m) {
  const auto decode = [](const std::string& text) {
    return py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  };
  m.def(
      "read_calls",
      [decode](int fd, std::size_t last) {
        const GroupRecords records = read_records(fd, last);
        const char* const states[] = {"started", "completed", "failed"};
        py::list ranks;
        for (const RankCalls& rank : records.ranks) {
          py::list calls;
          for (const CallInfo& call : rank.calls) {
            calls.append(py::dict(
                py::arg("number") = call.number, py::arg("epoch") = call.epoch,
                py::arg("state") = states[static_cast<std::size_t>(call.state) % 3],
                py::arg("started") = static_cast<double>(call.start_us) / 1e6,
                py::arg("ended") = static_cast<double>(call.end_us) / 1e6,
                py::arg("call") = decode(call.text), py::arg("caller") = decode(call.caller)));
          }
          ranks.append(py::dict(py::arg("rank") = rank.rank, py::arg("pid") = rank.pid,
                                py::arg("process_state") = std::string(1, rank.process_state),
                                py::arg("calls") = calls));
        }
        return py::dict(py::arg("group") = decode(records.group), py::arg("ranks") = ranks,
                        py::arg("text") = decode(format_records(records.ranks)));
      },
      py::arg("fd"), py::arg("last"));
}

void bind_collectives(py::module_& m) {
  py::class_<ShardLayout, std::shared_ptr<ShardLayout>>(m, "ShardLayout")
      .def(py::init<std::size_t, std::size_t, std::vector<std::size_t>>(), py::arg("outer"),
           py::arg("inner"), py::arg("sizes"));

  py::class_<Epilogue>(m, "Epilogue")
      .def(py::init([](int out_dtype, std::uintptr_t bias, std::size_t cols,
                       std::uintptr_t residual, int residual_dtype) {
             return Epilogue{static_cast<DType>(out_dtype), bias ? pointer(bias) : nullptr, cols,
                             residual ? pointer(residual) : nullptr,
                             static_cast<DType>(residual_dtype)};
           }),
           py::arg("out_dtype"), py::arg("bias") = 0, py::arg("cols") = 1, py::arg("residual") = 0,
           py::arg("residual_dtype") = 0);

  py::class_<Segments, std::shared_ptr<Segments>>(m, "Segments")
      .def(py::init<>())
      .def("add", &Segments::add, py::arg("address"), py::arg("nbytes"))
      .def("forget", &Segments::forget, py::arg("identity"))
      .def("clear", &Segments::clear)
      .def("locate", &Segments::locate, py::arg("address"), py::arg("nbytes"))
      .def("__len__", &Segments::size);

  m.def(
      "run_collective",
      [](Channel& channel, const std::string& name, std::uint32_t signature,
         const std::string& description, std::uintptr_t in, std::uintptr_t out, std::size_t count,
         int dtype, int op, std::vector<std::size_t> sizes, std::vector<std::size_t> out_sizes,
         std::size_t max_slice, const std::vector<std::uintptr_t>& shard_outs,
         const std::string& caller) {
        std::vector<std::byte*> outs;
        for (const std::uintptr_t address : shard_outs) outs.push_back(pointer(address));
        CollectiveArgs args{};
        args.in.data = pointer(in);
        args.out = pointer(out);
        args.count = count;
        args.dtype = args.epilogue.out_dtype = static_cast<DType>(dtype);
        args.op = static_cast<ReduceOp>(op);
        if (!outs.empty()) args.shard_outs = &outs;
        const Shards shards{{1, 1, std::move(sizes)}, {1, 1, std::move(out_sizes)}, max_slice};
        struct AnyThread {  // the threads that make these calls are not compared
          std::uint64_t id = std::exchange(caller_id, 0);
          ~AnyThread() { caller_id = id; }
        } const any_thread;
        set_caller(caller);
        collective(name, shards)(channel, {signature, description}, args, shards);
      },
      py::arg("channel"), py::arg("name"), py::arg("signature"), py::arg("description"),
      py::arg("input"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("sizes"), py::arg("out_sizes"), py::arg("max_slice"), py::arg("shard_outs"),
      py::arg("caller"), ReleaseGil());
  m.def(
      "sum_partials",
      [](std::uintptr_t out, const std::vector<std::uintptr_t>& partials, int wire,
         std::size_t begin, std::size_t count, const Epilogue& epilogue) {
        std::vector<const std::byte*> pointers;
        for (const std::uintptr_t partial : partials) pointers.push_back(pointer(partial));
        sum_partials(pointer(out), pointers, static_cast<DType>(wire), begin, count, epilogue);
      },
      ReleaseGil());
  m.def(
      "normalise_rows",
      [](std::uintptr_t out, std::uintptr_t rows, int dtype, std::size_t count,
         std::uintptr_t weight, int weight_dtype, std::size_t cols, double eps) {
        const RmsNorm norm{pointer(out), pointer(weight), static_cast<DType>(weight_dtype), cols,
                           eps};
        normalise_rows(norm, pointer(rows), static_cast<DType>(dtype), 0, count);
      },
      ReleaseGil());
}

void bind_vector_units(py::module_& m) {
  const auto names = [](const std::vector<const VectorUnit*>& units) {
    std::vector<std::string> names;
    for (const VectorUnit* unit : units) names.emplace_back(unit->name);
    return names;
  };
  m.def("vector_units", [names] { return names(available_units()); });
  m.def("failed_vector_units", [names] { return names(failed_units()); });
  m.def("amx_refused", [] { return amx().refused; });
  m.def("vector_unit", [] { return std::string(vector_unit().name); });
  m.def(
      "use_vector_unit", [](const std::string& name) { use_unit(find_unit(name)); },
      py::arg("name"));
  m.def(
      "multiplies_exactly",
      [](const std::string& name) { return multiplies_exactly(find_unit(name)); }, py::arg("name"));
}

}  // namespace

}  // namespace tpkernels::host

void tpkernels::bind_host(pybind11::module_& m) {
  using namespace host;
  bind_memory(m);
  bind_channel(m);
  bind_call_records(m);
  bind_collectives(m);
  bind_vector_units(m);
}
