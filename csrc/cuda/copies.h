// Peer copies by the copy engines, ordered by signals.
//
// Problem: fetch chunks from peers while the SMs run a matmul, in eager calls and replayed graphs.
//
// Algorithm: a call of several launches. It opens with `Kernels::begin`. Each rank copies its
// chunks into its own region (`copy`) and publishes words for them. The peers wait for the words
// (`Kernels::wait`) and copy, on any streams forked from the call's stream and joined back to it.
// The call closes with `Kernels::end`.
//
// Sync: cuda/sync.cuh. Kernels of one block write and await the words of peers, not
// cuStreamWriteValue64 and cuStreamWaitValue64, for three reasons. Their values come from the host
// and are fixed in a captured graph, but the epoch advances in device memory with every replay.
// Their wait has no deadline, so a lost peer would hang the stream. And their write would announce
// data to a peer even after a failed wait. Waits here end at their deadline. The copy behind a
// failed wait still runs, which is harmless: copies pull, so it only writes to this rank's memory,
// and the failure is on record.
//
// None of the three holds for flags, which tell this rank's own kernels that a chunk has arrived:
// they are constant, awaited by kernels, and read by nobody whose results are not poisoned after a
// failed wait. So the stream writes them where it can, and takes no multiprocessor from the matmul.
// The write is fenced from the copy before it, "similar to __threadfence_system()" (cuda.h).
#pragma once

#include "cuda/kernels.h"

namespace tpkernels::cuda {

// Copies with a copy engine; within one device the driver chooses how. The devices of both
// addresses must have access to each other.
void copy(const Kernels& kernels, Stream stream, Address dst, Address src, std::size_t bytes);

// Raises a flag behind the stream's earlier work. By a kernel where the device cannot do otherwise,
// and in captures where the driver does not record the write. A call that fails may spoil the
// capture that it is made in, so nothing is tried there: the first write outside captures tries it
// in a capture of its own. NCCL too records such writes, for its collectives by copy engines.
void raise_flag(Kernels& kernels, Stream stream, const Space& space, int index, bool captured);

}  // namespace tpkernels::cuda
