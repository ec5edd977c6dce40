// Products of all vector units: exact for integers, and not a byte is read or written beyond the
// operands. These end where memory ends, since the sanitizer does not see masked loads.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "host/product.h"
#include "host/vector.h"

namespace tpkernels::test {
namespace {

using host::DType;
using host::Form;
using host::Multiply;
using host::Product;
using host::VectorUnit;

// Memory of `bytes` that ends where the process has none.
class AtTheEnd {
 public:
  explicit AtTheEnd(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t pages = (bytes + page - 1) / page * page;
    mapped_ = pages + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(base_ != MAP_FAILED);
    CHECK(mprotect(static_cast<std::byte*>(base_) + pages, page, PROT_NONE) == 0);
    data_ = static_cast<std::byte*>(base_) + pages - bytes;
  }
  ~AtTheEnd() { munmap(base_, mapped_); }
  AtTheEnd(const AtTheEnd&) = delete;
  AtTheEnd& operator=(const AtTheEnd&) = delete;
  std::byte* data() const { return data_; }

 private:
  void* base_;
  std::size_t mapped_;
  std::byte* data_;
};

// Small integers, which every dtype has.
int value(std::size_t i, std::size_t j) { return static_cast<int>((i * 7 + j * 13) % 5) - 2; }

void put(std::byte* to, DType dtype, int number) {
  const auto exact = static_cast<float>(number);
  host::plain_unit().store[static_cast<int>(dtype)](to, &exact, 1);
}

struct Extents {
  std::size_t rows, k, columns;
};

std::string text(const VectorUnit& unit, Form form, DType dtype, const Extents& size) {
  return std::string(unit.name) + ", form " + std::to_string(static_cast<int>(form)) + ", dtype " +
         std::to_string(static_cast<int>(dtype)) + ", " + std::to_string(size.rows) + " rows, K " +
         std::to_string(size.k) + ", N " + std::to_string(size.columns);
}

// Where element (k, n) of a weight lies.
std::size_t place(Form form, DType dtype, const Extents& size, std::size_t k, std::size_t n) {
  const std::size_t element = size_of(dtype), group = 4 / element;
  if (form == Form::kColumns) return (n * size.k + k) * element;
  if (form == Form::kRows) return (k * size.columns + n) * element;
  const std::size_t first = n / Product::kPanel * Product::kPanel;
  const std::size_t columns = std::min(Product::kPanel, size.columns - first);
  const std::size_t before = k / group * group;  // elements of a column that come earlier
  const std::size_t together = std::min(group, size.k - before);
  return (first * size.k + before * columns + (n - first) * together + k % group) * element;
}

std::size_t pitch(Form form, DType dtype, const Extents& size) {
  const std::size_t element = size_of(dtype);
  if (form == Form::kColumns) return size.k * element;
  if (form == Form::kRows) return size.columns * element;
  return size.k * element * Product::kPanel;
}

// Rows from `first` on.
void check_result(const VectorUnit& unit, Form form, DType dtype, const Extents& size,
                  const std::byte* out, std::size_t first) {
  for (std::size_t m = first; m < size.rows; ++m) {
    for (std::size_t n = 0; n < size.columns; ++n) {
      int exact = 0;
      for (std::size_t k = 0; k < size.k; ++k) exact += value(m, k) * value(n + 3, k);
      float got;
      std::memcpy(&got, out + (m * size.columns + n) * sizeof(got), sizeof(got));
      CHECK(got == static_cast<float>(exact),
            text(unit, form, dtype, size) + ": " + std::to_string(got) + " at row " +
                std::to_string(m) + ", column " + std::to_string(n) + ", which is " +
                std::to_string(exact));
    }
  }
}

// x and out without gaps; out in fp32.
Product product_of(const Extents& size, std::size_t element, const AtTheEnd& x, const AtTheEnd& w,
                   std::size_t w_pitch, const AtTheEnd& out) {
  Product product;
  product.rows = size.rows;
  product.k = size.k;
  product.x = x.data();
  product.x_pitch = size.k * element;
  product.w = w.data();
  product.w_pitch = w_pitch;
  product.columns = size.columns;
  product.out = out.data();
  product.out_pitch = size.columns * sizeof(float);
  product.out_dtype = DType::kF32;
  return product;
}

void check_product(const VectorUnit& unit, Multiply multiply, Form form, DType dtype,
                   const Extents& size, std::size_t at_a_time) {
  const std::size_t element = size_of(dtype);
  const AtTheEnd x(size.rows * size.k * element), w(size.k * size.columns * element);
  const AtTheEnd out(size.rows * size.columns * sizeof(float));
  for (std::size_t m = 0; m < size.rows; ++m) {
    for (std::size_t k = 0; k < size.k; ++k) {
      put(x.data() + (m * size.k + k) * element, dtype, value(m, k));
    }
  }
  for (std::size_t k = 0; k < size.k; ++k) {
    for (std::size_t n = 0; n < size.columns; ++n) {
      put(w.data() + place(form, dtype, size, k, n), dtype, value(n + 3, k));
    }
  }
  const Product product = product_of(size, element, x, w, pitch(form, dtype, size), out);
  const auto run = [&](const Product& some) {
    for (std::size_t begin = 0; begin < size.columns; begin += at_a_time) {
      multiply(some, begin, std::min(begin + at_a_time, size.columns));
    }
  };
  const std::size_t half = size.rows / 2;
  run(product);
  check_result(unit, form, dtype, size, out.data(), 0);
  std::memset(out.data(), 0xff, size.rows * product.out_pitch);
  run(some_rows(product, half, size.rows - half));
  check_result(unit, form, dtype, size, out.data(), half);
}

// The bits of a product of 8 bits in fp32, whose scales are fractions.
std::vector<std::byte> int8_product(const VectorUnit& unit, DType dtype, const Extents& size,
                                    std::size_t group) {
  const std::size_t element = size_of(dtype), groups = size.k / group;
  const AtTheEnd x(size.rows * size.k * element), w(size.columns * groups * (group + 4));
  const AtTheEnd out(size.rows * size.columns * sizeof(float));
  for (std::size_t m = 0; m < size.rows; ++m) {
    for (std::size_t k = 0; k < size.k; ++k) {  // no scale is the next row's or group's
      const int factor = 1 + static_cast<int>((m + k / group) % 3);
      put(x.data() + (m * size.k + k) * element, dtype, factor * value(m, k));
    }
  }
  std::byte* to = w.data();
  for (std::size_t first = 0; first < size.columns; first += Product::kPanel) {
    const std::size_t columns = std::min(Product::kPanel, size.columns - first);
    for (std::size_t i = 0; i < groups; ++i) {
      for (std::size_t n = 0; n < columns; ++n, to += 4) {
        const float scale = 1.0f / static_cast<float>(1 + first + n + i);
        std::memcpy(to, &scale, sizeof(scale));
      }
      for (std::size_t at = 0; at < group * columns; ++at) {
        *to++ = static_cast<std::byte>(127 - (at * 7 + i * 31 + first) % 255);
      }
    }
  }
  const std::size_t w_pitch = Product::kPanel * groups * (group + 4);
  Product product = product_of(size, element, x, w, w_pitch, out);
  product.group = group;
  unit.int8[static_cast<int>(dtype)](product, 0, size.columns);
  return {out.data(), out.data() + size.rows * product.out_pitch};
}

}  // namespace

TEST_CASE(products_are_exact_and_stay_within_the_operands, kThreads) {
  const std::vector<Extents> few = {{1, 2, 1}, {3, 33, 65}, {16, 63, 64}, {7, 130, 100}};
  // Beyond the groups and the rows that are held at a time, too.
  const std::vector<Extents> many = {
      {1, 3, 1}, {6, 1030, 64}, {17, 15, 63}, {50, 33, 129}, {775, 17, 66}};
  std::vector<const VectorUnit*> units = host::available_units();
  units.push_back(&host::tiled_unit());
  for (const VectorUnit* unit : units) {
    CHECK(multiplies_exactly(*unit), unit->name);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const int at = static_cast<int>(dtype);
      const auto run = [&](Multiply multiply, Form form, const std::vector<Extents>& sizes,
                           std::size_t at_a_time) {
        if (!multiply) return;
        for (const Extents& size : sizes) {
          check_product(*unit, multiply, form, dtype, size, at_a_time);
        }
      };
      run(unit->few_rows[at], Form::kColumns, few, Product::kBlock);
      run(unit->columns[at], Form::kColumns, many, Product::kPanel);
      run(unit->rows[at], Form::kRows, many, Product::kPanel);
      run(unit->panels[at], Form::kPanels, many, Product::kPanel);
    }
  }
}

TEST_CASE(products_of_8_bits_have_the_same_bits_and_stay_within_the_operands, kThreads) {
  std::vector<const VectorUnit*> units = host::available_units();
  units.push_back(&host::tiled_unit());
  for (const std::size_t group : {4, 8, 16, 32, 64, 128}) {
    for (const Extents& size : std::vector<Extents>{
             {1, group, 1}, {5, 3 * group, 70}, {16, group, 64}, {33, 2 * group, 65}}) {
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        const auto exact = int8_product(host::plain_unit(), dtype, size, group);
        for (const VectorUnit* unit : units) {
          CHECK(int8_product(*unit, dtype, size, group) == exact,
                text(*unit, Form::kInt8Panels, dtype, size));
        }
      }
    }
  }
}

}  // namespace tpkernels::test
