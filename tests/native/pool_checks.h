// What tests of the pool look at.
#pragma once

#include <cstddef>
#include <string>

#include "check.h"
#include "host/pool.h"

namespace tpkernels::test {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

inline bool filled_with(const host::Pool::Block& block, int value) {
  const auto expected = static_cast<std::byte>(value);
  for (std::size_t i = 0; i < block->bytes(); i += 64) {
    if (block->data()[i] != expected) return false;
  }
  return block->data()[block->bytes() - 1] == expected;
}

inline void check_usage(const host::Pool& pool, std::size_t in_use, std::size_t idle) {
  const host::Pool::Usage usage = pool.usage();
  CHECK(usage.in_use == in_use && usage.idle == idle,
        std::to_string(usage.in_use) + " in use, " + std::to_string(usage.idle) + " idle");
}

}  // namespace tpkernels::test
