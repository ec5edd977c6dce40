// Scalar conversions between fp32 and the 16-bit formats, rounding to nearest even. Bitwise
// identical to F16C, AVX-512 and torch. NaN keeps its sign and becomes quiet.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/vector.h"

namespace tpkernels::host::scalar {

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN; NaN becomes quiet
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet);
  }
  // A subnormal half is converted as an integer. So no operand is a subnormal float: the thread may
  // flush those to zero (torch.set_flush_denormal).
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  const std::uint32_t subnormal = float_to_bits(static_cast<float>(magnitude) * 0x1p-24f);
  return bits_to_float(sign | (magnitude < 0x400u ? subnormal : normal));
}

inline std::uint16_t float_to_f16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x38800000u) {                        // subnormal half: let the adder round
    const float rounded = bits_to_float(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (float_to_bits(rounded) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

template <DType D>
float to_float(const void* from) {
  if constexpr (D == DType::kF32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  } else {
    std::uint16_t half;
    std::memcpy(&half, from, 2);
    if constexpr (D == DType::kF16) return f16_to_float(half);
    return bits_to_float(static_cast<std::uint32_t>(half) << 16);
  }
}

template <DType D>
void from_float(void* to, float value) {
  if constexpr (D == DType::kF32) {
    std::memcpy(to, &value, 4);
  } else {
    const std::uint16_t half = D == DType::kF16 ? float_to_f16(value) : float_to_bf16(value);
    std::memcpy(to, &half, 2);
  }
}

}  // namespace tpkernels::host::scalar
