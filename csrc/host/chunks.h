// What the collectives share: the chunks in which data moves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "host/channel.h"
#include "host/collectives.h"
#include "host/vector.h"

namespace tpkernels::host {

// AMD EPYC (Zen 3, 512 KiB L2, 32 MiB L3), 2 ranks x 1 thread, 2026-11-21; see
// benchmarks/results/cpu-2core-zen3.md for the sweep.
inline constexpr ChunkLimits kLimits{/*one_shot_bytes=*/16 << 10, /*chunk_bytes=*/512 << 10};
// Larger results leave the caches before anyone reads them: use streaming stores.
inline constexpr std::size_t kStreamBytes = 8 << 20;
inline constexpr std::size_t kStreamRun = 1024;  // bytes in a row; lines stored in part are slow

inline std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }
inline std::size_t align_down(std::size_t bytes) { return bytes / 64 * 64; }

inline void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool stream) {
  if (bytes == 0 || to == from) return;
  if (stream && bytes >= kStreamRun) {
    vector_unit().stream(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Copies to where peers read it.
inline void share(Channel& channel, std::byte* to, const std::byte* from, std::size_t bytes) {
  Sharing& sharing = channel.sharing();
  sharing.timed([&] { copy(to, from, bytes, sharing.past_caches()); });
}

// How much of [0, total) the chunk [begin, begin + step) covers.
inline std::size_t within(std::size_t total, std::size_t begin, std::size_t step) {
  return begin >= total ? 0 : std::min(step, total - begin);
}

// Starts with the next rank, so that the ranks do not all read the same peer at once.
template <class F>
void for_each_peer(const Channel& channel, F&& f) {
  for (int i = 1; i < channel.world(); ++i) f((channel.rank() + i) % channel.world());
}

// Ends the last chunk: a peer that read a symmetric tensor in place tells its owner so.
inline void release_sources(Channel& channel, const Source& in) {
  for_each_peer(channel, [&](int peer) {
    if (channel.in_segment(peer)) channel.end_read(peer);
  });
  if (in.segment == 0) return;
  for_each_peer(channel, [&](int peer) { channel.wait(peer, Phase::kRead, channel.rank()); });
}

}  // namespace tpkernels::host
