#include "host/collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tpkernels::host {
namespace {

// Larger results leave the caches before anyone reads them: use streaming stores.
constexpr std::size_t kStreamBytes = 8 << 20;
constexpr std::size_t kStreamRun = 1024;  // bytes in a row; lines stored in part are slow

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t align_down(std::size_t bytes) { return bytes / 64 * 64; }

void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool stream) {
  if (bytes == 0 || to == from) return;
  if (stream && bytes >= kStreamRun) {
    vector_unit().stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Copies to where peers read it.
void share(Channel& channel, std::byte* to, const std::byte* from, std::size_t bytes) {
  Sharing& sharing = channel.sharing();
  sharing.timed([&] { copy(to, from, bytes, sharing.past_caches()); });
}

// How much of [0, total) the chunk [begin, begin + step) covers.
std::size_t within(std::size_t total, std::size_t begin, std::size_t step) {
  return begin >= total ? 0 : std::min(step, total - begin);
}

// Makes a call for each chunk of `bytes`, of which a rank stores up to `step` at a time. Calls
// f(begin, whether it is the last).
template <class F>
void in_chunks(Channel& channel, const CallId& call, std::size_t bytes, std::size_t step, F&& f) {
  const std::size_t chunks = std::max<std::size_t>(1, ceil_div(bytes, step));
  for (std::size_t c = 0; c < chunks; ++c) {
    channel.begin(call.signature, call.text);
    channel.sharing().begin(within(bytes, c * step, step));
    f(c * step, c + 1 == chunks);
  }
}

// Starts with the next rank, so that the ranks do not all read the same peer at once.
template <class F>
void for_each_peer(const Channel& channel, F&& f) {
  for (int i = 1; i < channel.world(); ++i) f((channel.rank() + i) % channel.world());
}

// Ends the last chunk: a peer that read a symmetric tensor in place tells its owner so.
void release_sources(Channel& channel, const Source& in) {
  for_each_peer(channel, [&](int peer) {
    if (channel.in_segment(peer)) channel.end_read(peer);
  });
  if (in.segment == 0) return;
  for_each_peer(channel, [&](int peer) { channel.wait(peer, Phase::kRead, channel.rank()); });
}

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
  return std::max<std::size_t>(64, align_down(std::min(kChunkBytes, room)));
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

// What follows a sum, for its elements from `first` on.
Epilogue epilogue_from(Epilogue epilogue, std::size_t first) {
  if (epilogue.residual) {
    const auto* residual = static_cast<const std::byte*>(epilogue.residual);
    epilogue.residual = residual + first * size_of(epilogue.residual_dtype);
  }
  return epilogue;
}

// Bytes of the sum that are normalised at a time: they are still in the L1 cache.
constexpr std::size_t kNormBlockBytes = 8 << 10;

// in: [outer, sizes[rank], inner]; out: [outer, sum(sizes), inner].
void all_gather(Channel& channel, const CallId& call, const Operands& operands,
                const Shards& shards) {
  const Source& in = operands.in;
  std::byte* const out = operands.out;
  const ShardLayout& layout = shards.layout;
  const std::size_t element = size_of(operands.dtype);
  const int rank = channel.rank();
  const std::size_t mine = shard_bytes(layout, rank, element);
  const std::size_t largest = largest_shard(layout, element);
  const std::size_t step = align_down(std::min(kChunkBytes, channel.capacity()));
  const bool stream = largest * layout.sizes.size() >= kStreamBytes;
  in_chunks(channel, call, largest, step, [&](std::size_t begin, bool last) {
    const std::size_t n = within(mine, begin, step);
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
      channel.sharing().timed([&] {
        shard(out, layout, peer, element)
            .for_range(begin, theirs, [&](std::byte* to, std::size_t at, std::size_t m) {
              copy(to, from + at, m, stream);
            });
      });
    });
    if (last) release_sources(channel, in);
  });
}

// in: [outer, sum(sizes), inner]; out: [outer, sizes[rank], inner].
void reduce_scatter(Channel& channel, const CallId& call, const Operands& operands,
                    const Shards& shards) {
  const Source& in = operands.in;
  const Epilogue& epilogue = operands.epilogue;
  const ShardLayout& layout = shards.layout;
  const std::size_t element = size_of(operands.dtype);
  const int world = channel.world();
  const int rank = channel.rank();
  const std::size_t mine = shard_bytes(layout, rank, element);
  const std::size_t largest = largest_shard(layout, element);
  const std::size_t step = step_of_pieces(channel);
  // Peers read a symmetric tensor in place if its shards are contiguous.
  const bool in_place = in.segment != 0 && layout.outer == 1;
  auto* input = const_cast<std::byte*>(in.data);
  in_chunks(channel, call, largest, step, [&](std::size_t begin, bool last) {
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
    });
    const std::byte*& ours = partials[static_cast<std::size_t>(rank)];
    ours = channel.buffer(rank) + static_cast<unsigned>(rank) * step;
    if (own_in_place) {
      own.for_range(begin, n, [&](std::byte* from, std::size_t, std::size_t) { ours = from; });
    }
    const std::size_t first = begin / element;
    channel.sharing().timed([&] {
      sum_partials(operands.out + first * size_of(epilogue.out_dtype), partials, operands.dtype,
                   first, n / element, epilogue_from(epilogue, first));
    });
    if (last) release_sources(channel, in_place ? in : Source{in.data});
  });
}

// in: [.., sum(given.sizes), ..], of which rank r gets its rows; out: [.., sum(taken.sizes), ..],
// of which rank r has given its rows.
void all_to_all(Channel& channel, const CallId& call, const Operands& operands,
                const Shards& shards) {
  const ShardLayout& given = shards.layout;
  const ShardLayout& taken = shards.taken;
  const std::size_t element = size_of(operands.dtype);
  const int rank = channel.rank();
  const std::size_t step = step_of_pieces(channel);
  auto* input = const_cast<std::byte*>(operands.in.data);
  const std::size_t result = taken.outer * rows(taken, 0, channel.world()) * taken.inner;
  const bool stream = result * element >= kStreamBytes;
  in_chunks(channel, call, shards.largest * element, step, [&](std::size_t begin, bool) {
    // Copies a run of the piece from `peer`, from byte `at` of the piece on, to its places.
    const auto place = [&](int peer, const std::byte* from, std::size_t at, std::size_t bytes) {
      shard(operands.out, taken, peer, element)
          .for_range(at, bytes, [&](std::byte* to, std::size_t done, std::size_t m) {
            copy(to, from + done, m, stream);
          });
    };
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
      channel.sharing().timed([&] { place(peer, piece, begin, n); });
    });
  });
}

// in, out: `count` elements. They may be the same memory if `in.segment` is 0. `norm.out` gets the
// rows of the result, normalised: by every rank all of them, while they are in its caches.
void all_reduce(Channel& channel, const CallId& call, const Operands& operands, const Shards&) {
  const Source& in = operands.in;
  std::byte* const out = operands.out;
  const std::size_t count = operands.count;
  const Epilogue& epilogue = operands.epilogue;
  const RmsNorm& norm = operands.norm;
  const std::size_t element = size_of(operands.dtype);
  const std::size_t out_element = size_of(epilogue.out_dtype);
  const auto world = static_cast<std::size_t>(channel.world());
  const auto rank = static_cast<std::size_t>(channel.rank());
  // Two ranks move no more data in one step than in two, and one moves none.
  const bool one_shot = count * element <= kOneShotBytes || world <= 2;
  // A buffer holds a chunk of the input, followed by this rank's part of the result.
  const std::size_t room = channel.capacity() * element / (element + out_element) - 128;
  const std::size_t step = align_down(std::min(kChunkBytes * world, room)) / element;
  const bool stream = count * out_element >= kStreamBytes && !norm.out;
  std::vector<const std::byte*> partials(world);
  std::size_t normalised = 0;  // rows
  const auto normalise = [&](std::size_t complete) {
    if (!norm.out) return;
    const std::size_t first = std::exchange(normalised, complete / norm.cols);
    normalise_rows(norm, out, epilogue.out_dtype, first, normalised);
  };
  in_chunks(channel, call, count * element, step * element, [&](std::size_t begin, bool last) {
    begin /= element;  // from here on in elements
    const std::size_t n = within(count, begin, step);
    // Parts are whole cache lines in either dtype.
    const std::size_t part = one_shot ? n : ceil_div(ceil_div(n, world), 64) * 64;
    const auto part_begin = [&](std::size_t r) { return std::min(n, r * part); };
    const auto part_count = [&](std::size_t r) { return part_begin(r + 1) - part_begin(r); };
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
    });
    partials[rank] = source + first * element;
    std::byte* to = out + begin * out_element;
    std::byte* own = to + first * out_element;
    const std::size_t block = one_shot && norm.out ? kNormBlockBytes / out_element : length;
    for (std::size_t at = 0; at < length; at += block) {
      const std::size_t m = std::min(block, length - at);
      const std::size_t begun = begin + first + at;
      channel.sharing().timed([&] {
        sum_partials(own + at * out_element, partials, operands.dtype, begun, m,
                     epilogue_from(epilogue, begun));
      });
      for (const std::byte*& partial : partials) partial += m * element;
      if (one_shot) normalise(begin + at + m);
    }
    if (!one_shot) {
      share(channel, buffer + result_at, own, length * out_element);
      channel.publish(Phase::kResult);
      for_each_peer(channel, [&](int peer) {
        channel.wait(peer, Phase::kResult);
        const auto theirs = static_cast<std::size_t>(peer);
        copy(to + part_begin(theirs) * out_element, channel.buffer(peer) + result_at,
             part_count(theirs) * out_element, stream);
      });
      normalise(begin + n);
    }
    if (last) release_sources(channel, in);
  });
}

// in: [tokens[rank], inner]; out: [rows[rank], inner].
void dispatch(Channel& channel, const CallId& call, const Operands& operands,
              const Shards& shards) {
  const Source& in = operands.in;
  const Routing& routing = *operands.routing;
  const std::size_t width = shards.layout.inner * size_of(operands.dtype);
  const int rank = channel.rank();
  const std::size_t largest = *std::max_element(routing.tokens.begin(), routing.tokens.end());
  const std::size_t step =
      std::max<std::size_t>(1, std::min(kChunkBytes, channel.capacity()) / width);
  // Calls f(token, the route's rank, its row) for `count` tokens of a rank from `begin` on, which
  // has token 0.
  const auto for_routes = [&](int of_rank, std::size_t begin, std::size_t count, auto&& f) {
    const std::size_t first = (routing.first_token(of_rank) + begin) * routing.k;
    for (std::size_t i = 0; i < count * routing.k; ++i) {
      f(i / routing.k, routing.rank[first + i], routing.row[first + i]);
    }
  };
  in_chunks(channel, call, largest * width, step * width, [&](std::size_t begin, bool last) {
    const std::size_t first = begin / width;
    const auto tokens = [&](int of_rank) {
      return within(routing.tokens[static_cast<std::size_t>(of_rank)], first, step);
    };
    const auto take = [&](int from_rank, const std::byte* from) {
      for_routes(from_rank, first, tokens(from_rank),
                 [&](std::size_t token, int to_rank, std::size_t row) {
                   if (to_rank != rank) return;
                   std::memcpy(operands.out + row * width, from + token * width, width);
                 });
    };
    if (in.segment != 0) {
      channel.locate(in.segment, in.offset + begin);
    } else {
      std::size_t shared = 0;  // tokens before this one that were looked at
      for_routes(rank, first, tokens(rank), [&](std::size_t token, int to_rank, std::size_t) {
        if (to_rank == rank || token < shared) return;
        const std::size_t at = token * width;
        share(channel, channel.buffer(rank) + at, in.data + begin + at, width);
        shared = token + 1;
      });
    }
    channel.publish(Phase::kData);
    take(rank, in.data + begin);
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData);
      const std::size_t theirs = tokens(peer);
      if (theirs == 0) return;  // the located offset is past the end
      const std::byte* const from = channel.data(peer, theirs * width);
      channel.sharing().timed([&] { take(peer, from); });
    });
    if (last) release_sources(channel, in);
  });
}

// in: [rows[rank], inner]; out: [tokens[rank], inner], of each token the sum of its routes' rows,
// by weight and in the order of its slots. A chunk has as many tokens of each rank. A rank's buffer
// has the rows for its peers' tokens one after another, in the order of the tokens of all ranks.
void combine(Channel& channel, const CallId& call, const Operands& operands, const Shards& shards) {
  const Routing& routing = *operands.routing;
  const std::size_t element = size_of(operands.dtype), k = routing.k;
  const std::size_t width = shards.layout.inner * element;
  const int world = channel.world(), rank = channel.rank();
  const std::size_t largest = *std::max_element(routing.tokens.begin(), routing.tokens.end());
  const std::size_t room = std::min(kChunkBytes * static_cast<unsigned>(world), channel.capacity());
  const std::size_t most = static_cast<unsigned>(world) * k * width;  // for a token of each rank
  const std::size_t step = std::max<std::size_t>(1, room / most);
  const std::size_t weight = operands.dtype == DType::kF64 ? 8 : 4;
  std::vector<const std::byte*> sources(std::min(step, largest) * k);  // of this rank's tokens
  std::vector<std::size_t> next(static_cast<std::size_t>(world));      // row in a rank's buffer
  in_chunks(channel, call, largest * most, step * most, [&](std::size_t begin, bool) {
    const std::size_t first = begin / most;
    const auto tokens = [&](int of_rank) {
      return within(routing.tokens[static_cast<std::size_t>(of_rank)], first, step);
    };
    std::fill(next.begin(), next.end(), std::size_t{0});
    for (int owner = 0; owner < world; ++owner) {
      const std::size_t at = (routing.first_token(owner) + first) * k;
      for (std::size_t i = 0; i < tokens(owner) * k; ++i) {
        const int holder = routing.rank[at + i];
        const std::byte* const own = operands.in.data + routing.row[at + i] * width;
        if (holder == owner) {
          if (owner == rank) sources[i] = own;
          continue;
        }
        const std::size_t place = next[static_cast<std::size_t>(holder)]++ * width;
        if (holder == rank) share(channel, channel.buffer(rank) + place, own, width);
        if (owner == rank) sources[i] = channel.buffer(holder) + place;
      }
    }
    channel.publish(Phase::kData);
    for_each_peer(channel, [&](int peer) { channel.wait(peer, Phase::kData); });
    channel.sharing().timed([&] {
      for (std::size_t token = 0; token < tokens(rank); ++token) {
        const std::size_t at = first + token;
        weigh(operands.out + at * width, &sources[token * k], operands.weights + at * k * weight, k,
              operands.dtype, shards.layout.inner);
      }
    });
  });
}

struct Entry {
  std::string_view name;
  Collective run;
  int layouts;  // that it needs
};

constexpr Entry kCollectives[] = {
    {"all_gather", all_gather, 1}, {"reduce_scatter", reduce_scatter, 1},
    {"all_to_all", all_to_all, 2}, {"all_reduce", all_reduce, 0},
    {"dispatch", dispatch, 1},     {"combine", combine, 1}};

}  // namespace

Collective collective(std::string_view name, const Shards& shards) {
  const int layouts = int{!shards.layout.sizes.empty()} + int{!shards.taken.sizes.empty()};
  for (const Entry& entry : kCollectives) {
    if (entry.name == name && layouts == entry.layouts) return entry.run;
  }
  throw std::invalid_argument("unknown collective '" + std::string(name) + "' with " +
                              std::to_string(layouts) + " shard layouts");
}

}  // namespace tpkernels::host
