// Matmuls of all vector units are exact for integers and stay within the operands. The operands end
// at an inaccessible page, because the sanitizer does not detect masked loads.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "host/matmul.h"
#include "host/vector.h"

namespace tpkernels::test {
namespace {

using host::DType;
using host::Matmul;
using host::MatmulFn;
using host::VectorUnit;
using host::WeightLayout;

// Memory of `bytes` that ends at an inaccessible page.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t pages = (bytes + page - 1) / page * page;
    mapped_ = pages + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base_ != MAP_FAILED);
    CHECK(mprotect(static_cast<std::byte*>(base_) + pages, page, PROT_NONE) == 0);
    data_ = static_cast<std::byte*>(base_) + pages - bytes;
  }
  ~GuardedMemory() { munmap(base_, mapped_); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  void* base_;
  std::size_t mapped_;
  std::byte* data_;
};

// Small integers that are exact in every dtype.
int value(std::size_t i, std::size_t j) { return static_cast<int>((i * 7 + j * 13) % 5) - 2; }

void put(std::byte* dst, DType dtype, int number) {
  const auto exact = static_cast<float>(number);
  host::plain_unit().store[static_cast<int>(dtype)](dst, &exact, 1);
}

struct Extents {
  std::size_t rows, k, columns;
};

std::string describe(const VectorUnit& unit, WeightLayout layout, DType dtype,
                     const Extents& size) {
  return std::string(unit.name) + ", form " + std::to_string(static_cast<int>(layout)) +
         ", dtype " + std::to_string(static_cast<int>(dtype)) + ", " + std::to_string(size.rows) +
         " rows, K " + std::to_string(size.k) + ", N " + std::to_string(size.columns);
}

// Returns the byte offset of element (k, n) of a weight.
std::size_t weight_offset(WeightLayout layout, DType dtype, const Extents& size, std::size_t k,
                          std::size_t n) {
  const std::size_t element = size_of(dtype), group = 4 / element;
  if (layout == WeightLayout::kColumns) return (n * size.k + k) * element;
  if (layout == WeightLayout::kRows) return (k * size.columns + n) * element;
  const std::size_t panel_begin = n / Matmul::kPanelColumns * Matmul::kPanelColumns;
  const std::size_t columns = std::min(Matmul::kPanelColumns, size.columns - panel_begin);
  const std::size_t group_begin = k / group * group;  // element of K at which the group begins
  const std::size_t group_size = std::min(group, size.k - group_begin);
  return (panel_begin * size.k + group_begin * columns + (n - panel_begin) * group_size +
          k % group) *
         element;
}

std::size_t weight_pitch(WeightLayout layout, DType dtype, const Extents& size) {
  const std::size_t element = size_of(dtype);
  if (layout == WeightLayout::kColumns) return size.k * element;
  if (layout == WeightLayout::kRows) return size.columns * element;
  return size.k * element * Matmul::kPanelColumns;
}

// CHECKs the rows from `first` on.
void check_result(const VectorUnit& unit, WeightLayout layout, DType dtype, const Extents& size,
                  const std::byte* out, std::size_t first) {
  for (std::size_t m = first; m < size.rows; ++m) {
    for (std::size_t n = 0; n < size.columns; ++n) {
      int exact = 0;
      for (std::size_t k = 0; k < size.k; ++k) exact += value(m, k) * value(n + 3, k);
      float got;
      std::memcpy(&got, out + (m * size.columns + n) * sizeof(got), sizeof(got));
      CHECK(got == static_cast<float>(exact),
            describe(unit, layout, dtype, size) + ": " + std::to_string(got) + " at row " +
                std::to_string(m) + ", column " + std::to_string(n) + ", which is " +
                std::to_string(exact));
    }
  }
}

// Returns a matmul with contiguous x and out; out is fp32.
Matmul make_matmul(const Extents& size, std::size_t element, const GuardedMemory& x,
                   const GuardedMemory& w, std::size_t w_pitch, const GuardedMemory& out) {
  Matmul gemm;
  gemm.rows = size.rows;
  gemm.k = size.k;
  gemm.x = x.data();
  gemm.x_pitch = size.k * element;
  gemm.w = w.data();
  gemm.w_pitch = w_pitch;
  gemm.columns = size.columns;
  gemm.out = out.data();
  gemm.out_pitch = size.columns * sizeof(float);
  gemm.out_dtype = DType::kF32;
  return gemm;
}

void check_matmul(const VectorUnit& unit, MatmulFn multiply, WeightLayout layout, DType dtype,
                  const Extents& size, std::size_t columns_per_call) {
  const std::size_t element = size_of(dtype);
  const GuardedMemory x(size.rows * size.k * element), w(size.k * size.columns * element);
  const GuardedMemory out(size.rows * size.columns * sizeof(float));
  for (std::size_t m = 0; m < size.rows; ++m) {
    for (std::size_t k = 0; k < size.k; ++k) {
      put(x.data() + (m * size.k + k) * element, dtype, value(m, k));
    }
  }
  for (std::size_t k = 0; k < size.k; ++k) {
    for (std::size_t n = 0; n < size.columns; ++n) {
      put(w.data() + weight_offset(layout, dtype, size, k, n), dtype, value(n + 3, k));
    }
  }
  const Matmul gemm = make_matmul(size, element, x, w, weight_pitch(layout, dtype, size), out);
  const auto run = [&](const Matmul& operands) {
    for (std::size_t begin = 0; begin < size.columns; begin += columns_per_call) {
      multiply(operands, begin, std::min(begin + columns_per_call, size.columns));
    }
  };
  const std::size_t half = size.rows / 2;
  run(gemm);
  check_result(unit, layout, dtype, size, out.data(), 0);
  std::memset(out.data(), 0xff, size.rows * gemm.out_pitch);
  run(select_rows(gemm, half, size.rows - half));
  check_result(unit, layout, dtype, size, out.data(), half);
}

// Returns the fp32 output of an int8 matmul as bytes. The scales are fractions.
std::vector<std::byte> int8_matmul(const VectorUnit& unit, DType dtype, const Extents& size,
                                   std::size_t group) {
  const std::size_t element = size_of(dtype), groups = size.k / group;
  const GuardedMemory x(size.rows * size.k * element), w(size.columns * groups * (group + 4));
  const GuardedMemory out(size.rows * size.columns * sizeof(float));
  for (std::size_t m = 0; m < size.rows; ++m) {
    for (std::size_t k = 0; k < size.k; ++k) {  // scales differ by row and group
      const int factor = 1 + static_cast<int>((m + k / group) % 3);
      put(x.data() + (m * size.k + k) * element, dtype, factor * value(m, k));
    }
  }
  std::byte* dst = w.data();
  for (std::size_t panel_begin = 0; panel_begin < size.columns;
       panel_begin += Matmul::kPanelColumns) {
    const std::size_t columns = std::min(Matmul::kPanelColumns, size.columns - panel_begin);
    for (std::size_t i = 0; i < groups; ++i) {
      for (std::size_t n = 0; n < columns; ++n, dst += 4) {
        const float scale = 1.0f / static_cast<float>(1 + panel_begin + n + i);
        std::memcpy(dst, &scale, sizeof(scale));
      }
      for (std::size_t j = 0; j < group * columns; ++j) {
        *dst++ = static_cast<std::byte>(127 - (j * 7 + i * 31 + panel_begin) % 255);
      }
    }
  }
  const std::size_t w_pitch = Matmul::kPanelColumns * groups * (group + 4);
  Matmul gemm = make_matmul(size, element, x, w, w_pitch, out);
  gemm.group = group;
  unit.int8[static_cast<int>(dtype)](gemm, 0, size.columns);
  return {out.data(), out.data() + size.rows * gemm.out_pitch};
}

}  // namespace

TEST_CASE(matmuls_are_exact_and_stay_within_the_operands, kThreads) {
  const std::vector<Extents> few = {{1, 2, 1}, {3, 33, 65}, {16, 63, 64}, {7, 130, 100}};
  // These sizes also exceed the groups and the rows that a kernel processes together.
  const std::vector<Extents> many = {
      {1, 3, 1}, {6, 1030, 64}, {17, 15, 63}, {50, 33, 129}, {775, 17, 66}};
  std::vector<const VectorUnit*> units = host::available_units();
  units.push_back(&host::tiled_unit());
  for (const VectorUnit* unit : units) {
    CHECK(multiplies_exactly(*unit), unit->name);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const int index = static_cast<int>(dtype);
      const auto run = [&](MatmulFn multiply, WeightLayout layout,
                           const std::vector<Extents>& sizes, std::size_t columns_per_call) {
        if (!multiply) return;
        for (const Extents& size : sizes) {
          check_matmul(*unit, multiply, layout, dtype, size, columns_per_call);
        }
      };
      run(unit->few_rows[index], WeightLayout::kColumns, few, Matmul::kBlockColumns);
      run(unit->columns[index], WeightLayout::kColumns, many, Matmul::kPanelColumns);
      run(unit->rows[index], WeightLayout::kRows, many, Matmul::kPanelColumns);
      run(unit->panels[index], WeightLayout::kPanels, many, Matmul::kPanelColumns);
    }
  }
}

TEST_CASE(int8_matmuls_are_bitwise_identical_and_stay_within_the_operands, kThreads) {
  std::vector<const VectorUnit*> units = host::available_units();
  units.push_back(&host::tiled_unit());
  for (const std::size_t group : {4, 8, 16, 32, 64, 128}) {
    for (const Extents& size : std::vector<Extents>{
             {1, group, 1}, {5, 3 * group, 70}, {16, group, 64}, {33, 2 * group, 65}}) {
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        const auto exact = int8_matmul(host::plain_unit(), dtype, size, group);
        for (const VectorUnit* unit : units) {
          CHECK(int8_matmul(*unit, dtype, size, group) == exact,
                describe(*unit, WeightLayout::kInt8Panels, dtype, size));
        }
      }
    }
  }
}

}  // namespace tpkernels::test
