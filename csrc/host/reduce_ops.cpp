#include "host/reduce_ops.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace tpkernels::host {
namespace {

constexpr std::size_t kBlock = 512;  // elements, which fit the L1 cache

template <class T, class F>
void for_each(T* acc, const T* terms, std::size_t count, F&& f) {
  for (std::size_t i = 0; i < count; ++i) acc[i] = f(acc[i], terms[i]);
}

// Unsigned arithmetic wraps. Arithmetic on signed integers may not overflow.
template <class T>
auto wrapping(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<std::uint64_t>(value);
  } else {
    return value;
  }
}

// acc[i] = acc[i] op terms[i]
template <class T>
void combine(ReduceOp op, T* acc, const T* terms, std::size_t count) {
  const auto apply = [&](auto&& f) { for_each(acc, terms, count, f); };
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return apply([](T a, T b) { return static_cast<T>(wrapping(a) + wrapping(b)); });
    case ReduceOp::kProduct:
      return apply([](T a, T b) { return static_cast<T>(wrapping(a) * wrapping(b)); });
    case ReduceOp::kMin:
      return apply([](T a, T b) { return b < a || b != b ? b : a; });
    case ReduceOp::kMax:
      return apply([](T a, T b) { return b > a || b != b ? b : a; });
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kAnd) return apply([](T a, T b) { return static_cast<T>(a & b); });
    if (op == ReduceOp::kOr) return apply([](T a, T b) { return static_cast<T>(a | b); });
    if (op == ReduceOp::kXor) return apply([](T a, T b) { return static_cast<T>(a ^ b); });
  }
}

// Reduces in T. `load` converts elements of the partials, `store` converts elements of the result.
template <class T, class Load, class Store>
void reduce(std::byte* out, const std::vector<const std::byte*>& partials, std::size_t element,
            ReduceOp op, std::size_t count, Load&& load, Store&& store) {
  alignas(64) T acc[kBlock];
  alignas(64) T terms[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    load(acc, partials[0] + begin * element, n);
    for (std::size_t p = 1; p < partials.size(); ++p) {
      load(terms, partials[p] + begin * element, n);
      combine(op, acc, terms, n);
    }
    if (op == ReduceOp::kMean) {
      const auto terms_count = static_cast<T>(partials.size());
      for (std::size_t i = 0; i < n; ++i) acc[i] = static_cast<T>(acc[i] / terms_count);
    }
    store(out + begin * element, acc, n);
  }
}

template <class T>
void reduce_as(std::byte* out, const std::vector<const std::byte*>& partials, ReduceOp op,
               std::size_t count) {
  const auto copy = [](void* to, const void* from, std::size_t n) {
    std::memcpy(to, from, n * sizeof(T));
  };
  reduce<T>(out, partials, sizeof(T), op, count, copy, copy);
}

}  // namespace

void reduce_partials(void* out, const std::vector<const std::byte*>& partials, DType dtype,
                     ReduceOp op, std::size_t count) {
  if (is_floating(dtype) ? op >= ReduceOp::kAnd : op == ReduceOp::kMean) {
    throw std::invalid_argument(
        "a mean needs floating-point elements, a bitwise operation needs integers");
  }
  auto* const to = static_cast<std::byte*>(out);
  const VectorUnit& unit = vector_unit();
  switch (dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16: {
      const auto d = static_cast<int>(dtype);
      return reduce<float>(to, partials, size_of(dtype), op, count, unit.load[d], unit.store[d]);
    }
    case DType::kF64:
      return reduce_as<double>(to, partials, op, count);
    case DType::kU8:
      return reduce_as<std::uint8_t>(to, partials, op, count);
    case DType::kI8:
      return reduce_as<std::int8_t>(to, partials, op, count);
    case DType::kI16:
      return reduce_as<std::int16_t>(to, partials, op, count);
    case DType::kI32:
      return reduce_as<std::int32_t>(to, partials, op, count);
    case DType::kI64:
      return reduce_as<std::int64_t>(to, partials, op, count);
  }
}

}  // namespace tpkernels::host
