// Attention kernels with 4, 8 and 16 lanes are bitwise identical and stay within the operands,
// which end at an inaccessible page. The kernel with 16 lanes is compiled here from generic
// vectors, so that it runs on every processor.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "host/attention.h"
#include "host/vector.h"
#include "host/vector_scalar.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // the vectors are not passed between files

namespace tpkernels::host::sixteen {

constexpr std::size_t kLanes = 16;

#include "host/vector_loops.inc"

using Halves = std::uint16_t __attribute__((vector_size(2 * kLanes)));

inline Vec load_f16(const void* from) {
  const auto halves = load_bits<Halves>(from);
  Vec value;
  for (std::size_t i = 0; i < kLanes; ++i) value[i] = scalar::f16_to_float(halves[i]);
  return value;
}
inline void store_f16(void* to, Vec value) {
  Halves halves;
  for (std::size_t i = 0; i < kLanes; ++i) halves[i] = scalar::float_to_f16(value[i]);
  store_bits(to, halves);
}
inline UInts load_u16(const void* from) {
  return __builtin_convertvector(load_bits<Halves>(from), UInts);
}
inline void store_u16(void* to, UInts ints) {
  store_bits(to, __builtin_convertvector(ints, Halves));
}
inline Vec exact_multiply_add(Vec x, Vec w, Vec sum) {
  for (std::size_t i = 0; i < kLanes; ++i) sum[i] = std::fma(x[i], w[i], sum[i]);
  return sum;
}
inline void load_words(const std::byte* const (&rows)[kLanes], std::size_t offset,
                       UInts (&words)[8]) {
  for (std::size_t word = 0; word < 8; ++word) {
    for (std::size_t i = 0; i < kLanes; ++i)
      words[word][i] = load_bits<std::uint32_t>(rows[i] + offset + 4 * word);
  }
}

#include "host/attention.inc"

}  // namespace tpkernels::host::sixteen

namespace tpkernels::test {
namespace {

using host::Attention;
using host::AttentionFn;
using host::DType;
using host::Heads;

// A tensor [1, heads, rows, dim] that ends at an inaccessible page.
class GuardedHeads {
 public:
  GuardedHeads(std::size_t heads, std::size_t rows, std::size_t dim, DType dtype)
      : count_(heads * rows * dim), dtype_(dtype) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t size = size_of(dtype), bytes = count_ * size;
    const std::size_t full = (bytes + page - 1) / page * page;
    mapped_ = full + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base_ != MAP_FAILED);
    CHECK(mprotect(static_cast<std::byte*>(base_) + full, page, PROT_NONE) == 0);
    data_ = static_cast<std::byte*>(base_) + full - bytes;
    view = {data_, {bytes, rows * dim * size, dim * size}};
  }
  ~GuardedHeads() { munmap(base_, mapped_); }
  GuardedHeads(const GuardedHeads&) = delete;
  GuardedHeads& operator=(const GuardedHeads&) = delete;

  void fill(std::mt19937& random) {
    std::vector<float> values(count_);
    for (float& value : values) value = std::normal_distribution<float>(0, 2)(random);
    host::plain_unit().store[static_cast<int>(dtype_)](data_, values.data(), count_);
  }
  std::vector<std::byte> bytes() const { return {data_, data_ + count_ * size_of(dtype_)}; }

  Heads view;

 private:
  std::size_t count_;
  DType dtype_;
  void* base_;
  std::size_t mapped_;
  std::byte* data_;
};

struct Shape {
  std::size_t group, queries, keys, head_dim, value_dim;
  std::int64_t window, skipped;
};

void check_shape(const Shape& shape, DType dtype) {
  const auto d = static_cast<int>(dtype);
  const std::size_t heads = 2 * shape.group;
  GuardedHeads q(heads, shape.queries, shape.head_dim, dtype);
  GuardedHeads k(2, shape.keys, shape.head_dim, dtype), v(2, shape.keys, shape.value_dim, dtype);
  std::mt19937 random(static_cast<unsigned>(shape.keys));
  for (GuardedHeads* const operand : {&q, &k, &v}) operand->fill(random);
  std::vector<float> sinks(heads, 0.5f);
  Attention a;
  a.q = q.view;
  a.k = k.view;
  a.v = v.view;
  a.heads = heads;
  a.kv_heads = 2;
  a.head_dim = shape.head_dim;
  a.value_dim = shape.value_dim;
  a.window = shape.window;
  a.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  a.cap = shape.window ? 5.0f : 0.0f;
  a.sinks = shape.window ? sinks.data() : nullptr;
  a.kv_bytes = shape.group == 1 ? std::size_t{1} << 30 : 0;  // with and without prefetch
  const auto count = [](std::size_t size) { return static_cast<std::int64_t>(size); };
  const host::Sequence sequence{
      0, 0, count(shape.queries), 0, count(shape.keys - shape.queries), shape.skipped};
  std::vector<AttentionFn> kernels{host::sixteen::kAttention[static_cast<std::size_t>(d)]};
  for (const host::VectorUnit* const unit : host::available_units())
    kernels.push_back(unit->attention[d]);
  std::vector<std::byte> expected;
  for (const AttentionFn attend : kernels) {
    GuardedHeads out(heads, shape.queries, shape.value_dim, dtype);
    a.out = out.view;
    const std::size_t rows = shape.queries * shape.group;
    for (std::size_t head = 0; head < 2; ++head) {
      for (std::size_t row = 0; row < rows; row += Attention::kMaxRows)
        attend(a, sequence, head, row, std::min(Attention::kMaxRows, rows - row));
    }
    if (expected.empty()) expected = out.bytes();
    CHECK(out.bytes() == expected, std::to_string(shape.queries) + " queries, " +
                                       std::to_string(shape.keys) + " keys, dtype " +
                                       std::to_string(d));
  }
}

}  // namespace

TEST_CASE(attention_of_every_vector_width, kThreads) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const Shape& shape : {Shape{1, 1, 150, 64, 64, 0, 0}, Shape{3, 1, 70, 64, 64, 0, 0},
                               Shape{1, 1, 37, 33, 20, 0, 0}, Shape{1, 3, 200, 80, 64, 70, 30},
                               Shape{3, 70, 70, 64, 128, 0, 0}, Shape{4, 30, 100, 33, 33, 7, 1},
                               Shape{1, 100, 164, 40, 48, 90, 0}}) {
      check_shape(shape, dtype);
    }
  }
}

}  // namespace tpkernels::test
