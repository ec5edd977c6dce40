// Problem: all-gather, reduce-scatter, all-to-all and all-reduce of CPU tensors over a channel.
//
// Algorithm: data moves in chunks. Each chunk is one call of the channel (one epoch). So the
// channel's proof covers it, and the two data buffers are all the memory needed, however large the
// tensors.
//   all_gather       Write own chunk; copy every peer's chunk out.
//   reduce_scatter   For each peer, write its piece of own partial; sum the pieces for this rank.
//   all_to_all       For each peer, write its piece of own shard; copy the peers' pieces out.
//   all_reduce       One-shot (small, or two ranks): write own chunk; every rank sums all of it.
//                    Two-shot: write own chunk; sum this rank's 1/W of it and write the result;
//                    copy the peers' results out. Either way every rank normalises all rows by
//                    itself, if asked to (benchmarks/results/cpu-2core-rms-norm.md).
// Sums run over ranks 0..W-1 in fp32 and round once, so both all-reduces give the same bits on
// every rank. Peers read input in a symmetric tensor in place. The last chunk then ends with a word
// from each of them (`kRead`), after which the memory is the user's again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "host/channel.h"
#include "host/rms_norm.h"
#include "host/vector.h"

namespace tpkernels::host {

// Identifies a call to the peers.
struct CallId {
  std::uint32_t signature;
  std::string_view text;
};

// This rank's input. If it lies in a segment (0: none), `offset` is its offset in this rank's
// region.
struct Source {
  const std::byte* data;
  std::uint64_t segment = 0;
  std::size_t offset = 0;
};

// A tensor viewed along the dim that is gathered or scattered: `outer` blocks of `sum(sizes)` rows
// of `inner` elements each. Rank r's shard is `sizes[r]` rows of every block.
struct ShardLayout {
  std::size_t outer;
  std::size_t inner;
  std::vector<std::size_t> sizes;
};

// Measured limits of one chunk; see chunks.h.
struct ChunkLimits {
  std::size_t one_shot_bytes;
  std::size_t chunk_bytes;
};
ChunkLimits chunk_limits();

// in: [outer, sizes[rank], inner]; out: [outer, sum(sizes), inner].
void all_gather(Channel& channel, const CallId& call, const Source& in, std::byte* out,
                const ShardLayout& layout, DType dtype);

// in: [outer, sum(sizes), inner] of `wire`; out: [outer, sizes[rank], inner].
void reduce_scatter(Channel& channel, const CallId& call, const Source& in, std::byte* out,
                    const ShardLayout& layout, DType wire, const Epilogue& epilogue);

// in: [.., sum(given.sizes), ..], of which rank r gets its rows; out: [.., sum(taken.sizes), ..],
// of which rank r has given its rows. The layouts are those of this rank's two tensors. `largest`:
// elements of the largest piece that a rank gives another, the same on all ranks.
void all_to_all(Channel& channel, const CallId& call, const std::byte* in, std::byte* out,
                const ShardLayout& given, const ShardLayout& taken, std::size_t largest,
                DType dtype);

// in, out: `count` elements. They may be the same memory if `in.segment` is 0. `norm.out` gets the
// rows of the result, normalised: by every rank all of them, while they are in its caches.
void all_reduce(Channel& channel, const CallId& call, const Source& in, std::byte* out,
                std::size_t count, DType wire, const Epilogue& epilogue, const RmsNorm& norm = {});

}  // namespace tpkernels::host
