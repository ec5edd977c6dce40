// A copy that takes as long as a link would: a model of NVLink on one GPU.
//
// Each block moves a share of its own at its share of the rate. A piece is loaded at once and
// stored no earlier than the link would have brought its last byte. Deadlines are absolute, so the
// steps of globaltimer (up to 1 us) add no drift. A block that finds no free SM starts, and ends,
// later.
#pragma once

#include "cuda/reduce.cuh"

namespace tpkernels::cuda {

constexpr u64 kPacedPiece = 64 << 10;  // bytes: 4 packs a thread

TPK_DEVICE void paced_copy_share(const PacedCopy& call) {
  const u64 begin = clock_ns() + call.latency_ns;
  const u64 pieces = (call.bytes + kPacedPiece - 1) / kPacedPiece;
  const u64 each = (pieces + blocks() - 1) / blocks();
  const u64 end = least((block() + 1) * each, pieces);
  u64 moved = 0;
  for (u64 piece = block() * each; piece < end; ++piece) {
    const u64 at = piece * kPacedPiece, bytes = least(kPacedPiece, call.bytes - at);
    moved += bytes;
    // `moved` bytes of this block's: the link brings blocks() times as many meanwhile.
    const u64 due = begin + static_cast<u64>(moved * (call.ns_per_byte * blocks()));
    if (thread() == 0) {
      while (static_cast<i64>(due - clock_ns()) > 0) pause();
    }
    sync_block();
    copy_block(address_of(call.dst) + at, address_of(call.src) + at, bytes);
  }
}

}  // namespace tpkernels::cuda
