#include <algorithm>
#include <vector>

#include "host/chunks.h"
#include "host/collectives.h"

namespace tpkernels::host {
namespace {

// Bytes of the sum that are normalised at a time: they are still in the L1 cache.
constexpr std::size_t kNormBlockBytes = 8 << 10;

// Normalises the rows of a sum as they become complete.
class Rows {
 public:
  Rows(const RmsNorm& norm, const std::byte* sum, DType dtype)
      : norm_(norm), sum_(sum), dtype_(dtype) {}

  // The first `count` elements of the sum are there.
  void complete(std::size_t count) {
    if (!norm_.out) return;
    const std::size_t rows = count / norm_.cols;
    normalise_rows(norm_, sum_, dtype_, done_, rows);
    done_ = rows;
  }

 private:
  const RmsNorm& norm_;
  const std::byte* sum_;
  DType dtype_;
  std::size_t done_ = 0;
};

}  // namespace

void all_reduce(Channel& channel, const CallId& call, const Source& in, std::byte* out,
                std::size_t count, DType wire, const Epilogue& epilogue, const RmsNorm& norm) {
  const std::size_t element = size_of(wire);
  const std::size_t out_element = size_of(epilogue.out_dtype);
  const auto world = static_cast<std::size_t>(channel.world());
  const auto rank = static_cast<std::size_t>(channel.rank());
  // Two ranks move no more data in one step than in two, and one moves none.
  const bool one_shot = count * element <= kLimits.one_shot_bytes || world <= 2;
  // A buffer holds a chunk of the input, followed by this rank's part of the result.
  const std::size_t room = channel.capacity() * element / (element + out_element) - 128;
  const std::size_t step = align_down(std::min(kLimits.chunk_bytes * world, room)) / element;
  const bool stream = count * out_element >= kStreamBytes && !norm.out;
  const std::size_t chunks = std::max<std::size_t>(1, ceil_div(count, step));
  std::vector<const std::byte*> partials(world);
  Rows rows(norm, out, epilogue.out_dtype);
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::size_t begin = c * step;  // from here on in elements
    const std::size_t n = within(count, begin, step);
    // Parts are whole cache lines in either dtype.
    const std::size_t part = one_shot ? n : ceil_div(ceil_div(n, world), 64) * 64;
    const auto part_begin = [&](std::size_t r) { return std::min(n, r * part); };
    const auto part_count = [&](std::size_t r) { return part_begin(r + 1) - part_begin(r); };
    channel.begin(call.signature, call.text);
    channel.sharing().begin(n * element);
    const std::byte* source = in.data + begin * element;
    std::byte* buffer = channel.buffer(channel.rank());
    const std::size_t result_at = ceil_div(step * element, 64) * 64;
    if (in.segment != 0) {
      channel.locate(in.segment, in.offset + begin * element);
    } else if (world == 1) {  // nobody reads it
    } else if (one_shot) {
      share(channel, buffer, source, n * element);
    } else {  // all but the part that only this rank reads
      const std::size_t after = part_begin(rank + 1);
      share(channel, buffer, source, part_begin(rank) * element);
      share(channel, buffer + after * element, source + after * element, (n - after) * element);
    }
    channel.publish(Phase::kData);

    const std::size_t first = one_shot ? 0 : part_begin(rank);
    const std::size_t length = one_shot ? n : part_count(rank);
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData);
      partials[static_cast<std::size_t>(peer)] = channel.data(peer, n * element) + first * element;
      channel.count_read(length * element);
    });
    partials[rank] = source + first * element;
    Epilogue here = epilogue;
    if (here.residual) {
      here.residual = static_cast<const std::byte*>(here.residual) +
                      (begin + first) * size_of(here.residual_dtype);
    }
    std::byte* to = out + begin * out_element;
    std::byte* own = to + first * out_element;
    const std::size_t block = one_shot && norm.out ? kNormBlockBytes / out_element : length;
    for (std::size_t at = 0; at < length; at += block) {
      const std::size_t m = std::min(block, length - at);
      channel.sharing().timed([&] {
        sum_partials(own + at * out_element, partials, wire, begin + first + at, m, here);
      });
      for (const std::byte*& partial : partials) partial += m * element;
      if (here.residual) {
        here.residual =
            static_cast<const std::byte*>(here.residual) + m * size_of(here.residual_dtype);
      }
      if (one_shot) rows.complete(begin + at + m);
    }
    if (!one_shot) {
      share(channel, buffer + result_at, own, length * out_element);
      channel.publish(Phase::kResult);
      for_each_peer(channel, [&](int peer) {
        channel.wait(peer, Phase::kResult);
        const auto theirs = static_cast<std::size_t>(peer);
        channel.count_read(part_count(theirs) * out_element);
        copy(to + part_begin(theirs) * out_element, channel.buffer(peer) + result_at,
             part_count(theirs) * out_element, stream);
      });
      rows.complete(begin + n);
    }
    if (c + 1 == chunks) release_sources(channel, in);
  }
}

}  // namespace tpkernels::host
