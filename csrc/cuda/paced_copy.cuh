// A copy that takes as long as a link would: a model of NVLink on one GPU.
//
// The blocks take the pieces round-robin. A piece is copied no earlier than the link would have
// delivered its last byte. Deadlines are absolute, so neither the resolution of globaltimer (up to
// 1 us) nor the duration of each copy accumulates. A block that has to wait for a free SM starts,
// and ends, later. The waits are bounded by the length of the copy, which tpkernels/cuda/calls.py
// limits.
#pragma once

#include "cuda/reduce.cuh"

namespace tpkernels::cuda {

constexpr u64 kPacedPiece = 64 << 10;  // bytes: 4 packs per thread

TPK_DEVICE void paced_copy_pieces(const PacedCopy& call) {
  const u64 begin = clock_ns() + call.latency_ns;
  const u64 stride = blocks() * kPacedPiece;
  for (u64 at = block() * kPacedPiece; at < call.bytes; at += stride) {
    const u64 end = least(at + kPacedPiece, call.bytes);
    const u64 due = begin + static_cast<u64>(end * call.ns_per_byte);
    if (thread() == 0) {
      while (static_cast<i64>(due - clock_ns()) > 0) pause();
    }
    sync_block();
    copy_block(address_of(call.dst) + at, address_of(call.src) + at, end - at);
  }
}

}  // namespace tpkernels::cuda
