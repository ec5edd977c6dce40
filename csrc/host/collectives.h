// Problem: all-gather, reduce-scatter and all-reduce of CPU tensors over a channel.
//
// Algorithm: the payload moves in chunks that stay in the cache between the writer and the readers.
// Each chunk is one call of the channel (one epoch), so that the channel's proof holds for it and
// the two data buffers are all the memory it takes, however large the tensors.
//   all_gather       write own chunk; copy every peer's chunk out.
//   reduce_scatter   write for each peer its piece of own partial; sum the pieces that are for us.
//   all_reduce       one-shot (small): write own chunk; everybody sums all of it.
//                    two-shot: write own chunk; sum the W-th part that is ours into the result
//                    buffer; copy the peers' results out.
// Sums run over ranks 0..W-1 in fp32 and round once, so both all-reduces give the same bits on
// every rank. Input in a symmetric tensor is read in place by the peers; the last chunk then ends
// with a word from each of them (`kRead`), after which the memory is the user's again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "host/channel.h"
#include "host/vector.h"

namespace tpkernels::host {

// Which call this is, for its peers.
struct Call {
  std::uint32_t signature;
  std::string_view text;
};

// Input of this rank: a plain pointer, or one within a segment (0: none).
struct Source {
  const std::byte* data;
  std::uint64_t segment = 0;
  std::size_t offset = 0;
};

// A tensor seen along the dim that is gathered or scattered: `outer` blocks of `sum(sizes)` rows of
// `inner` elements each; rank r has `sizes[r]` rows of every block.
struct ShardLayout {
  std::size_t outer;
  std::size_t inner;
  std::vector<std::size_t> sizes;
};

// Limits of one chunk, from measurement (benchmarks/results); see collectives.cpp.
struct ChunkLimits {
  std::size_t one_shot_bytes;
  std::size_t chunk_bytes;
};
ChunkLimits chunk_limits();

// in: [outer, sizes[rank], inner]; out: [outer, sum(sizes), inner].
void all_gather(Channel& channel, const Call& call, const Source& in, std::byte* out,
                const ShardLayout& layout, DType dtype);

// in: [outer, sum(sizes), inner] of `wire`; out: [outer, sizes[rank], inner].
void reduce_scatter(Channel& channel, const Call& call, const Source& in, std::byte* out,
                    const ShardLayout& layout, DType wire, const Epilogue& epilogue);

// in, out: `count` elements; they may be the same memory (then `in.segment` must be 0).
void all_reduce(Channel& channel, const Call& call, const Source& in, std::byte* out,
                std::size_t count, DType wire, const Epilogue& epilogue);

}  // namespace tpkernels::host
