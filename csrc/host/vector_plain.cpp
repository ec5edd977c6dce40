// The fallback for any processor: scalar conversions, vectorised where the compiler can.
#include <array>
#include <cstring>

#include "host/vector_scalar.h"

namespace tpkernels::host {
namespace plain {

constexpr std::size_t kLanes = 1;
using Vec = float;

template <DType D>
Vec load_vec(const void* from) {
  return scalar::to_float<D>(from);
}
template <DType D>
void store_vec(void* to, Vec value) {
  scalar::from_float<D>(to, value);
}
struct Pair {
  Vec first;
  Vec second;
};

template <DType D>
Pair load_pair(const std::byte* from) {
  return {load_vec<D>(from), load_vec<D>(from + size_of(D))};
}
template <DType D>
void store_pair(std::byte* to, Pair pair) {
  store_vec<D>(to, pair.first);
  store_vec<D>(to + size_of(D), pair.second);
}
inline Vec add_vec(Vec a, Vec b) { return a + b; }
inline Vec mul_vec(Vec a, Vec b) { return a * b; }
inline Vec set_vec(float value) { return value; }
inline Vec load_acc(const float* from) { return *from; }
inline void store_acc(float* to, Vec value) { *to = value; }

#include "host/vector_loops.inc"

void stream(void* dst, const void* src, std::size_t bytes) { std::memcpy(dst, src, bytes); }

constexpr VectorUnit kUnit = make_unit("plain", stream);

}  // namespace plain

const VectorUnit& plain_unit() { return plain::kUnit; }

}  // namespace tpkernels::host
