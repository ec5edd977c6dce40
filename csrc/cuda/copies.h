// Peer copies by the copy engines, ordered by signals.
//
// Problem: chunks are to come from peers while the SMs multiply, in eager calls and in replayed
// graphs.
//
// Algorithm: a call of several launches. `Kernels::begin`; each rank lays its chunks into its own
// region (`copy`) and publishes a word per chunk; the others fetch them, on any streams that are
// forked from the call's and joined to it; `Kernels::end`.
//
// Sync: cuda/sync.cuh. Words are written and waited for by kernels of one block, not by
// cuStreamWriteValue64 and cuStreamWaitValue64. Those take their value from the host, which a
// replayed graph cannot change while its epoch advances in device memory; the wait knows no
// deadline, so a lost peer would hang the stream; and the write would tell of data after a failed
// wait. A wait on a stream ends at its deadline, then the copy behind it runs all the same: copies
// pull, so what it brings lands in this rank's memory alone, and the failure is on record.
#pragma once

#include "cuda/kernels.h"

namespace tpkernels::cuda {

// By a copy engine, or by the driver's choice within one device. Both addresses are of devices that
// can access each other.
void copy(const Kernels& kernels, Stream stream, Address dst, Address src, std::size_t bytes);

// When the word has come, or the wait has failed.
void fetch(Kernels& kernels, Stream stream, const Space& space, const Signal& signal, Address dst,
           Address src, std::size_t bytes);

}  // namespace tpkernels::cuda
