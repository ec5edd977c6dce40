// Problem: a rank that brings the sum of a large tensor into a new result reads and writes half as
// much memory again as one that overwrites its input, because a core reads a line before it stores
// to it.
//
// Algorithm: each rank sums one half of every chunk. It stores its partial of the other half where
// the sum will be, in the peer's result. The peer reads it from there, so no other memory is
// needed, and overwrites it with the sum, which it also stores in this rank's result, past the
// caches if it is large: nobody reads it soon. So each rank brings half of its result's lines from
// memory, and loads and stores less than `all_reduce` does. Sums run in rank order: the same bits.
//
// Sync: shared_results.h says between which words a rank writes to its peer's result. Of each chunk
// of a result, the half that its rank sums is written by the peer until the peer's word, and then
// by the rank only; the other half by the peer only, before its last word. Chunks share no memory,
// so a rank may run ahead by as much as the words allow.
#include "host/written_results.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/chunks.h"

namespace tpkernels::host {
namespace {

// Of the sum, which the peer gets while it is in the L1 cache.
constexpr std::size_t kBlockBytes = 16 << 10;

// What `Channel::locate` announces a result with.
constexpr std::uint64_t kInResults = ~std::uint64_t{0};

}  // namespace

std::byte* exchange_results(Channel& channel, const CallId& call, const SharedResults& results,
                            const std::byte* out, std::size_t bytes) {
  const int peer = 1 - channel.rank();
  const auto offset = out ? results.offset_of(out, bytes) : std::nullopt;
  channel.begin(call.signature, call.text);
  if (offset) channel.locate(kInResults, *offset);
  channel.publish(Phase::kData);
  channel.wait(peer, Phase::kData);
  const auto [kind, at] = channel.located(peer);
  if (!offset || kind != kInResults) return nullptr;
  std::byte* const theirs = results.at(peer, at, bytes);
  if (!theirs) {
    throw std::runtime_error("the result of rank " + std::to_string(peer) + ", " +
                             std::to_string(bytes) + " bytes at " + std::to_string(at) +
                             ", is outside its memory for results");
  }
  return theirs;
}

void all_reduce_written(Channel& channel, const CallId& call, const std::byte* in, std::byte* out,
                        std::byte* peers_out, std::size_t count, DType dtype) {
  const std::size_t element = size_of(dtype), bytes = count * element;
  const auto rank = static_cast<std::size_t>(channel.rank());
  const int peer = 1 - channel.rank();
  const std::size_t step = 2 * kLimits.chunk_bytes;
  const Epilogue plain{dtype};
  std::vector<const std::byte*> partials(2);
  for (std::size_t begin = 0; begin < bytes; begin += step) {
    const std::size_t n = std::min(step, bytes - begin);
    const std::size_t half = align_down(n / 2);
    const std::size_t mine = begin + rank * half, theirs = begin + (1 - rank) * half;
    const std::size_t length = rank == 0 ? half : n - half;
    channel.begin(call.signature, call.text);
    channel.sharing().begin(n);
    share(channel, peers_out + theirs, in + theirs, n - length);
    channel.publish(Phase::kData);
    channel.wait(peer, Phase::kData);
    const bool stream = bytes >= kStreamBytes || channel.sharing().past_caches();
    channel.sharing().timed([&] {
      for (std::size_t at = mine; at < mine + length; at += kBlockBytes) {
        const std::size_t m = std::min(kBlockBytes, mine + length - at);
        partials[rank] = in + at;
        partials[1 - rank] = out + at;
        sum_partials(out + at, partials, dtype, 0, m / element, plain);
        copy(peers_out + at, out + at, m, stream);
      }
    });
    channel.count_read(n);  // the partial of one half and the sum of the other
  }
  channel.publish(Phase::kResult);
  channel.wait(peer, Phase::kResult);
}

}  // namespace tpkernels::host
