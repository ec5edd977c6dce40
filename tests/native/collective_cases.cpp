#include "collective_cases.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "host/vector_scalar.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::DType;
using host::ShardLayout;

constexpr std::byte kUntouched{0xa5};
constexpr std::size_t kGuard = 256;

void put(DType dtype, std::byte* base, std::size_t i, int value) {
  std::byte* to = base + i * size_of(dtype);
  if (dtype == DType::kF64) {
    const double wide = value;
    std::memcpy(to, &wide, 8);
  } else if (dtype == DType::kF32) {
    host::scalar::from_float<DType::kF32>(to, static_cast<float>(value));
  } else if (dtype == DType::kF16) {
    host::scalar::from_float<DType::kF16>(to, static_cast<float>(value));
  } else {
    host::scalar::from_float<DType::kBF16>(to, static_cast<float>(value));
  }
}

double get(DType dtype, const std::byte* base, std::size_t i) {
  const std::byte* from = base + i * size_of(dtype);
  if (dtype == DType::kF64) {
    double wide;
    std::memcpy(&wide, from, 8);
    return wide;
  }
  if (dtype == DType::kF32) return host::scalar::to_float<DType::kF32>(from);
  if (dtype == DType::kF16) return host::scalar::to_float<DType::kF16>(from);
  return host::scalar::to_float<DType::kBF16>(from);
}

// Element i of a rank's input: at most 12, so the sum over four ranks, bias and residual is < 256.
int input_value(int rank, int round, std::size_t i) {
  return static_cast<int>(
      (static_cast<std::size_t>(rank) * 7 + static_cast<unsigned>(round) * 3 + i * 5) % 13);
}
int bias_value(std::size_t column) { return static_cast<int>(column % 5) - 2; }
int residual_value(std::size_t i) { return static_cast<int>(i % 7) - 3; }

std::size_t total_rows(const ShardLayout& layout) {
  return std::accumulate(layout.sizes.begin(), layout.sizes.end(), std::size_t{0});
}

// The tensors of one call, with guard bytes around the output that must stay untouched.
class Tensors {
 public:
  Tensors(const Channel& channel, const Collective& call,
          const std::shared_ptr<host::Arena>& segment, std::size_t in_count, std::size_t out_count)
      : call_(call), out_bytes_(out_count * size_of(call.out)) {
    const std::size_t in_bytes = in_count * size_of(call.wire);
    const int rank = channel.rank();
    own_.resize(out_bytes_ + 2 * kGuard);
    out_ = own_.data();
    std::fill_n(out_, out_bytes_ + 2 * kGuard, kUntouched);
    if (segment && (call.symmetric >> rank & 1u) != 0 && !call.in_place) {
      offset_ = 64 * (1 + static_cast<unsigned>(call.round) % 5);
      CHECK(offset_ + in_bytes <= kSegmentBytes);
      segment_ = 1;
      in = segment->region(rank) + offset_;
    } else if (call.in_place) {
      in = out();
    } else {
      in_.resize(in_bytes + 1);
      in = in_.data();
    }
    for (std::size_t i = 0; i < in_count; ++i) {
      put(call.wire, in, i, input_value(rank, call.round, i));
    }
  }

  std::byte* out() { return out_ + kGuard; }
  host::Source source() const { return {in, segment_, offset_}; }

  void check_output(std::size_t i, int expected) {
    const double got = get(call_.out, out(), i);
    CHECK(got == expected, text_of(call_) + ": element " + std::to_string(i) + " is " +
                               std::to_string(got) + ", not " + std::to_string(expected));
  }
  void check_surroundings() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      CHECK(out_[i] == kUntouched, text_of(call_) + " wrote before its output");
      CHECK(out_[kGuard + out_bytes_ + i] == kUntouched, text_of(call_) + " wrote past its output");
    }
  }

  std::byte* in = nullptr;

 private:
  const Collective& call_;
  std::size_t out_bytes_;
  std::byte* out_;
  std::vector<std::byte> in_, own_;
  std::uint64_t segment_ = 0;
  std::size_t offset_ = 0;
};

// Bias and residual of a reduction. The bias has `cols` elements.
struct Terms {
  Terms(const Collective& call, std::size_t cols, std::size_t out_count) {
    epilogue.out_dtype = call.out;
    epilogue.cols = cols;
    if (call.bias) {
      const DType dtype = call.wire == DType::kF64 ? DType::kF64 : DType::kF32;
      bias.resize(cols * size_of(dtype));
      for (std::size_t i = 0; i < cols; ++i) put(dtype, bias.data(), i, bias_value(i));
      epilogue.bias = bias.data();
    }
    if (call.residual) {
      residual.resize(out_count * size_of(call.out) + 1);
      for (std::size_t i = 0; i < out_count; ++i)
        put(call.out, residual.data(), i, residual_value(i));
      epilogue.residual = residual.data();
      epilogue.residual_dtype = call.out;
    }
  }
  int of(const Collective& call, std::size_t i) const {
    return (call.bias ? bias_value(i % epilogue.cols) : 0) +
           (call.residual ? residual_value(i) : 0);
  }

  host::Epilogue epilogue;
  std::vector<std::byte> bias, residual;
};

int sum_of_inputs(int world, int round, std::size_t i) {
  int sum = 0;
  for (int rank = 0; rank < world; ++rank) sum += input_value(rank, round, i);
  return sum;
}

void gather(Channel& channel, const Collective& call, const host::CallId& id,
            const std::shared_ptr<host::Arena>& segment) {
  const ShardLayout& layout = call.layout;
  const auto rank = static_cast<std::size_t>(channel.rank());
  const std::size_t rows = total_rows(layout), inner = layout.inner;
  Tensors tensors(channel, call, segment, layout.outer * layout.sizes[rank] * inner,
                  layout.outer * rows * inner);
  all_gather(channel, id, tensors.source(), tensors.out(), layout, call.wire);
  for (std::size_t block = 0; block < layout.outer; ++block) {
    std::size_t first = 0;
    for (std::size_t r = 0; r < layout.sizes.size(); ++r) {
      const std::size_t width = layout.sizes[r] * inner;
      for (std::size_t i = 0; i < width; ++i) {
        tensors.check_output((block * rows + first) * inner + i,
                             input_value(static_cast<int>(r), call.round, block * width + i));
      }
      first += layout.sizes[r];
    }
  }
  tensors.check_surroundings();
}

void scatter(Channel& channel, const Collective& call, const host::CallId& id,
             const std::shared_ptr<host::Arena>& segment) {
  const ShardLayout& layout = call.layout;
  const auto rank = static_cast<std::size_t>(channel.rank());
  const std::size_t rows = total_rows(layout), inner = layout.inner;
  const std::size_t width = layout.sizes[rank] * inner, out_count = layout.outer * width;
  Tensors tensors(channel, call, segment, layout.outer * rows * inner, out_count);
  const Terms terms(call, inner, out_count);
  reduce_scatter(channel, id, tensors.source(), tensors.out(), layout, call.wire, terms.epilogue);
  const std::size_t first =
      std::accumulate(layout.sizes.begin(), layout.sizes.begin() + channel.rank(), std::size_t{0});
  for (std::size_t i = 0; i < out_count; ++i) {
    const std::size_t at = (i / width * rows + first) * inner + i % width;
    tensors.check_output(i, sum_of_inputs(channel.world(), call.round, at) + terms.of(call, i));
  }
  tensors.check_surroundings();
}

void reduce(Channel& channel, const Collective& call, const host::CallId& id,
            const std::shared_ptr<host::Arena>& segment) {
  const std::size_t count = call.layout.inner;
  Tensors tensors(channel, call, segment, count, count);
  const Terms terms(call, count < 10 ? 1 : 10, count);
  host::RmsNorm norm;
  std::vector<std::byte> normed(count * size_of(call.out)), weight(count * size_of(call.out));
  if (call.norm) {
    for (std::size_t i = 0; i < count; ++i) put(call.out, weight.data(), i, bias_value(i));
    norm = {normed.data(), weight.data(), call.out, count % 3 == 0 ? count / 3 : count, 0.5};
  }
  all_reduce(channel, id, tensors.source(), tensors.out(), count, call.wire, terms.epilogue, norm);
  if (call.norm) {
    std::vector<std::byte> afterwards(normed.size());
    norm.out = afterwards.data();
    normalise_rows(norm, tensors.out(), call.out, 0, count / norm.cols);
    CHECK(normed == afterwards, text_of(call) + " normalised other rows");
  }
  for (std::size_t i = 0; i < count; ++i) {
    tensors.check_output(i, sum_of_inputs(channel.world(), call.round, i) + terms.of(call, i));
  }
  tensors.check_surroundings();
}

}  // namespace

std::string text_of(const Collective& call) {
  static const char* const kNames[] = {"all_gather", "reduce_scatter", "all_reduce"};
  std::string text = kNames[static_cast<int>(call.op)];
  text += "(" + std::to_string(call.layout.outer) + " x [";
  for (const std::size_t size : call.layout.sizes) text += " " + std::to_string(size);
  text += " ] x " + std::to_string(call.layout.inner);
  text += ", dtypes " + std::to_string(static_cast<int>(call.wire)) + " to " +
          std::to_string(static_cast<int>(call.out));
  if (call.bias) text += ", bias";
  if (call.residual) text += ", residual";
  if (call.norm) text += ", norm";
  if (call.in_place) text += ", in place";
  if (call.symmetric != 0) text += ", symmetric " + std::to_string(call.symmetric);
  return text + ") round " + std::to_string(call.round);
}

void run_collective(Channel& channel, const Collective& call,
                    const std::shared_ptr<host::Arena>& segment) {
  const std::string text = text_of(call);
  const host::CallId id{static_cast<std::uint32_t>(std::hash<std::string>{}(text)) | 1u, text};
  if (call.op == Op::kAllGather) return gather(channel, call, id, segment);
  if (call.op == Op::kReduceScatter) return scatter(channel, call, id, segment);
  reduce(channel, call, id, segment);
}

void run_random_collectives(Channel& channel, std::uint64_t seed, int count,
                            const std::shared_ptr<host::Arena>& segment) {
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
      call.layout.inner = draw(3) == 0 ? draw(6000) + 1 : draw(99) + 1;
      call.norm = draw(2) == 0;
      call.in_place = call.out == call.wire && draw(3) == 0;
      if (call.in_place) call.symmetric = 0;
    } else {
      call.layout = {draw(3) + 1, draw(40) + 1, std::vector<std::size_t>(world)};
      for (std::size_t& size : call.layout.sizes) size = draw(4) == 0 ? 0 : draw(30);
    }
    run_collective(channel, call, segment);
  }
}

}  // namespace tpkernels::test
