#include "host/collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tpkernels::host {
namespace {

// Larger results leave the caches before they are read: use streaming stores.
constexpr std::size_t kStreamBytes = 8 << 20;
constexpr std::size_t kStreamRun = 1024;  // minimum contiguous bytes: partial lines are slow

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
std::size_t align_down(std::size_t bytes) { return bytes / 64 * 64; }

void copy(std::byte* dst, const std::byte* src, std::size_t bytes, bool stream) {
  if (bytes == 0 || dst == src) return;
  if (stream && bytes >= kStreamRun) {
    vector_unit().stream(dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

// Copies data into the local buffer for peers.
void share(Channel& channel, std::byte* dst, const std::byte* src, std::size_t bytes) {
  Sharing& sharing = channel.sharing();
  sharing.timed([&] { copy(dst, src, bytes, sharing.streaming()); });
}

// Size of the intersection of [0, total) and the chunk [begin, begin + step).
std::size_t clip_to_chunk(std::size_t total, std::size_t begin, std::size_t step) {
  return begin >= total ? 0 : std::min(step, total - begin);
}

// Makes one call per chunk of up to `step` bytes. Calls f(begin, is_last) within each call.
template <class F>
void for_each_chunk(Channel& channel, const CallId& call, std::size_t bytes, std::size_t step,
                    F&& f) {
  const std::size_t chunks = std::max<std::size_t>(1, ceil_div(bytes, step));
  for (std::size_t c = 0; c < chunks; ++c) {
    channel.begin(call.signature, call.description);
    channel.sharing().begin(clip_to_chunk(bytes, c * step, step));
    f(c * step, c + 1 == chunks);
  }
  channel.end_call();
}

// Starts with the next rank, so that the ranks do not read the same peer simultaneously.
template <class F>
void for_each_peer(const Channel& channel, F&& f) {
  for (int i = 1; i < channel.world(); ++i) f((channel.rank() + i) % channel.world());
}

// Ends the last chunk (invariant 4): sends `kRead` to the owners of symmetric tensors that this
// rank has read, and waits for the readers of the local tensor.
void release_sources(Channel& channel, const Source& in) {
  for_each_peer(channel, [&](int peer) {
    if (channel.in_segment(peer)) channel.end_read(peer);
  });
  if (in.segment == 0) return;
  for_each_peer(channel, [&](int peer) { channel.wait(peer, Phase::kRead, channel.rank()); });
}

// A shard of a larger tensor: runs of `width` bytes, `pitch` bytes apart.
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
      const std::size_t offset = (begin + done) % width;
      const std::size_t n = std::min(bytes - done, width - offset);
      f(base + run * pitch + offset, done, n);
      done += n;
    }
  }
};

std::size_t count_rows(const ShardLayout& layout, int first, int last) {
  return std::accumulate(layout.sizes.begin() + first, layout.sizes.begin() + last, std::size_t{0});
}

// Byte offset of the shard of `rank` within a block.
std::size_t shard_offset(const ShardLayout& layout, int rank, std::size_t element) {
  return count_rows(layout, 0, rank) * layout.inner * element;
}

Strided shard(std::byte* tensor, const ShardLayout& layout, int rank, std::size_t element) {
  const int world = static_cast<int>(layout.sizes.size());
  const std::size_t row = layout.inner * element;
  const std::size_t width = count_rows(layout, rank, rank + 1) * row;
  const std::size_t pitch = layout.outer == 1 ? width : count_rows(layout, 0, world) * row;
  return {tensor + shard_offset(layout, rank, element), width, pitch};
}

std::size_t shard_bytes(const ShardLayout& layout, int rank, std::size_t element) {
  return layout.outer * layout.sizes[static_cast<std::size_t>(rank)] * layout.inner * element;
}

std::size_t largest_shard(const ShardLayout& layout, std::size_t element) {
  return layout.outer * *std::max_element(layout.sizes.begin(), layout.sizes.end()) * layout.inner *
         element;
}

// Chunk size in bytes if the buffer has one slot per rank.
std::size_t slot_step(const Channel& channel) {
  const std::size_t slot_bytes = channel.capacity() / static_cast<unsigned>(channel.world());
  return std::max<std::size_t>(64, align_down(std::min(kChunkBytes, slot_bytes)));
}

// Copies the chunk [begin, begin + step) of the shard for `dst_rank` to its slot in the local
// buffer.
void pack(Channel& channel, std::byte* tensor, const ShardLayout& layout, int dst_rank,
          std::size_t begin, std::size_t step, std::size_t element) {
  std::byte* slot = channel.buffer(channel.rank()) + static_cast<unsigned>(dst_rank) * step;
  const std::size_t n = clip_to_chunk(shard_bytes(layout, dst_rank, element), begin, step);
  shard(tensor, layout, dst_rank, element)
      .for_range(begin, n, [&](std::byte* src, std::size_t offset, std::size_t m) {
        share(channel, slot + offset, src, m);
      });
}

// The epilogue of a sum for the elements from `first` on.
Epilogue epilogue_from(Epilogue epilogue, std::size_t first) {
  if (epilogue.residual) {
    const auto* residual = static_cast<const std::byte*>(epilogue.residual);
    epilogue.residual = residual + first * size_of(epilogue.residual_dtype);
  }
  return epilogue;
}

// Reduces `count` elements of the partials to `out`. `first` is their index in the result.
void reduce(const CollectiveArgs& args, void* out, const std::vector<const std::byte*>& partials,
            std::size_t first, std::size_t count) {
  if (args.op == ReduceOp::kSum && is_floating(args.dtype)) {
    sum_partials(out, partials, args.dtype, first, count, epilogue_from(args.epilogue, first),
                 args.tree ? &args.tree->merges() : nullptr);
  } else {
    reduce_partials(out, partials, args.dtype, args.op, count);
  }
}

// Bytes of the sum per RMSNorm step, which fit the L1 cache.
constexpr std::size_t kNormBlockBytes = 8 << 10;

// in: [outer, sizes[rank], inner]; out: [outer, sum(sizes), inner].
void all_gather(Channel& channel, const CallId& call, const CollectiveArgs& args,
                const Shards& shards) {
  const Source& in = args.in;
  const ShardLayout& layout = shards.layout;
  const std::size_t element = size_of(args.dtype);
  const int rank = channel.rank();
  const std::size_t local_bytes = shard_bytes(layout, rank, element);
  const std::size_t largest = largest_shard(layout, element);
  const std::size_t step = align_down(std::min(kChunkBytes, channel.capacity()));
  const bool stream = largest * layout.sizes.size() >= kStreamBytes;
  // Copies bytes [begin, begin + bytes) of the shard of `owner` to its output.
  const auto copy_out = [&](int owner, std::size_t begin, const std::byte* src, std::size_t bytes) {
    Strided to = shard(args.out, layout, owner, element);
    if (args.shard_outs) to.base = (*args.shard_outs)[static_cast<std::size_t>(owner)];
    if (!to.base) return;
    to.for_range(begin, bytes, [&](std::byte* dst, std::size_t offset, std::size_t m) {
      copy(dst, src + offset, m, stream);
    });
  };
  for_each_chunk(channel, call, largest, step, [&](std::size_t begin, bool last) {
    const std::size_t n = clip_to_chunk(local_bytes, begin, step);
    if (in.segment != 0) {
      channel.set_location(in.segment, in.offset + begin);
    } else if (channel.world() > 1) {
      share(channel, channel.buffer(rank), in.data + begin, n);
    }
    channel.publish(Phase::kData);
    copy_out(rank, begin, in.data + begin, n);
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData);
      const std::size_t peer_bytes = clip_to_chunk(shard_bytes(layout, peer, element), begin, step);
      if (peer_bytes == 0) return;  // its shard has ended: the location is past the end
      const std::byte* src = channel.data(peer, peer_bytes);
      channel.sharing().timed([&] { copy_out(peer, begin, src, peer_bytes); });
    });
    if (last) release_sources(channel, in);
  });
}

// in: [outer, sum(sizes), inner]; out: [outer, sizes[rank], inner].
void reduce_scatter(Channel& channel, const CallId& call, const CollectiveArgs& args,
                    const Shards& shards) {
  const Source& in = args.in;
  const ShardLayout& layout = shards.layout;
  const std::size_t element = size_of(args.dtype);
  const int world = channel.world();
  const int rank = channel.rank();
  const std::size_t local_bytes = shard_bytes(layout, rank, element);
  const std::size_t largest = largest_shard(layout, element);
  const std::size_t step = slot_step(channel);
  // Peers read a symmetric tensor in place if its shards are contiguous.
  const bool in_place = in.segment != 0 && layout.outer == 1;
  auto* input = const_cast<std::byte*>(in.data);
  for_each_chunk(channel, call, largest, step, [&](std::size_t begin, bool last) {
    if (in_place) channel.set_location(in.segment, in.offset);
    for_each_peer(channel, [&](int peer) {
      if (!in_place) pack(channel, input, layout, peer, begin, step, element);
      channel.publish(Phase::kData, peer);
    });
    const std::size_t n = clip_to_chunk(local_bytes, begin, step);
    const Strided local_shard = shard(input, layout, rank, element);
    const bool local_in_place = local_shard.contiguous_at(begin, n);
    if (!local_in_place) pack(channel, input, layout, rank, begin, step, element);
    std::vector<const std::byte*> partials(static_cast<std::size_t>(world));
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData, rank);
      const bool peer_in_place = channel.in_segment(peer);
      const std::size_t offset = peer_in_place ? shard_offset(layout, rank, element) + begin
                                               : static_cast<unsigned>(rank) * step;
      if (n != 0)
        partials[static_cast<std::size_t>(peer)] = channel.data(peer, offset + n) + offset;
    });
    const std::byte*& local_partial = partials[static_cast<std::size_t>(rank)];
    local_partial = channel.buffer(rank) + static_cast<unsigned>(rank) * step;
    if (local_in_place) {
      local_shard.for_range(begin, n,
                            [&](std::byte* src, std::size_t, std::size_t) { local_partial = src; });
    }
    const std::size_t first = begin / element;
    channel.sharing().timed([&] {
      reduce(args, args.out + first * size_of(args.epilogue.out_dtype), partials, first,
             n / element);
    });
    if (last) release_sources(channel, in_place ? in : Source{in.data});
  });
}

// in: [.., sum(in_layout.sizes), ..], split by destination rank; out: [.., sum(out_layout.sizes),
// ..], split by source rank.
void all_to_all(Channel& channel, const CallId& call, const CollectiveArgs& args,
                const Shards& shards) {
  const ShardLayout& in_layout = shards.layout;
  const ShardLayout& out_layout = shards.out_layout;
  const std::size_t element = size_of(args.dtype);
  const int rank = channel.rank();
  const std::size_t step = slot_step(channel);
  auto* input = const_cast<std::byte*>(args.in.data);
  const std::size_t result =
      out_layout.outer * count_rows(out_layout, 0, channel.world()) * out_layout.inner;
  const bool stream = result * element >= kStreamBytes;
  for_each_chunk(
      channel, call, shards.max_slice_numel * element, step, [&](std::size_t begin, bool) {
        // Copies bytes [offset, offset + bytes) of the slice from `peer` to the output.
        const auto unpack = [&](int peer, const std::byte* src, std::size_t offset,
                                std::size_t bytes) {
          shard(args.out, out_layout, peer, element)
              .for_range(offset, bytes, [&](std::byte* dst, std::size_t done, std::size_t m) {
                copy(dst, src + done, m, stream);
              });
        };
        for_each_peer(channel, [&](int peer) {
          pack(channel, input, in_layout, peer, begin, step, element);
          channel.publish(Phase::kData, peer);
        });
        shard(input, in_layout, rank, element)
            .for_range(begin, clip_to_chunk(shard_bytes(in_layout, rank, element), begin, step),
                       [&](std::byte* src, std::size_t offset, std::size_t m) {
                         unpack(rank, src, begin + offset, m);
                       });
        for_each_peer(channel, [&](int peer) {
          channel.wait(peer, Phase::kData, rank);
          const std::size_t n = clip_to_chunk(shard_bytes(out_layout, peer, element), begin, step);
          const std::byte* slot = channel.buffer(peer) + static_cast<unsigned>(rank) * step;
          channel.sharing().timed([&] { unpack(peer, slot, begin, n); });
        });
      });
}

// in, out: `count` elements. They may alias if `in.segment` is 0. If `norm.out` is set, every rank
// normalises all rows of the result while they are in its caches.
void all_reduce(Channel& channel, const CallId& call, const CollectiveArgs& args, const Shards&) {
  const Source& in = args.in;
  std::byte* const out = args.out;
  const std::size_t count = args.count;
  const Epilogue& epilogue = args.epilogue;
  const RmsNorm& norm = args.norm;
  const std::size_t element = size_of(args.dtype);
  const std::size_t out_element = size_of(epilogue.out_dtype);
  const auto world = static_cast<std::size_t>(channel.world());
  const auto rank = static_cast<std::size_t>(channel.rank());
  // With at most two ranks, one-shot moves no more data than two-shot.
  const bool one_shot = count * element <= kOneShotBytes || world <= 2;
  const auto num_nodes = [&](std::size_t r) { return args.tree ? args.tree->nodes(r) : 1; };
  const std::size_t max_nodes = args.tree ? args.tree->max_nodes() : 1;
  // A buffer holds a chunk of each node of the input, then the local slice of the result.
  const std::size_t chunk_capacity =
      channel.capacity() * element / (max_nodes * element + out_element) - 128;
  const std::size_t step = align_down(std::min(kChunkBytes * world, chunk_capacity)) / element;
  const bool stream = count * out_element >= kStreamBytes && !norm.out;
  std::vector<const std::byte*> partials;  // the nodes of all ranks, in rank order
  std::size_t normalised_rows = 0;
  const auto normalise = [&](std::size_t complete) {
    if (!norm.out) return;
    const std::size_t first = std::exchange(normalised_rows, complete / norm.cols);
    normalise_rows(norm, out, epilogue.out_dtype, first, normalised_rows);
  };
  for_each_chunk(channel, call, count * element, step * element, [&](std::size_t begin, bool last) {
    begin /= element;  // unit: elements
    const std::size_t n = clip_to_chunk(count, begin, step);
    // Slices are multiples of a cache line in both dtypes.
    const std::size_t slice = one_shot ? n : ceil_div(ceil_div(n, world), 64) * 64;
    const auto slice_begin = [&](std::size_t r) { return std::min(n, r * slice); };
    const auto slice_count = [&](std::size_t r) { return slice_begin(r + 1) - slice_begin(r); };
    const auto source = [&](std::size_t node) {
      return in.data + (node * count + begin) * element;
    };
    std::byte* buffer = channel.buffer(channel.rank());
    const std::size_t result_offset = ceil_div(max_nodes * step * element, 64) * 64;
    if (in.segment != 0) {
      channel.set_location(in.segment, in.offset + begin * element);
    } else if (world > 1) {
      for (std::size_t node = 0; node < num_nodes(rank); ++node) {
        std::byte* const to = buffer + node * n * element;
        if (one_shot) {
          share(channel, to, source(node), n * element);
        } else {  // all slices except the local one
          const std::size_t slice_end = slice_begin(rank + 1);
          share(channel, to, source(node), slice_begin(rank) * element);
          share(channel, to + slice_end * element, source(node) + slice_end * element,
                (n - slice_end) * element);
        }
      }
    }
    channel.publish(Phase::kData);

    const std::size_t first = one_shot ? 0 : slice_begin(rank);
    const std::size_t local_count = one_shot ? n : slice_count(rank);
    for_each_peer(channel, [&](int peer) { channel.wait(peer, Phase::kData); });
    partials.clear();
    for (std::size_t r = 0; r < world; ++r) {
      const std::size_t nodes = num_nodes(r);
      const std::byte* const data = r == rank || nodes == 0
                                        ? nullptr
                                        : channel.data(static_cast<int>(r), nodes * n * element);
      for (std::size_t node = 0; node < nodes; ++node) {
        const std::byte* const from = r == rank ? source(node) : data + node * n * element;
        partials.push_back(from + first * element);
      }
    }
    std::byte* dst = out + begin * out_element;
    std::byte* local_result = dst + first * out_element;
    const std::size_t block = one_shot && norm.out ? kNormBlockBytes / out_element : local_count;
    for (std::size_t offset = 0; offset < local_count; offset += block) {
      const std::size_t m = std::min(block, local_count - offset);
      const std::size_t element_begin = begin + first + offset;
      channel.sharing().timed(
          [&] { reduce(args, local_result + offset * out_element, partials, element_begin, m); });
      for (const std::byte*& partial : partials) partial += m * element;
      if (one_shot) normalise(begin + offset + m);
    }
    if (!one_shot) {
      share(channel, buffer + result_offset, local_result, local_count * out_element);
      channel.publish(Phase::kResult);
      for_each_peer(channel, [&](int peer) {
        channel.wait(peer, Phase::kResult);
        const auto peer_index = static_cast<std::size_t>(peer);
        copy(dst + slice_begin(peer_index) * out_element, channel.buffer(peer) + result_offset,
             slice_count(peer_index) * out_element, stream);
      });
      normalise(begin + n);
    }
    if (last) release_sources(channel, in);
  });
}

// in: [tokens[rank], inner]; out: [rows[rank], inner].
void dispatch(Channel& channel, const CallId& call, const CollectiveArgs& args,
              const Shards& shards) {
  const Source& in = args.in;
  const Routing& routing = *args.routing;
  const std::size_t width = shards.layout.inner * size_of(args.dtype);
  const int rank = channel.rank();
  const std::size_t largest = *std::max_element(routing.tokens.begin(), routing.tokens.end());
  const std::size_t step =
      std::max<std::size_t>(1, std::min(kChunkBytes, channel.capacity()) / width);
  // Calls f(token, rank, row) for each assignment of `count` tokens of `owner`, from token `begin`
  // on. `token` is relative to `begin`. `rank` and `row` are the destination.
  const auto for_each_assignment = [&](int owner, std::size_t begin, std::size_t count, auto&& f) {
    const std::size_t first = (routing.first_token(owner) + begin) * routing.k;
    for (std::size_t i = 0; i < count * routing.k; ++i) {
      f(i / routing.k, routing.expert_rank[first + i], routing.expert_row[first + i]);
    }
  };
  for_each_chunk(channel, call, largest * width, step * width, [&](std::size_t begin, bool last) {
    const std::size_t first = begin / width;
    const auto tokens = [&](int owner) {
      return clip_to_chunk(routing.tokens[static_cast<std::size_t>(owner)], first, step);
    };
    const auto copy_rows = [&](int src_rank, const std::byte* src) {
      for_each_assignment(src_rank, first, tokens(src_rank),
                          [&](std::size_t token, int dst_rank, std::size_t row) {
                            if (dst_rank != rank) return;
                            std::memcpy(args.out + row * width, src + token * width, width);
                          });
    };
    if (in.segment != 0) {
      channel.set_location(in.segment, in.offset + begin);
    } else {
      std::size_t next_token = 0;  // one past the last token that was copied
      for_each_assignment(
          rank, first, tokens(rank), [&](std::size_t token, int dst_rank, std::size_t) {
            if (dst_rank == rank || token < next_token) return;
            const std::size_t offset = token * width;
            share(channel, channel.buffer(rank) + offset, in.data + begin + offset, width);
            next_token = token + 1;
          });
    }
    channel.publish(Phase::kData);
    copy_rows(rank, in.data + begin);
    for_each_peer(channel, [&](int peer) {
      channel.wait(peer, Phase::kData);
      const std::size_t peer_tokens = tokens(peer);
      if (peer_tokens == 0) return;  // the location is past the end
      const std::byte* const src = channel.data(peer, peer_tokens * width);
      channel.sharing().timed([&] { copy_rows(peer, src); });
    });
    if (last) release_sources(channel, in);
  });
}

// in: [rows[rank], inner]; out: [tokens[rank], inner], for each token the weighted sum of its k
// rows in slot order. A chunk has up to `step` tokens of every rank. The buffer of a rank
// contains its rows for the tokens of peers, in the order of the tokens of all ranks.
void combine(Channel& channel, const CallId& call, const CollectiveArgs& args,
             const Shards& shards) {
  const Routing& routing = *args.routing;
  const std::size_t element = size_of(args.dtype), k = routing.k;
  const std::size_t width = shards.layout.inner * element;
  const int world = channel.world(), rank = channel.rank();
  const std::size_t largest = *std::max_element(routing.tokens.begin(), routing.tokens.end());
  const std::size_t capacity =
      std::min(kChunkBytes * static_cast<unsigned>(world), channel.capacity());
  // Maximum bytes in the buffer of a rank for one token of every rank.
  const std::size_t round_bytes = static_cast<unsigned>(world) * k * width;
  const std::size_t step = std::max<std::size_t>(1, capacity / round_bytes);
  const std::size_t weight_bytes = args.dtype == DType::kF64 ? 8 : 4;
  std::vector<const std::byte*> sources(std::min(step, largest) * k);  // rows of local tokens
  std::vector<std::size_t> next(static_cast<std::size_t>(world));  // next row in each rank's buffer
  for_each_chunk(
      channel, call, largest * round_bytes, step * round_bytes, [&](std::size_t begin, bool) {
        const std::size_t first = begin / round_bytes;
        const auto tokens = [&](int owner_rank) {
          return clip_to_chunk(routing.tokens[static_cast<std::size_t>(owner_rank)], first, step);
        };
        std::fill(next.begin(), next.end(), std::size_t{0});
        for (int owner = 0; owner < world; ++owner) {
          const std::size_t index = (routing.first_token(owner) + first) * k;
          for (std::size_t i = 0; i < tokens(owner) * k; ++i) {
            const int expert_rank = routing.expert_rank[index + i];
            const std::byte* const local_row = args.in.data + routing.expert_row[index + i] * width;
            if (expert_rank == owner) {
              if (owner == rank) sources[i] = local_row;
              continue;
            }
            const std::size_t offset = next[static_cast<std::size_t>(expert_rank)]++ * width;
            if (expert_rank == rank)
              share(channel, channel.buffer(rank) + offset, local_row, width);
            if (owner == rank) sources[i] = channel.buffer(expert_rank) + offset;
          }
        }
        channel.publish(Phase::kData);
        for_each_peer(channel, [&](int peer) { channel.wait(peer, Phase::kData); });
        channel.sharing().timed([&] {
          for (std::size_t token = 0; token < tokens(rank); ++token) {
            const std::size_t index = first + token;
            weighted_sum(args.out + index * width, &sources[token * k],
                         args.weights + index * k * weight_bytes, k, args.dtype,
                         shards.layout.inner);
          }
        });
      });
}

void barrier(Channel& channel, const CallId& call, const CollectiveArgs&, const Shards&) {
  for_each_chunk(channel, call, 0, 1, [&](std::size_t, bool) { channel.barrier(); });
}

struct Entry {
  std::string_view name;
  Collective run;
  int num_layouts;  // required shard layouts
};

constexpr Entry kCollectives[] = {
    {"all_gather", all_gather, 1}, {"reduce_scatter", reduce_scatter, 1},
    {"all_to_all", all_to_all, 2}, {"all_reduce", all_reduce, 0},
    {"dispatch", dispatch, 1},     {"combine", combine, 1},
    {"barrier", barrier, 0}};

}  // namespace

Collective collective(std::string_view name, const Shards& shards) {
  const int num_layouts = int{!shards.layout.sizes.empty()} + int{!shards.out_layout.sizes.empty()};
  for (const Entry& entry : kCollectives) {
    if (entry.name == name && num_layouts == entry.num_layouts) return entry.run;
  }
  throw std::invalid_argument("unknown collective '" + std::string(name) + "' with " +
                              std::to_string(num_layouts) + " shard layouts");
}

}  // namespace tpkernels::host
