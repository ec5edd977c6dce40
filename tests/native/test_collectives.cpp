// The collectives between threads and between processes, compared with integer results. All sums
// are small enough to be exact in every dtype.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "host/collectives.h"
#include "host/vector_scalar.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::DType;
using host::ShardLayout;
using Segment = std::shared_ptr<host::Arena>;

enum class Op { kAllGather, kReduceScatter, kAllReduce };

// One call, identical on all ranks. For `kAllReduce` the layout is a flat tensor of `inner`
// elements.
struct Collective {
  Op op;
  ShardLayout layout;
  DType wire = DType::kF32;
  DType out = DType::kF32;
  bool bias = false, residual = false, norm = false;
  bool in_place = false;        // all-reduce only
  std::uint32_t symmetric = 0;  // bit r: the input of rank r is in the segment
  int round = 0;                // distinguishes calls

  std::string name() const {
    static const char* const kNames[] = {"all_gather", "reduce_scatter", "all_reduce"};
    return kNames[static_cast<int>(op)];
  }

  std::string describe() const {
    std::string description = name() + " of " + std::to_string(layout.outer) + " x [";
    for (const std::size_t size : layout.sizes) description += " " + std::to_string(size);
    description += " ] x " + std::to_string(layout.inner) + ", flags";
    for (const int flag : {static_cast<int>(wire), static_cast<int>(out), int{bias}, int{residual},
                           int{norm}, int{in_place}, static_cast<int>(symmetric)}) {
      description += " " + std::to_string(flag);
    }
    return description + ", round " + std::to_string(round);
  }
};

constexpr std::size_t kSegmentBytes = 1 << 18;
constexpr std::byte kUntouched{0xa5};
constexpr std::size_t kGuard = 256;

template <class F>
void with_dtype(DType dtype, F&& f) {
  if (dtype == DType::kF32) f(std::integral_constant<DType, DType::kF32>());
  if (dtype == DType::kF16) f(std::integral_constant<DType, DType::kF16>());
  if (dtype == DType::kBF16) f(std::integral_constant<DType, DType::kBF16>());
}

void put(DType dtype, std::byte* base, std::size_t i, int value) {
  std::byte* dst = base + i * size_of(dtype);
  const double as_double = value;
  if (dtype == DType::kF64) std::memcpy(dst, &as_double, 8);
  with_dtype(dtype, [&](auto d) {
    host::scalar::from_float<decltype(d)::value>(dst, static_cast<float>(value));
  });
}

double get(DType dtype, const std::byte* base, std::size_t i) {
  const std::byte* src = base + i * size_of(dtype);
  double value = 0;
  if (dtype == DType::kF64) std::memcpy(&value, src, 8);
  with_dtype(dtype, [&](auto d) { value = host::scalar::to_float<decltype(d)::value>(src); });
  return value;
}

// Returns element i of the input of a rank. It is at most 12, so the sum of four ranks, bias and
// residual is below 256.
int input_value(int rank, int round, std::size_t i) {
  return static_cast<int>(
      (static_cast<std::size_t>(rank) * 7 + static_cast<unsigned>(round) * 3 + i * 5) % 13);
}
int bias_value(std::size_t column) { return static_cast<int>(column % 5) - 2; }
int residual_value(std::size_t i) { return static_cast<int>(i % 7) - 3; }

// The rows [first, first + rows) of each block in the result, and the number of input elements.
struct Shape {
  std::size_t first, rows, in_count;
};

Shape get_shape(const Collective& call, std::size_t rank) {
  const ShardLayout& layout = call.layout;
  if (call.op == Op::kAllReduce) return {0, 1, layout.inner};
  const auto begin = layout.sizes.begin();
  const std::size_t total_rows = std::accumulate(begin, layout.sizes.end(), std::size_t{0});
  const std::size_t local_rows = layout.sizes[rank], block = layout.outer * layout.inner;
  if (call.op == Op::kAllGather) return {0, total_rows, local_rows * block};
  const auto local_begin = begin + static_cast<std::ptrdiff_t>(rank);
  return {std::accumulate(begin, local_begin, std::size_t{0}), local_rows, total_rows * block};
}

// Returns element i of the result, before bias and residual.
int expected(const Collective& call, int world, const Shape& shape, std::size_t i) {
  const ShardLayout& layout = call.layout;
  const std::size_t width = shape.rows * layout.inner;
  if (call.op == Op::kAllGather) {
    std::size_t row = i / layout.inner % shape.rows, rank = 0;
    while (row >= layout.sizes[rank]) row -= layout.sizes[rank++];
    const std::size_t index =
        (i / width * layout.sizes[rank] + row) * layout.inner + i % layout.inner;
    return input_value(static_cast<int>(rank), call.round, index);
  }
  const std::size_t total_rows =
      std::max<std::size_t>(1, std::accumulate(layout.sizes.begin(), layout.sizes.end(), 0ul));
  const std::size_t index = call.op == Op::kAllReduce
                                ? i
                                : (i / width * total_rows + shape.first) * layout.inner + i % width;
  int sum = 0;
  for (int rank = 0; rank < world; ++rank) sum += input_value(rank, call.round, index);
  return sum;
}

// Runs one call on this rank. CHECKs every element of the result and the guard bytes around it.
// `segment` may be null if all inputs are private.
void run(Channel& channel, const Collective& call, const Segment& segment = nullptr) {
  const std::string description = call.describe();
  const host::CallId id{static_cast<std::uint32_t>(std::hash<std::string>{}(description)) | 1u,
                        description};
  const auto rank = static_cast<std::size_t>(channel.rank());
  const Shape shape = get_shape(call, rank);
  const std::size_t count = call.layout.outer * shape.rows * call.layout.inner;
  const std::size_t element_bytes = size_of(call.out);
  std::vector<std::byte> padded(count * element_bytes + 2 * kGuard, kUntouched);
  std::byte* const out = padded.data() + kGuard;
  std::vector<std::byte> input(shape.in_count * size_of(call.wire) + 1);
  std::byte* in = call.in_place ? out : input.data();
  host::Source source{in};
  if (segment && (call.symmetric >> rank & 1u) != 0 && !call.in_place) {
    source.offset = 64 * (1 + static_cast<unsigned>(call.round) % 5);
    CHECK(source.offset + input.size() <= kSegmentBytes);
    source.segment = 1;
    source.data = in = segment->region(channel.rank()) + source.offset;
  }
  for (std::size_t i = 0; i < shape.in_count; ++i) {
    put(call.wire, in, i, input_value(channel.rank(), call.round, i));
  }
  // Bias and residual of a reduction.
  const bool reduces = call.op != Op::kAllGather;
  host::Epilogue epilogue;
  epilogue.out_dtype = epilogue.residual_dtype = call.out;
  epilogue.cols =
      call.op == Op::kReduceScatter ? call.layout.inner : std::min<std::size_t>(count, 10);
  epilogue.cols = count % std::max<std::size_t>(1, epilogue.cols) == 0 ? epilogue.cols : 1;
  epilogue.cols = std::max<std::size_t>(1, epilogue.cols);
  std::vector<std::byte> bias(epilogue.cols * 8), residual(count * element_bytes + 1);
  const DType bias_dtype = call.wire == DType::kF64 ? DType::kF64 : DType::kF32;
  for (std::size_t i = 0; i < epilogue.cols; ++i) put(bias_dtype, bias.data(), i, bias_value(i));
  for (std::size_t i = 0; i < count; ++i) put(call.out, residual.data(), i, residual_value(i));
  if (call.bias) epilogue.bias = bias.data();
  if (call.residual) epilogue.residual = residual.data();
  host::RmsNorm norm;
  std::vector<std::byte> normed(count * element_bytes), weight(count * element_bytes);
  for (std::size_t i = 0; i < count; ++i) put(call.out, weight.data(), i, bias_value(i));
  if (call.norm) {
    norm = {normed.data(), weight.data(), call.out, count % 3 == 0 ? count / 3 : count, 0.5};
  }
  const bool whole_tensors = call.op == Op::kAllReduce;
  const host::Shards shards{whole_tensors ? ShardLayout{} : call.layout};
  const host::CollectiveArgs args{source, out, count, call.wire, epilogue, norm};
  host::collective(call.name(), shards)(channel, id, args, shards);
  if (call.norm) {
    std::vector<std::byte> expected_normed(normed.size());
    norm.out = expected_normed.data();
    normalise_rows(norm, out, call.out, 0, count / norm.cols);
    CHECK(normed == expected_normed, description + " normalised other rows");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const double got = get(call.out, out, i);
    const double exact = expected(call, channel.world(), shape, i) +
                         (reduces && call.bias ? bias_value(i % epilogue.cols) : 0) +
                         (reduces && call.residual ? residual_value(i) : 0);
    CHECK(got == exact, description + ": element " + std::to_string(i) + " is " +
                            std::to_string(got) + ", not " + std::to_string(exact));
  }
  for (std::size_t i = 0; i < kGuard; ++i) {
    CHECK(padded[i] == kUntouched && padded[kGuard + count * element_bytes + i] == kUntouched,
          description + " wrote beyond its output");
  }
}

// Runs `count` calls with random ops, layouts and dtypes, identical on all ranks.
void run_random(Channel& channel, std::uint64_t seed, int count, const Segment& segment = nullptr) {
  if (segment) channel.add_segment(1, segment);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  const auto draw = [&](std::size_t below) {  // splitmix64
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::size_t>((z ^ (z >> 31)) % below);
  };
  constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF64};
  const auto world = static_cast<std::size_t>(channel.world());
  for (int round = 0; round < count; ++round) {
    Collective call{static_cast<Op>(draw(3)), {1, 1, {}}};
    call.round = round;
    call.wire = kDTypes[draw(4)];
    call.out = call.op == Op::kAllGather || call.wire == DType::kF64 ? call.wire : kDTypes[draw(3)];
    call.bias = draw(2) == 0;
    call.residual = draw(2) == 0;
    if (segment && draw(2) == 0) call.symmetric = static_cast<std::uint32_t>(draw(1u << world));
    if (call.op == Op::kAllReduce) {
      // From one element to many chunks, and sizes around the one-shot limit.
      const std::size_t one_shot_limit = host::kOneShotBytes / size_of(call.wire);
      const std::size_t counts[] = {draw(99) + 1, draw(6000) + 1, one_shot_limit - 1 + draw(3),
                                    3 * one_shot_limit + 17};
      call.layout.inner = counts[draw(4)];
      call.norm = draw(2) == 0;
      call.in_place = call.out == call.wire && draw(3) == 0;
      if (call.in_place) call.symmetric = 0;
    } else {
      call.layout = {draw(3) + 1, draw(40) + 1, std::vector<std::size_t>(world)};
      for (std::size_t& size : call.layout.sizes) size = draw(4) == 0 ? 0 : draw(30);
    }
    run(channel, call, segment);
  }
}

// Small buffers, so that most calls need several chunks, and an epoch that wraps around.
Setup delayed_setup(int world) {
  return {.world = world, .capacity = 8192, .epoch = 0xfffffff0u, .max_delay_us = 300};
}

}  // namespace

TEST_CASE(random_collectives_under_delays, kThreads) {
  for (const int world : {1, 2, 4}) {
    const auto segment = make_arena(world, kSegmentBytes);
    on_threads(delayed_setup(world), [&](Channel& channel) {
      run_random(channel, options().seed, options().calls, segment);
    });
  }
}

TEST_CASE(random_collectives_between_processes, kFork) {
  for (const int world : {2, 3}) {
    const auto segment = make_arena(world, kSegmentBytes);
    require_success_on_processes(delayed_setup(world), [&](Channel& channel) {
      run_random(channel, options().seed + 1, options().calls, segment);
    });
  }
}

// Results larger than the caches use streaming stores.
TEST_CASE(large_results_are_streamed, kThreads) {
  on_threads({.capacity = 1 << 20}, [](Channel& channel) {
    const std::size_t half = (4 << 20) / 4 + 7;
    run(channel, {Op::kAllGather, {1, 1, {half, half}}});
    run(channel, {Op::kAllReduce, {1, 2 * half + 3, {}}});
  });
}

}  // namespace tpkernels::test
