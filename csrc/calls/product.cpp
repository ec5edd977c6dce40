#include "calls/product.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "calls/kernel.h"
#include "calls/python.h"
#include "host/vector.h"

namespace tpkernels::calls {
namespace {

using host::DType;
using host::Form;
using host::Product;
using host::Way;

// at::parallel_for and at::get_num_threads of libtorch's stable C interface:
// torch/csrc/stable/c/shim.h, torch 2.10.
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                     Part part, void* context);
using GetNumThreads = std::int32_t (*)(std::uint32_t* threads);

struct Threads {
  ParallelFor parallel_for = nullptr;
  GetNumThreads get_num_threads = nullptr;
};

// Null where torch is not loaded.
const Threads& torch_threads() {
  static const auto found = [] {
    Threads threads;
    if (void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
      threads.parallel_for = reinterpret_cast<ParallelFor>(dlsym(torch, "torch_parallel_for"));
      threads.get_num_threads =
          reinterpret_cast<GetNumThreads>(dlsym(torch, "torch_get_num_threads"));
    }
    return threads;
  }();
  return found;
}

// Bytes of the weight that are worth a thread's while.
constexpr std::size_t kGrainBytes = 128 << 10;

// The fewest rows of a part.
constexpr std::size_t kPartRows = 48;
// Parts of a product for each thread, if the rows suffice: at most a quarter of its share waits for
// the others. Each part makes the panels of a plain weight again.
constexpr std::size_t kParts = 4;

// A product as blocks of columns, each by parts of the rows.
struct Work {
  Product product;
  Way way;
  std::size_t parts;
};

void multiply_items(std::int64_t begin, std::int64_t end, void* context) {
  const auto& work = *static_cast<const Work*>(context);
  const auto [product, way, parts] = work;
  if (parts == 1) {
    way.multiply(product, static_cast<std::size_t>(begin) * way.columns,
                 std::min(static_cast<std::size_t>(end) * way.columns, product.columns));
    return;
  }
  for (auto item = static_cast<std::size_t>(begin); item < static_cast<std::size_t>(end); ++item) {
    const std::size_t column = item / parts * way.columns, part = item % parts;
    const std::size_t row = product.rows * part / parts;
    const std::size_t rows = product.rows * (part + 1) / parts - row;
    way.multiply(some_rows(product, row, rows), column,
                 std::min(column + way.columns, product.columns));
  }
}

// By how many parts of the rows, so that the threads' shares are about the same.
std::size_t parts_of_rows(const Way& way, std::size_t rows, std::size_t blocks) {
  std::uint32_t threads = 1;
  if (!way.parts_of_rows || torch_threads().get_num_threads(&threads) != 0) return 1;
  if (blocks % threads == 0) return 1;
  const std::size_t wanted = (kParts * threads + blocks - 1) / blocks;
  return std::clamp<std::size_t>(rows / kPartRows, 1, wanted);
}

bool supported(const Tensor& x, DType* dtype, std::int32_t dims = 2) {
  const bool floats = x.dtype.lanes == 1 && (x.dtype.code == dlpack::kBFloat ||
                                             (x.dtype.code == dlpack::kFloat && x.dtype.bits < 64));
  if (x.device.type != dlpack::kCpu || x.ndim != dims || !floats) return false;
  *dtype = dtype_of(x);
  return true;
}

std::size_t pitch(const Tensor& x, int dim) {
  return static_cast<std::size_t>(x.strides[dim]) * x.dtype.bits / 8;
}

// A packed weight of 8 bits, [N, K / group, group + 4], for rows of `dtype`.
bool read_int8(const Tensor& w, DType dtype, Weight* weight) {
  const std::int64_t group = w.shape[2] - static_cast<std::int64_t>(host::kGroupBytes);
  if (group < 4 || group % 4 != 0) return false;
  weight->data = data_of(w);
  weight->k = w.shape[1] * group;
  weight->n = w.shape[0];
  weight->pitch = host::Product::kPanel * static_cast<std::size_t>(w.shape[1] * w.shape[2]);
  weight->dtype = dtype;
  weight->form = Form::kInt8Panels;
  weight->group = static_cast<std::size_t>(group);
  return true;
}

// One of floats, [N, K / g, g].
bool read_packed(const Tensor& w, Weight* weight) {
  if (!supported(w, &weight->dtype, kPackedDims) || !is_contiguous(w)) return false;
  const std::int64_t group = host::kGroupBytes / size_of(weight->dtype);
  weight->k = w.shape[1] * w.shape[2];
  if (w.shape[2] != (weight->k % group == 0 ? group : weight->k)) return false;
  weight->data = data_of(w);
  weight->n = w.shape[0];
  weight->pitch =
      host::Product::kPanel * static_cast<std::size_t>(weight->k) * size_of(weight->dtype);
  weight->form = Form::kPanels;
  return true;
}

// A weight that csrc/host/product.h reads, for rows like x. Valid as long as the tensor is.
bool read_weight(const Tensor& w, const Tensor& x, Weight* weight) {
  if (w.ndim == kPackedDims && w.dtype.code == dlpack::kInt && w.dtype.bits == 8) {
    DType dtype{};
    return w.device.type == dlpack::kCpu && is_contiguous(w) && supported(x, &dtype) &&
           read_int8(w, dtype, weight);
  }
  if (w.ndim == kPackedDims) return read_packed(w, weight);
  if (!supported(w, &weight->dtype)) return false;
  const bool columns = w.strides[0] == 1;
  if (!columns && w.strides[1] != 1) return false;
  weight->data = data_of(w);
  weight->pitch = pitch(w, columns ? 1 : 0);
  weight->k = w.shape[0];
  weight->n = w.shape[1];
  weight->form = columns ? Form::kColumns : Form::kRows;
  return true;
}

bool read_weight(PyObject* object, const Tensor& x, Weight* weight) {
  Tensor w{};
  return read(object, &w) && read_weight(w, x, weight);
}

// Entry i of a tensor's first dim, without it.
Tensor entry(const Tensor& x, std::size_t i) {
  Tensor part = x;
  part.ndim -= 1;
  part.shape += 1;
  part.strides += 1;
  part.byte_offset += i * pitch(x, 0);
  return part;
}

// Rows [begin, begin + shape[0]) of a matrix; `shape` lives as long as what is returned.
Tensor rows_of(const Tensor& x, std::size_t begin, std::int64_t* shape) {
  Tensor part = x;
  part.shape = shape;
  part.byte_offset += begin * pitch(x, 0);
  return part;
}

// The rows of each group, checked.
std::vector<std::int64_t> group_sizes(const Tensor& counts, std::int64_t rows) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(counts.shape[0]));
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::byte* const count = data_of(counts) + i * pitch(counts, 0);
    sizes[i] = counts.dtype.bits == 64 ? *reinterpret_cast<const std::int64_t*>(count)
                                       : *reinterpret_cast<const std::int32_t*>(count);
    if (sizes[i] < 0 || sizes[i] > rows) {
      throw std::invalid_argument("counts[" + std::to_string(i) + "] is " +
                                  std::to_string(sizes[i]) + "; x has " + std::to_string(rows) +
                                  " rows, so it must be 0 to " + std::to_string(rows));
    }
    sum += sizes[i];
  }
  if (sum != rows) {
    throw std::invalid_argument("counts add up to " + std::to_string(sum) + ", but x has " +
                                std::to_string(rows) + " rows");
  }
  return sizes;
}

bool has_threads() { return torch_threads().parallel_for && torch_threads().get_num_threads; }

// How to compute x @ w to `out_dtype`, for x with any strides; without `multiply` where the
// extension does not.
Way way_of(const Tensor& x, const Weight& w, DType out_dtype, const Whole& whole) {
  DType dtype{};
  if (!has_threads() || !supported(x, &dtype) || dtype != w.dtype) return {};
  const std::int64_t least = w.packed() ? 1 : 2;
  if (x.shape[0] == 0 || w.k < least || w.n == 0 || w.k != x.shape[1]) return {};
  const auto [rows, whole_columns] = whole;
  if (static_cast<std::size_t>(x.shape[0]) > rows) return {};
  const std::size_t columns = std::max(whole_columns, static_cast<std::size_t>(w.n));
  return host::fastest_way({rows, static_cast<std::size_t>(w.k), columns}, dtype, w.form,
                           out_dtype);
}

// The same, where it also replaces x, and `rows`, which describes it, by a copy with unit column
// stride if that pays.
Way way_with_unit_stride(py::object* x, Tensor* rows, const Weight& w, DType out_dtype,
                         const Whole& whole) {
  const Way way = way_of(*rows, w, out_dtype, whole);
  if (!way.multiply || rows->strides[1] == 1) return way;
  // Otherwise torch reads any strides as fast. In gradients of weights the copy takes 3 to 20 % of
  // the product's time, and torch.mm, or the conversion to fp32, 1.6 to 3.8 times as long as both.
  if (!w.packed() && w.dtype != DType::kF32 && w.dtype == out_dtype) return {};
  *x = x->attr("contiguous")();
  *rows = tensor(*x);
  return way;
}

// out [rows, N] = x [rows, K] @ w + bias, rounded once; bias [N] in fp32, or without data. Gives up
// the GIL.
void run(const Tensor& x, const Weight& w, const Tensor& out, const Tensor& bias, const Way& way) {
  Work work{};
  work.way = way;
  Product& product = work.product;
  product.rows = static_cast<std::size_t>(x.shape[0]);
  product.k = static_cast<std::size_t>(w.k);
  product.x = data_of(x);
  product.x_pitch = pitch(x, 0);
  product.w = w.data;
  product.w_pitch = w.pitch;
  product.columns = static_cast<std::size_t>(w.n);
  product.out = data_of(out);
  product.out_dtype = dtype_of(out);
  product.out_pitch = pitch(out, 0);
  product.group = w.group;
  product.bias = bias.data ? reinterpret_cast<const float*>(data_of(bias)) : nullptr;
  const std::size_t blocks = (product.columns + work.way.columns - 1) / work.way.columns;
  work.parts = parts_of_rows(work.way, product.rows, blocks);
  const std::size_t block_bytes =
      w.packed() ? w.pitch : work.way.columns * product.k * size_of(w.dtype);
  const std::size_t grain =
      product.rows > Product::kFewRows ? 1 : std::max<std::size_t>(kGrainBytes / block_bytes, 1);
  const GilReleased released;
  in_threads(static_cast<std::int64_t>(blocks * work.parts), static_cast<std::int64_t>(grain),
             multiply_items, &work);
}

struct Columns {
  py::object run;
};

bool are_packed(PyObject* weights) {
  if (!PyList_Check(weights)) return false;
  PyObject** const items = PySequence_Fast_ITEMS(weights);
  return std::all_of(items, items + PyList_GET_SIZE(weights), [](PyObject* w) {
    Tensor packed{};
    return read(w, &packed) && packed.ndim == kPackedDims;
  });
}

// A contiguous tensor [..., K] as a matrix [rows, K]; `sizes`, of its shape and strides, lives as
// long as what is returned.
Tensor flattened(const Tensor& x, std::int64_t (&sizes)[4]) {
  Tensor rows = x;
  const std::int64_t columns = x.shape[x.ndim - 1];
  sizes[0] = static_cast<std::int64_t>(count_of(x)) / std::max<std::int64_t>(columns, 1);
  sizes[1] = sizes[2] = columns;
  sizes[3] = 1;
  rows.ndim = 2;
  rows.shape = sizes;
  rows.strides = sizes + 2;
  return rows;
}

// x times each weight; null: Python is to do it.
py::object multiply_columns(PyObject* object, PyObject* weights) {
  Tensor x{};
  if (!are_packed(weights) || !read(object, &x) || x.ndim < 2 || count_of(x) == 0) return {};
  const auto operand = py::reinterpret_borrow<py::object>(object);
  py::list results;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(weights); ++i) {
    results.append(linear(operand, x, PyList_GET_ITEM(weights, i)));
  }
  return results;
}

PyObject* call_columns(const Columns& columns, const Given& given) {
  return raising([&] {
    const bool simple = given.positional == 3 && !given.names && !profiling();
    try {
      if (simple) {
        if (py::object results = multiply_columns(given.values[0], given.values[1])) return results;
      }
    } catch (const py::error_already_set& error) {  // of operands that do not fit: Python says why
      if (!error.matches(PyExc_Exception)) throw;
    } catch (const std::exception&) {
    }
    const auto count = static_cast<std::size_t>(given.positional);
    return checked(PyObject_Vectorcall(columns.run.ptr(), given.values, count, given.names));
  });
}

}  // namespace

void in_threads(std::int64_t count, std::int64_t grain, Part part, void* context) {
  if (!has_threads()) return part(0, count, context);
  if (torch_threads().parallel_for(0, count, grain, part, context) != 0) {
    throw std::runtime_error("torch_parallel_for failed: the work raised or ran out of memory");
  }
}

bool multiplies(DType dtype, Form form, std::size_t rows) {
  constexpr std::size_t kLarge = 4096;
  return has_threads() && host::fastest_way({rows, kLarge, kLarge}, dtype, form, dtype).multiply;
}

py::object matmul(const py::object& x, const py::handle& w) {
  static const Global mm("torch", "mm");
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  const Tensor a = tensor(x);
  const auto rows = static_cast<std::size_t>(a.shape[0]);
  Weight weight{};
  if (read_weight(w.ptr(), a, &weight)) {
    py::object given = x;
    Tensor factor = a;
    const Way way = way_with_unit_stride(&given, &factor, weight, weight.dtype, {rows, 0});
    if (way.multiply) {
      py::object out = empty(py::make_tuple(a.shape[0], weight.n),
                             checked(PyObject_GetAttr(x.ptr(), dtype_name)));
      run(factor, weight, tensor(out), {}, way);
      return out;
    }
  }
  PyObject* const factors[] = {x.ptr(), w.ptr()};
  return checked(PyObject_Vectorcall(mm.value(), factors, 2, nullptr));
}

py::object linear(const py::object& object, const Tensor& x, const py::handle& w) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  if (x.ndim == 2) return matmul(object, w);
  py::tuple shape(static_cast<std::size_t>(x.ndim));
  for (int i = 0; i < x.ndim; ++i) shape[static_cast<std::size_t>(i)] = x.shape[i];
  const auto last = static_cast<std::size_t>(x.ndim - 1);
  if (is_contiguous(x) && count_of(x) != 0) {
    std::int64_t sizes[4], out_sizes[4];
    const Tensor rows = flattened(x, sizes);
    Weight weight{};
    if (read_weight(w.ptr(), rows, &weight)) {
      const Way way = way_of(rows, weight, weight.dtype,
                             {static_cast<std::size_t>(rows.shape[0]), std::size_t{0}});
      if (way.multiply) {
        shape[last] = weight.n;
        py::object out = empty(shape, checked(PyObject_GetAttr(object.ptr(), dtype_name)));
        run(rows, weight, flattened(tensor(out), out_sizes), {}, way);
        return out;
      }
    }
  }
  const py::object product = matmul(object.attr("flatten")(0, -2), w);
  shape[last] = tensor(product).shape[1];
  return product.attr("view")(shape);
}

py::object make_columns_kernel(py::object run) {
  auto made = std::make_unique<Columns>(Columns{std::move(run)});
  return Callable<Columns>::make<call_columns>("tpkernels._C.calls.columns", std::move(made));
}

bool multiply(const py::object& x, const py::handle& w, const py::handle& out,
              const py::handle& bias, const Whole& whole) {
  Tensor a{}, to{}, added{};
  DType out_dtype{};
  Weight weight{};
  const bool takes_result = read(out.ptr(), &to) && supported(to, &out_dtype) && to.strides[1] == 1;
  if (!takes_result || !read(x.ptr(), &a) || !read_weight(w.ptr(), a, &weight)) return false;
  if (!bias.is_none() && !read(bias.ptr(), &added)) return false;
  py::object given = x;
  const Way way = way_with_unit_stride(&given, &a, weight, out_dtype, whole);
  if (!way.multiply) return false;
  if (to.shape[0] != a.shape[0] || to.shape[1] != weight.n ||
      (added.data && (dtype_of(added) != DType::kF32 || added.ndim != 1 || !is_contiguous(added) ||
                      added.shape[0] != weight.n))) {
    throw std::invalid_argument(
        "out and bias do not fit the matmul: out must be [M, N], bias float32 of shape [N]");
  }
  run(a, weight, to, added, way);
  return true;
}

std::vector<std::size_t> grouped_multiply(const py::handle& x, const py::handle& w,
                                          const py::handle& counts, const py::handle& out) {
  const Tensor a = tensor(x), matrices = tensor(w), groups = tensor(counts), to = tensor(out);
  const bool integers =
      groups.dtype.code == dlpack::kInt && (groups.dtype.bits == 32 || groups.dtype.bits == 64);
  const auto takes_rows = [](const Tensor& t) {
    return t.ndim == 2 && (t.strides[1] == 1 || t.shape[1] == 1 || t.shape[0] == 0);
  };
  const bool fits = takes_rows(a) && takes_rows(to) && to.shape[0] == a.shape[0] &&
                    groups.ndim == 1 && matrices.ndim > 2 && matrices.shape[0] == groups.shape[0] &&
                    (matrices.ndim == kPackedDims || is_contiguous(matrices));
  if (!fits || !integers || groups.device.type != dlpack::kCpu) {
    throw std::invalid_argument(
        "a grouped matmul needs x [R, K], w [E, K, N], int32 or int64 counts [E] and out [R, N], "
        "on CPUs");
  }
  std::vector<std::size_t> left;
  std::size_t begin = 0, group = 0;
  for (const std::int64_t size : group_sizes(groups, a.shape[0])) {
    std::int64_t x_shape[] = {size, a.shape[1]}, out_shape[] = {size, to.shape[1]};
    const Tensor some = rows_of(a, begin, x_shape);
    Weight weight{};
    Way way{};
    if (size && read_weight(entry(matrices, group), some, &weight)) {
      way = way_of(some, weight, dtype_of(to), {size, 0});
    }
    if (way.multiply && weight.n == to.shape[1]) {
      run(some, weight, rows_of(to, begin, out_shape), {}, way);
    } else if (size) {
      left.push_back(group);
    }
    begin += static_cast<std::size_t>(size);
    ++group;
  }
  return left;
}

}  // namespace tpkernels::calls
