#include "calls/matmul.h"

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
using host::Matmul;
using host::MatmulKernel;
using host::WeightLayout;

// at::parallel_for and at::get_num_threads of libtorch's stable C interface:
// torch/csrc/stable/c/shim.h, torch 2.10.
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                     RangeFunction function, void* context);
using GetNumThreads = std::int32_t (*)(std::uint32_t* threads);

struct Threads {
  ParallelFor parallel_for = nullptr;
  GetNumThreads get_num_threads = nullptr;
};

// The functions are null if torch is not loaded.
const Threads& torch_threads() {
  static const auto loaded = [] {
    Threads threads;
    if (void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
      threads.parallel_for = reinterpret_cast<ParallelFor>(dlsym(torch, "torch_parallel_for"));
      threads.get_num_threads =
          reinterpret_cast<GetNumThreads>(dlsym(torch, "torch_get_num_threads"));
    }
    return threads;
  }();
  return loaded;
}

// Minimum weight bytes per thread.
constexpr std::size_t kGrainBytes = 128 << 10;

// Maximum elements of K per unit of a tree, unless the weight is int8 (kGroups in panels.inc).
constexpr std::size_t kMaxUnit = 256;

// Minimum rows per chunk.
constexpr std::size_t kMinChunkRows = 48;
// Chunks per thread, if there are enough rows. With 4, a thread is idle for at most a quarter of
// its share. More chunks cost time: each chunk packs the panels of a plain weight again.
constexpr std::size_t kChunksPerThread = 4;

// A GEMM as a grid of column blocks and row chunks.
struct Work {
  Matmul gemm;
  MatmulKernel kernel;
  std::size_t row_chunks;
};

void multiply_items(std::int64_t begin, std::int64_t end, void* context) {
  const auto& work = *static_cast<const Work*>(context);
  const auto [gemm, kernel, row_chunks] = work;
  if (row_chunks == 1) {
    kernel.multiply(gemm, static_cast<std::size_t>(begin) * kernel.columns,
                    std::min(static_cast<std::size_t>(end) * kernel.columns, gemm.columns));
    return;
  }
  for (auto item = static_cast<std::size_t>(begin); item < static_cast<std::size_t>(end); ++item) {
    const std::size_t column = item / row_chunks * kernel.columns, chunk = item % row_chunks;
    const std::size_t row = gemm.rows * chunk / row_chunks;
    const std::size_t rows = gemm.rows * (chunk + 1) / row_chunks - row;
    kernel.multiply(select_rows(gemm, row, rows), column,
                    std::min(column + kernel.columns, gemm.columns));
  }
}

// Returns the number of row chunks that balances the load of the threads.
std::size_t num_row_chunks(const MatmulKernel& kernel, std::size_t rows, std::size_t blocks) {
  std::uint32_t threads = 1;
  if (!kernel.worth_splitting_rows || torch_threads().get_num_threads(&threads) != 0) return 1;
  if (blocks % threads == 0) return 1;
  const std::size_t max_chunks = (kChunksPerThread * threads + blocks - 1) / blocks;
  return std::clamp<std::size_t>(rows / kMinChunkRows, 1, max_chunks);
}

bool supported(const Tensor& x, DType* dtype, std::int32_t dims = 2) {
  const bool floats = x.dtype.lanes == 1 && (x.dtype.code == dlpack::kBFloat ||
                                             (x.dtype.code == dlpack::kFloat && x.dtype.bits < 64));
  if (x.device.type != dlpack::kCpu || x.ndim != dims || !floats) return false;
  *dtype = get_dtype(x);
  return true;
}

std::size_t pitch(const Tensor& x, int dim) {
  return static_cast<std::size_t>(x.strides[dim]) * x.dtype.bits / 8;
}

// Reads a packed int8 weight [N, K / group, group + 4] for x of dtype `dtype`.
bool read_int8(const Tensor& w, DType dtype, Weight* weight) {
  const std::int64_t group = w.shape[2] - static_cast<std::int64_t>(host::kGroupBytes);
  if (group < 4 || group % 4 != 0) return false;
  weight->data = data_ptr(w);
  weight->k = w.shape[1] * group;
  weight->n = w.shape[0];
  weight->pitch = host::Matmul::kPanelColumns * static_cast<std::size_t>(w.shape[1] * w.shape[2]);
  weight->dtype = dtype;
  weight->layout = WeightLayout::kInt8Panels;
  weight->group = static_cast<std::size_t>(group);
  return true;
}

// Reads a packed floating-point weight [N, K / g, g].
bool read_packed(const Tensor& w, Weight* weight) {
  if (!supported(w, &weight->dtype, kPackedDims) || !is_contiguous(w)) return false;
  const std::int64_t group = host::kGroupBytes / size_of(weight->dtype);
  weight->k = w.shape[1] * w.shape[2];
  if (w.shape[2] != (weight->k % group == 0 ? group : weight->k)) return false;
  weight->data = data_ptr(w);
  weight->n = w.shape[0];
  weight->pitch =
      host::Matmul::kPanelColumns * static_cast<std::size_t>(weight->k) * size_of(weight->dtype);
  weight->layout = WeightLayout::kPanels;
  return true;
}

// Reads a weight in a layout of csrc/host/matmul.h that fits the dtype of x. `weight` is valid as
// long as the tensor `w`.
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
  weight->data = data_ptr(w);
  weight->pitch = pitch(w, columns ? 1 : 0);
  weight->k = w.shape[0];
  weight->n = w.shape[1];
  weight->layout = columns ? WeightLayout::kColumns : WeightLayout::kRows;
  return true;
}

bool read_weight(PyObject* object, const Tensor& x, Weight* weight) {
  Tensor w{};
  return read(object, &w) && read_weight(w, x, weight);
}

// Returns x[i].
Tensor select_entry(const Tensor& x, std::size_t i) {
  Tensor slice = x;
  slice.ndim -= 1;
  slice.shape += 1;
  slice.strides += 1;
  slice.byte_offset += i * pitch(x, 0);
  return slice;
}

// Returns rows [begin, begin + shape[0]) of a matrix. `shape` must outlive the returned view.
Tensor slice_rows(const Tensor& x, std::size_t begin, std::int64_t* shape) {
  Tensor slice = x;
  slice.shape = shape;
  slice.byte_offset += begin * pitch(x, 0);
  return slice;
}

// Returns the rows per group after checking them.
std::vector<std::int64_t> group_sizes(const Tensor& counts, std::int64_t rows) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(counts.shape[0]));
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::byte* const count = data_ptr(counts) + i * pitch(counts, 0);
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

// Selects a kernel for x @ w with output dtype `out_dtype`. x may have any strides. `multiply` of
// the result is null if the extension has no kernel that is faster than torch.
MatmulKernel select_gemm_kernel(const Tensor& x, const Weight& w, DType out_dtype,
                                const FullShape& full_shape) {
  DType dtype{};
  if (!has_threads() || !supported(x, &dtype) || dtype != w.dtype) return {};
  const std::int64_t min_k = w.packed() ? 1 : 2;
  if (x.shape[0] == 0 || w.k < min_k || w.n == 0 || w.k != x.shape[1]) return {};
  const auto [rows, full_columns] = full_shape;
  if (static_cast<std::size_t>(x.shape[0]) > rows) return {};
  const std::size_t columns = std::max(full_columns, static_cast<std::size_t>(w.n));
  return host::select_kernel({rows, static_cast<std::size_t>(w.k), columns}, dtype, w.layout,
                             out_dtype);
}

// As `select_gemm_kernel`. If x has no unit column stride and a copy pays off, replaces x and its
// view `rows` by a contiguous copy.
MatmulKernel select_gemm_kernel_with_unit_stride(py::object* x, Tensor* rows, const Weight& w,
                                                 DType out_dtype, const FullShape& full_shape) {
  const MatmulKernel kernel = select_gemm_kernel(*rows, w, out_dtype, full_shape);
  if (!kernel.multiply || rows->strides[1] == 1) return kernel;
  // A copy pays off for packed weights, for fp32, and if the output dtype differs. In weight
  // gradients it costs 3 to 20 % of the GEMM time. Without it, torch.mm or the conversion to fp32
  // takes 1.6 to 3.8 times as long as copy and GEMM together. In the other cases torch reads any
  // strides at full speed.
  if (!w.packed() && w.dtype != DType::kF32 && w.dtype == out_dtype) return {};
  *x = x->attr("contiguous")();
  *rows = tensor(*x);
  return kernel;
}

// Computes out [rows, N] = x [rows, K] @ w + bias, rounded once. bias is fp32 [N] or has no data.
// Releases the GIL.
// With `tree`, out is the first node.
void run(const Tensor& x, const Weight& w, const Tensor& out, const Tensor& bias,
         const MatmulKernel& kernel, const host::LocalSums* tree = nullptr) {
  Work work{};
  work.kernel = kernel;
  Matmul& gemm = work.gemm;
  gemm.rows = static_cast<std::size_t>(x.shape[0]);
  gemm.k = static_cast<std::size_t>(w.k);
  gemm.x = data_ptr(x);
  gemm.x_pitch = pitch(x, 0);
  gemm.w = w.data;
  gemm.w_pitch = w.pitch;
  gemm.columns = static_cast<std::size_t>(w.n);
  gemm.out = data_ptr(out);
  gemm.out_dtype = get_dtype(out);
  gemm.out_pitch = pitch(out, 0);
  gemm.group = w.group;
  gemm.bias = bias.data ? reinterpret_cast<const float*>(data_ptr(bias)) : nullptr;
  gemm.tree = tree;
  gemm.node_pitch = gemm.rows * gemm.out_pitch;
  const std::size_t blocks = (gemm.columns + work.kernel.columns - 1) / work.kernel.columns;
  work.row_chunks = num_row_chunks(work.kernel, gemm.rows, blocks);
  const std::size_t block_bytes =
      w.packed() ? w.pitch : work.kernel.columns * gemm.k * size_of(w.dtype);
  const std::size_t grain =
      gemm.rows > Matmul::kMaxFewRows ? 1 : std::max<std::size_t>(kGrainBytes / block_bytes, 1);
  const GilReleased released;
  parallel_for(static_cast<std::int64_t>(blocks * work.row_chunks),
               static_cast<std::int64_t>(grain), multiply_items, &work);
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

// Returns a contiguous tensor [..., K] as a matrix [rows, K]. `sizes` is filled with the shape and
// strides, and must outlive the returned view.
Tensor flatten(const Tensor& x, std::int64_t (&sizes)[4]) {
  Tensor rows = x;
  const std::int64_t columns = x.shape[x.ndim - 1];
  sizes[0] = static_cast<std::int64_t>(num_elements(x)) / std::max<std::int64_t>(columns, 1);
  sizes[1] = sizes[2] = columns;
  sizes[3] = 1;
  rows.ndim = 2;
  rows.shape = sizes;
  rows.strides = sizes + 2;
  return rows;
}

// Returns x @ w for each weight, or null if Python must compute it.
py::object multiply_columns(PyObject* object, PyObject* weights) {
  Tensor x{};
  if (!are_packed(weights) || !read(object, &x) || x.ndim < 2 || num_elements(x) == 0) return {};
  const auto operand = py::reinterpret_borrow<py::object>(object);
  py::list results;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(weights); ++i) {
    results.append(linear(operand, x, PyList_GET_ITEM(weights, i)));
  }
  return results;
}

PyObject* call_columns(const Columns& columns, const CallArgs& args) {
  return return_or_set_error([&] {
    const bool simple = args.positional == 3 && !args.names && !profiling();
    // For invalid operands `run` raises the detailed error.
    try {
      if (simple) {
        if (py::object results = multiply_columns(args.values[0], args.values[1])) return results;
      }
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
    } catch (const std::exception&) {
    }
    const auto count = static_cast<std::size_t>(args.positional);
    return checked(PyObject_Vectorcall(columns.run.ptr(), args.values, count, args.names));
  });
}

}  // namespace

void parallel_for(std::int64_t count, std::int64_t grain, RangeFunction function, void* context) {
  if (!has_threads()) return function(0, count, context);
  if (torch_threads().parallel_for(0, count, grain, function, context) != 0) {
    throw std::runtime_error("torch_parallel_for failed: the work raised or ran out of memory");
  }
}

bool has_matmul_kernel(DType dtype, WeightLayout layout, std::size_t rows) {
  constexpr std::size_t kLarge = 4096;
  return has_threads() &&
         host::select_kernel({rows, kLarge, kLarge}, dtype, layout, dtype).multiply;
}

py::object matmul(const py::object& x, const py::handle& w) {
  static const Global mm("torch", "mm");
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  const Tensor a = tensor(x);
  const auto rows = static_cast<std::size_t>(a.shape[0]);
  Weight weight{};
  if (read_weight(w.ptr(), a, &weight)) {
    py::object operand = x;
    Tensor operand_view = a;
    const MatmulKernel kernel = select_gemm_kernel_with_unit_stride(&operand, &operand_view, weight,
                                                                    weight.dtype, {rows, 0});
    if (kernel.multiply) {
      py::object out = empty(py::make_tuple(a.shape[0], weight.n),
                             checked(PyObject_GetAttr(x.ptr(), dtype_name)));
      run(operand_view, weight, tensor(out), {}, kernel);
      return out;
    }
  }
  PyObject* const args[] = {x.ptr(), w.ptr()};
  return checked(PyObject_Vectorcall(mm.value(), args, 2, nullptr));
}

py::object linear(const py::object& object, const Tensor& x, const py::handle& w) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  if (x.ndim == 2) return matmul(object, w);
  py::tuple shape(static_cast<std::size_t>(x.ndim));
  for (int i = 0; i < x.ndim; ++i) shape[static_cast<std::size_t>(i)] = x.shape[i];
  const auto last = static_cast<std::size_t>(x.ndim - 1);
  if (is_contiguous(x) && num_elements(x) != 0) {
    std::int64_t sizes[4], out_sizes[4];
    const Tensor rows = flatten(x, sizes);
    Weight weight{};
    if (read_weight(w.ptr(), rows, &weight)) {
      const MatmulKernel kernel = select_gemm_kernel(
          rows, weight, weight.dtype, {static_cast<std::size_t>(rows.shape[0]), std::size_t{0}});
      if (kernel.multiply) {
        shape[last] = weight.n;
        py::object out = empty(shape, checked(PyObject_GetAttr(object.ptr(), dtype_name)));
        run(rows, weight, flatten(tensor(out), out_sizes), {}, kernel);
        return out;
      }
    }
  }
  const py::object result = matmul(object.attr("flatten")(0, -2), w);
  shape[last] = tensor(result).shape[1];
  return result.attr("view")(shape);
}

py::object multiply_nodes(const Tensor& x, const py::handle& w, const host::LocalSums& tree) {
  static const Global float32("torch", "float32");
  const auto dtype = py::reinterpret_borrow<py::object>(float32.value());
  if (tree.nodes == 0) return empty(py::make_tuple(0), dtype);  // this rank holds no slice of K
  Tensor weight_view{};
  Weight weight{};
  std::int64_t sizes[4], out_sizes[4];
  const Tensor rows = flatten(x, sizes);
  const bool packed = read(w.ptr(), &weight_view) && read_weight(weight_view, rows, &weight) &&
                      weight.packed() && weight.k == rows.shape[1];
  const auto k = static_cast<std::size_t>(weight.k), unit = tree.unit;
  if (!packed || (k + unit - 1) / unit != tree.steps.size() ||
      (weight.group == 0 && unit > kMaxUnit) ||
      unit % (weight.group ? weight.group : host::kGroupBytes / size_of(weight.dtype)) != 0) {
    throw std::invalid_argument(
        "a sum by a tree needs a packed weight with the K of x, " + std::to_string(rows.shape[1]) +
        ", and units of complete groups, of at most " + std::to_string(kMaxUnit) +
        " elements unless the weight is int8; the unit is " + std::to_string(unit));
  }
  py::tuple shape(static_cast<std::size_t>(x.ndim) + 1);
  shape[0] = tree.nodes;
  for (int i = 0; i + 1 < x.ndim; ++i) shape[static_cast<std::size_t>(i) + 1] = x.shape[i];
  shape[static_cast<std::size_t>(x.ndim)] = weight.n;
  py::object out = empty(shape, dtype);
  const MatmulKernel kernel = select_gemm_kernel(
      rows, weight, DType::kF32, {static_cast<std::size_t>(rows.shape[0]), std::size_t{0}});
  if (rows.shape[0] == 0) return out;
  if (!kernel.multiply) throw std::invalid_argument("x and the packed weight differ in dtype");
  Tensor first_node = flatten(tensor(out), out_sizes);
  out_sizes[0] = rows.shape[0];
  run(rows, weight, first_node, {}, kernel, &tree);
  return out;
}

py::object make_columns_kernel(py::object run) {
  auto columns = std::make_unique<Columns>(Columns{std::move(run)});
  return Callable<Columns>::make<call_columns>("tpkernels._C.calls.columns", std::move(columns));
}

bool multiply(const py::object& x, const py::handle& w, const py::handle& out,
              const py::handle& bias, const FullShape& full_shape) {
  Tensor a{}, out_view{}, bias_view{};
  DType out_dtype{};
  Weight weight{};
  const bool supports_out =
      read(out.ptr(), &out_view) && supported(out_view, &out_dtype) && out_view.strides[1] == 1;
  if (!supports_out || !read(x.ptr(), &a) || !read_weight(w.ptr(), a, &weight)) return false;
  if (!bias.is_none() && !read(bias.ptr(), &bias_view)) return false;
  py::object operand = x;
  const MatmulKernel kernel =
      select_gemm_kernel_with_unit_stride(&operand, &a, weight, out_dtype, full_shape);
  if (!kernel.multiply) return false;
  if (out_view.shape[0] != a.shape[0] || out_view.shape[1] != weight.n ||
      (bias_view.data && (get_dtype(bias_view) != DType::kF32 || bias_view.ndim != 1 ||
                          !is_contiguous(bias_view) || bias_view.shape[0] != weight.n))) {
    throw std::invalid_argument(
        "out and bias do not fit the matmul: out must be [M, N], bias float32 of shape [N]");
  }
  run(a, weight, out_view, bias_view, kernel);
  return true;
}

std::vector<std::size_t> grouped_multiply(const py::handle& x, const py::handle& w,
                                          const py::handle& counts, const py::handle& out) {
  const Tensor a = tensor(x), matrices = tensor(w), groups = tensor(counts), out_view = tensor(out);
  const bool integers =
      groups.dtype.code == dlpack::kInt && (groups.dtype.bits == 32 || groups.dtype.bits == 64);
  const auto has_unit_stride = [](const Tensor& t) {
    return t.ndim == 2 && (t.strides[1] == 1 || t.shape[1] == 1 || t.shape[0] == 0);
  };
  const bool fits = has_unit_stride(a) && has_unit_stride(out_view) &&
                    out_view.shape[0] == a.shape[0] && groups.ndim == 1 && matrices.ndim > 2 &&
                    matrices.shape[0] == groups.shape[0] &&
                    (matrices.ndim == kPackedDims || is_contiguous(matrices));
  if (!fits || !integers || groups.device.type != dlpack::kCpu) {
    throw std::invalid_argument(
        "a grouped matmul needs x [R, K], w [E, K, N], int32 or int64 counts [E] and out [R, N], "
        "on CPUs");
  }
  std::vector<std::size_t> torch_groups;
  std::size_t begin = 0, group = 0;
  for (const std::int64_t size : group_sizes(groups, a.shape[0])) {
    std::int64_t x_shape[] = {size, a.shape[1]}, out_shape[] = {size, out_view.shape[1]};
    const Tensor group_rows = slice_rows(a, begin, x_shape);
    Weight weight{};
    MatmulKernel kernel{};
    if (size && read_weight(select_entry(matrices, group), group_rows, &weight)) {
      kernel = select_gemm_kernel(group_rows, weight, get_dtype(out_view), {size, 0});
    }
    if (kernel.multiply && weight.n == out_view.shape[1]) {
      run(group_rows, weight, slice_rows(out_view, begin, out_shape), {}, kernel);
    } else if (size) {
      torch_groups.push_back(group);
    }
    begin += static_cast<std::size_t>(size);
    ++group;
  }
  return torch_groups;
}

}  // namespace tpkernels::calls
