#include "calls/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls/matmul.h"
#include "calls/python.h"
#include "calls/tensor.h"
#include "host/attention.h"
#include "host/vector.h"

namespace tpkernels::calls {
namespace {

using host::Attention;
using host::Sequence;

static_assert(sizeof(Sequence) == 6 * sizeof(std::int64_t));

// Minimum multiply-adds per thread: 6 us of a decode step (AVX2, AMD EPYC Zen 3, 2026-11-27).
constexpr std::size_t kGrain = 1 << 16;

std::string shape_of(const Tensor& x) {
  std::string shape;
  for (int i = 0; i < x.ndim; ++i) shape += (i ? ", " : "") + std::to_string(x.shape[i]);
  return "[" + shape + "]";
}

bool is_float(const Tensor& x) {
  return x.dtype.lanes == 1 &&
         (x.dtype.code == dlpack::kBFloat || (x.dtype.code == dlpack::kFloat && x.dtype.bits < 64));
}

void check_operands(const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const Tensor* const x : {&q, &k, &v}) {
    if (x->device.type != dlpack::kCpu || x->ndim != 4 || !is_float(*x) ||
        (x->strides[3] != 1 && x->shape[3] != 1) || x->dtype.code != q.dtype.code ||
        x->dtype.bits != q.dtype.bits) {
      throw std::invalid_argument(
          "q, k and v must be CPU tensors with 4 dims and contiguous elements, all float32, "
          "float16 "
          "or bfloat16; q has shape " +
          shape_of(q) + ", k " + shape_of(k) + ", v " + shape_of(v));
    }
  }
  const bool fits = k.shape[0] == q.shape[0] && v.shape[0] == q.shape[0] &&
                    v.shape[1] == k.shape[1] && v.shape[2] == k.shape[2] &&
                    k.shape[3] == q.shape[3] && q.shape[3] > 0 && k.shape[1] > 0 &&
                    q.shape[1] % k.shape[1] == 0;
  if (!fits) {
    throw std::invalid_argument(
        "attention needs q [B, H, T, D], k [B, Hkv, Tk, D] and v [B, Hkv, "
        "Tk, Dv] with H a multiple of Hkv; q has shape " +
        shape_of(q) + ", k " + shape_of(k) + ", v " + shape_of(v));
  }
}

std::vector<Sequence> whole_entries(const Tensor& q, std::int64_t keys) {
  const std::int64_t queries = q.shape[2];
  if (queries > keys) {
    throw std::invalid_argument("q has " + std::to_string(queries) + " queries, but k has only " +
                                std::to_string(keys) +
                                " keys; without sequences the queries are the last keys");
  }
  std::vector<Sequence> sequences(static_cast<std::size_t>(q.shape[0]));
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    sequences[i] = {static_cast<std::int64_t>(i), 0, queries, 0, keys - queries, 0};
  }
  return sequences;
}

std::vector<Sequence> read_sequences(const Tensor& table, const Tensor& q, std::int64_t keys) {
  if (table.device.type != dlpack::kCpu || table.ndim != 2 || table.shape[1] != 6 ||
      table.dtype.code != dlpack::kInt || table.dtype.bits != 64 || !is_contiguous(table)) {
    throw std::invalid_argument("sequences must be a contiguous int64 CPU tensor [S, 6]; it is " +
                                shape_of(table));
  }
  std::vector<Sequence> sequences(static_cast<std::size_t>(table.shape[0]));
  if (!sequences.empty()) std::memcpy(sequences.data(), data_ptr(table), num_bytes(table));
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    const auto require = [&](const char* name, std::int64_t value, std::int64_t limit) {
      if (value < 0 || value > limit) {
        throw std::invalid_argument(std::string(name) + " of sequence " + std::to_string(i) +
                                    " is " + std::to_string(value) + "; it must be 0 to " +
                                    std::to_string(limit));
      }
    };
    constexpr std::int64_t kMaxSkipped = std::int64_t{1} << 48;
    require("batch", s.batch, q.shape[0] - 1);
    require("queries", s.queries, std::min(q.shape[2], keys));
    require("first_query", s.first_query, q.shape[2] - s.queries);
    require("first_key", s.first_key, keys);
    require("own_key", s.own_key, keys - s.queries);
    require("skipped", s.skipped, kMaxSkipped);
  }
  return sequences;
}

// Zeroes the rows of `out` [B, T, ...] that belong to no sequence. Throws if two sequences share a
// query.
void clear_other_rows(const std::vector<Sequence>& sequences, const Tensor& out) {
  const auto rows = static_cast<std::size_t>(out.shape[1]);
  std::vector<bool> covered(static_cast<std::size_t>(out.shape[0]) * rows);
  for (const Sequence& s : sequences) {
    const std::size_t first =
        static_cast<std::size_t>(s.batch) * rows + static_cast<std::size_t>(s.first_query);
    for (std::size_t row = first; row < first + static_cast<std::size_t>(s.queries); ++row) {
      if (covered[row]) {
        throw std::invalid_argument("two sequences contain query " + std::to_string(row % rows) +
                                    " of batch entry " + std::to_string(row / rows));
      }
      covered[row] = true;
    }
  }
  const std::size_t bytes = covered.empty() ? 0 : num_bytes(out) / covered.size();
  for (std::size_t row = 0; row < covered.size(); ++row) {
    if (!covered[row]) std::memset(data_ptr(out) + row * bytes, 0, bytes);
  }
}

host::Heads view_heads(const Tensor& x, int batch, int head, int row) {
  const std::size_t size = x.dtype.bits / 8;
  const auto pitch = [&](int dim) { return static_cast<std::size_t>(x.strides[dim]) * size; };
  return {data_ptr(x), {pitch(batch), pitch(head), pitch(row)}};
}

// Number of keys that queries [first, last] of a sequence see.
std::size_t count_keys(const Attention& a, const Sequence& s, std::size_t first, std::size_t last) {
  const std::int64_t own_key = s.own_key - s.first_key;
  const std::int64_t end = own_key + static_cast<std::int64_t>(last) + 1;
  const std::int64_t begin =
      a.window ? own_key + static_cast<std::int64_t>(first) + 1 - a.window : 0;
  return static_cast<std::size_t>(
      std::max<std::int64_t>(0, end - std::max<std::int64_t>(0, begin)));
}

// Rows of one kv head of a sequence, computed by one thread.
struct Item {
  const Sequence* sequence;
  std::size_t kv_head, first_row, rows;
  std::size_t cost;  // multiply-adds
};

std::vector<Item> split_into_items(const Attention& a, const std::vector<Sequence>& sequences) {
  const std::size_t group = a.heads / a.kv_heads;
  std::vector<Item> items;
  for (const Sequence& s : sequences) {
    const std::size_t rows = static_cast<std::size_t>(s.queries) * group;
    for (std::size_t row = 0; row < rows; row += Attention::kMaxRows) {
      const std::size_t count = std::min(Attention::kMaxRows, rows - row);
      const std::size_t keys = count_keys(a, s, row / group, (row + count - 1) / group);
      const std::size_t cost = (keys + 1) * count * (a.head_dim + a.value_dim);
      for (std::size_t head = 0; head < a.kv_heads; ++head)
        items.push_back({&s, head, row, count, cost});
    }
  }
  // The longest first, so that the threads end at the same time.
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& left, const Item& right) { return left.cost > right.cost; });
  return items;
}

struct ItemQueue {
  const Attention& attention;
  const std::vector<Item>& items;
  host::AttentionFn attend;
  std::atomic<std::size_t> next{0};
};

// Threads take items from the queue until it is empty. The range only determines their number.
void attend_items(std::int64_t, std::int64_t, void* context) {
  auto& queue = *static_cast<ItemQueue*>(context);
  for (;;) {
    const std::size_t i = queue.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= queue.items.size()) return;
    const Item& item = queue.items[i];
    queue.attend(queue.attention, *item.sequence, item.kv_head, item.first_row, item.rows);
  }
}

}  // namespace

py::object attention(const py::object& q, const py::handle& k, const py::handle& v, float scale,
                     const py::handle& sequences, std::int64_t window, float cap,
                     const py::handle& sinks) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  const Tensor queries = tensor(q), keys = tensor(k), values = tensor(v);
  check_operands(queries, keys, values);
  if (window < 0) {
    throw std::invalid_argument("window is " + std::to_string(window) +
                                "; it must be 0 (no limit) or positive");
  }
  if (!(cap >= 0 && std::isfinite(cap))) {
    throw std::invalid_argument("cap is " + std::to_string(cap) +
                                "; it must be 0 (no cap), or positive and finite");
  }
  Attention a;
  if (!sinks.is_none()) {
    const Tensor logits = tensor(sinks);
    if (logits.device.type != dlpack::kCpu || logits.ndim != 1 || !is_float(logits) ||
        logits.dtype.bits != 32 || !is_contiguous(logits) || logits.shape[0] != queries.shape[1]) {
      throw std::invalid_argument("sinks must be a contiguous float32 CPU tensor [" +
                                  std::to_string(queries.shape[1]) + "], one per query head");
    }
    a.sinks = reinterpret_cast<const float*>(data_ptr(logits));
  }
  const std::vector<Sequence> table =
      sequences.is_none() ? whole_entries(queries, keys.shape[2])
                          : read_sequences(tensor(sequences), queries, keys.shape[2]);
  py::object result =
      empty(py::make_tuple(queries.shape[0], queries.shape[2], queries.shape[1], values.shape[3]),
            checked(PyObject_GetAttr(q.ptr(), dtype_name)));
  const Tensor out = tensor(result);
  if (num_elements(out) == 0) return result;
  a.q = view_heads(queries, 0, 1, 2);
  a.k = view_heads(keys, 0, 1, 2);
  a.v = view_heads(values, 0, 1, 2);
  a.out = view_heads(out, 0, 2, 1);
  a.heads = static_cast<std::size_t>(queries.shape[1]);
  a.kv_heads = static_cast<std::size_t>(keys.shape[1]);
  a.head_dim = static_cast<std::size_t>(queries.shape[3]);
  a.value_dim = static_cast<std::size_t>(values.shape[3]);
  a.window = window;
  a.scale = scale;
  a.cap = cap;

  for (const Sequence& s : table) {
    if (s.queries == 0) continue;
    const std::size_t seen = count_keys(a, s, 0, static_cast<std::size_t>(s.queries - 1));
    a.kv_bytes += seen * a.kv_heads * (a.head_dim + a.value_dim) * queries.dtype.bits / 8;
  }

  const GilReleased released;
  if (!sequences.is_none()) clear_other_rows(table, out);
  const std::vector<Item> items = split_into_items(a, table);
  ItemQueue queue{a, items, host::vector_unit().attention[static_cast<int>(get_dtype(queries))]};
  std::size_t cost = 0;
  for (const Item& item : items) cost += item.cost;
  const std::size_t threads = std::min(std::max<std::size_t>(cost / kGrain, 1), items.size());
  parallel_for(static_cast<std::int64_t>(threads), 1, attend_items, &queue);
  return result;
}

}  // namespace tpkernels::calls
