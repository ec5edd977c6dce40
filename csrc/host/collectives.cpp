#include "host/collectives.h"

#include <algorithm>
#include <numeric>

#include "host/chunks.h"

namespace tpkernels::host {
namespace {

// `outer` runs of `width` bytes, `pitch` apart: one rank's shard of a larger tensor.
struct Strided {
  std::byte* base;
  std::size_t width;
  std::size_t pitch;

  bool contiguous_at(std::size_t begin, std::size_t bytes) const {
    return bytes == 0 || width == pitch || begin / width == (begin + bytes - 1) / width;
  }
  // Calls f(address, offset from `begin`, bytes) for each run of the flat range
  // [begin, begin + bytes).
  template <class F>
  void for_range(std::size_t begin, std::size_t bytes, F&& f) const {
    if (bytes == 0) return;
    if (width == pitch) {
      f(base + begin, std::size_t{0}, bytes);
      return;
    }
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t run = (begin + done) / width;
      const std::size_t at = (begin + done) % width;
      const std::size_t n = std::min(bytes - done, width - at);
      f(base + run * pitch + at, done, n);
      done += n;
    }
  }
};

std::size_t rows(const ShardLayout& layout, int first, int last) {
  return std::accumulate(layout.sizes.begin() + first, layout.sizes.begin() + last, std::size_t{0});
}

// Offset in bytes of rank's shard within a block.
std::size_t shard_offset(const ShardLayout& layout, int rank, std::size_t element) {
  return rows(layout, 0, rank) * layout.inner * element;
}

Strided shard(std::byte* tensor, const ShardLayout& layout, int rank, std::size_t element) {
  const int world = static_cast<int>(layout.sizes.size());
  const std::size_t row = layout.inner * element;
  const std::size_t width = rows(layout, rank, rank + 1) * row;
  const std::size_t pitch = layout.outer == 1 ? width : rows(layout, 0, world) * row;
  return {tensor + shard_offset(layout, rank, element), width, pitch};
}

std::size_t shard_bytes(const ShardLayout& layout, int rank, std::size_t element) {
  return layout.outer * layout.sizes[static_cast<std::size_t>(rank)] * layout.inner * element;
}

std::size_t largest_shard(const ShardLayout& layout, std::size_t element) {
  return layout.outer * *std::max_element(layout.sizes.begin(), layout.sizes.end()) * layout.inner *
         element;
}

// Bytes of each piece in a chunk, if a rank's buffer holds one for each rank.
std::size_t step_of_pieces(const Channel& channel) {
  const std::size_t room = channel.capacity() / static_cast<unsigned>(channel.world());
  return std::max<std::size_t>(64, align_down(std::min(kLimits.chunk_bytes, room)));
}

// Writes the chunk [begin, begin + step) of the piece for `to_rank` to where that rank reads it.
void pack(Channel& channel, std::byte* tensor, const ShardLayout& layout, int to_rank,
          std::size_t begin, std::size_t step, std::size_t element) {
  std::byte* piece = channel.buffer(channel.rank()) + static_cast<unsigned>(to_rank) * step;
  const std::size_t n = within(shard_bytes(layout, to_rank, element), begin, step);
  shard(tensor, layout, to_rank, element)
      .for_range(begin, n, [&](std::byte* from, std::size_t at, std::size_t m) {
        share(channel, piece + at, from, m);
      });
}

}  // namespace

ChunkLimits chunk_limits() { return kLimits; }

void all_gather(Channel& channel, const CallId& call, const Source& in, std::byte* out,
                const ShardLayout& layout, DType dtype) {
  const std::size_t element = size_of(dtype);
  const int rank = channel.rank();
  const std::size_t mine = shard_bytes(layout, rank, element);
  const std::size_t largest = largest_shard(layout, element);
  const std::size_t step = align_down(std::min(kLimits.chunk_bytes, channel.capacity()));
  const bool stream = largest * layout.sizes.size() >= kStreamBytes;
  const std::size_t chunks = std::max<std::size_t>(1, ceil_div(largest, step));
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::size_t begin = c * step;
    const std::size_t n = within(mine, begin, step);
    channel.begin(call.signature, call.text);
    channel.sharing().begin(within(largest, begin, step));
    if (in.segment != 0) {
      channel.locate(in.segment, in.offset + begin);
    } else if (channel.world() > 1) {
      share(channel, channel.buffer(rank), in.data + begin, n);
    }
    channel.publish(Phase::kData);
    shard(out, layout, rank, element)
        .for_range(begin, n, [&](std::byte* to, std::size_t at, std::size_t m) {
          copy(to, in.data + begin + at, m, stream);
        });
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData);
      const std::size_t theirs = within(shard_bytes(layout, peer, element), begin, step);
      if (theirs == 0) return;  // its shard has ended, so the located offset is past the end
      const std::byte* from = channel.data(peer, theirs);
      channel.count_read(theirs);
      channel.sharing().timed([&] {
        shard(out, layout, peer, element)
            .for_range(begin, theirs, [&](std::byte* to, std::size_t at, std::size_t m) {
              copy(to, from + at, m, stream);
            });
      });
    });
    if (c + 1 == chunks) release_sources(channel, in);
  }
}

void reduce_scatter(Channel& channel, const CallId& call, const Source& in, std::byte* out,
                    const ShardLayout& layout, DType wire, const Epilogue& epilogue) {
  const std::size_t element = size_of(wire);
  const int world = channel.world();
  const int rank = channel.rank();
  const std::size_t mine = shard_bytes(layout, rank, element);
  const std::size_t largest = largest_shard(layout, element);
  const std::size_t step = step_of_pieces(channel);
  // Peers read a symmetric tensor in place if its shards are contiguous.
  const bool in_place = in.segment != 0 && layout.outer == 1;
  auto* input = const_cast<std::byte*>(in.data);
  const std::size_t chunks = std::max<std::size_t>(1, ceil_div(largest, step));
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::size_t begin = c * step;
    channel.begin(call.signature, call.text);
    channel.sharing().begin(within(largest, begin, step));
    if (in_place) channel.locate(in.segment, in.offset);
    for_each_peer(channel, [&](int peer) {
      if (!in_place) pack(channel, input, layout, peer, begin, step, element);
      channel.publish(Phase::kData, peer);
    });
    const std::size_t n = within(mine, begin, step);
    const Strided own = shard(input, layout, rank, element);
    const bool own_in_place = own.contiguous_at(begin, n);
    if (!own_in_place) pack(channel, input, layout, rank, begin, step, element);
    std::vector<const std::byte*> partials(static_cast<std::size_t>(world));
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData, rank);
      const bool theirs_in_place = channel.in_segment(peer);
      const std::size_t at = theirs_in_place ? shard_offset(layout, rank, element) + begin
                                             : static_cast<unsigned>(rank) * step;
      if (n != 0) partials[static_cast<std::size_t>(peer)] = channel.data(peer, at + n) + at;
      channel.count_read(n);
    });
    partials[static_cast<std::size_t>(rank)] =
        channel.buffer(rank) + static_cast<unsigned>(rank) * step;
    if (own_in_place) {
      own.for_range(begin, n, [&](std::byte* from, std::size_t, std::size_t) {
        partials[static_cast<std::size_t>(rank)] = from;
      });
    }
    const std::size_t first = begin / element;
    Epilogue here = epilogue;
    if (here.residual) {
      here.residual =
          static_cast<const std::byte*>(here.residual) + first * size_of(here.residual_dtype);
    }
    channel.sharing().timed([&] {
      sum_partials(out + first * size_of(here.out_dtype), partials, wire, first, n / element, here);
    });
    if (c + 1 == chunks) release_sources(channel, in_place ? in : Source{in.data});
  }
}

void all_to_all(Channel& channel, const CallId& call, const std::byte* in, std::byte* out,
                const ShardLayout& given, const ShardLayout& taken, std::size_t largest,
                DType dtype) {
  const std::size_t element = size_of(dtype);
  const int rank = channel.rank();
  const std::size_t step = step_of_pieces(channel);
  auto* input = const_cast<std::byte*>(in);
  const std::size_t result = taken.outer * rows(taken, 0, channel.world()) * taken.inner;
  const bool stream = result * element >= kStreamBytes;
  const std::size_t chunks = std::max<std::size_t>(1, ceil_div(largest * element, step));
  for (std::size_t c = 0; c < chunks; ++c) {
    const std::size_t begin = c * step;
    // Copies a run of the piece from `peer`, from byte `at` of the piece on, to its places.
    const auto place = [&](int peer, const std::byte* from, std::size_t at, std::size_t bytes) {
      shard(out, taken, peer, element)
          .for_range(at, bytes, [&](std::byte* to, std::size_t done, std::size_t m) {
            copy(to, from + done, m, stream);
          });
    };
    channel.begin(call.signature, call.text);
    channel.sharing().begin(within(largest * element, begin, step));
    for_each_peer(channel, [&](int peer) {
      pack(channel, input, given, peer, begin, step, element);
      channel.publish(Phase::kData, peer);
    });
    shard(input, given, rank, element)
        .for_range(begin, within(shard_bytes(given, rank, element), begin, step),
                   [&](std::byte* from, std::size_t at, std::size_t m) {
                     place(rank, from, begin + at, m);
                   });
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData, rank);
      const std::size_t n = within(shard_bytes(taken, peer, element), begin, step);
      const std::byte* piece = channel.buffer(peer) + static_cast<unsigned>(rank) * step;
      channel.count_read(n);
      channel.sharing().timed([&] { place(peer, piece, begin, n); });
    });
  }
}

}  // namespace tpkernels::host
