// All-reduce of two ranks that write the sum into each other's results.
#pragma once

#include <cstddef>

#include "host/collectives.h"
#include "host/shared_results.h"

namespace tpkernels::host {

// One epoch, in which the ranks show each other where their results of `bytes` lie in `results`;
// null: this one's does not. Returns where the peer's is, or null if either is null.
std::byte* exchange_results(Channel& channel, const CallId& call, const SharedResults& results,
                            const std::byte* out, std::size_t bytes);

// in, out: `count` elements of one dtype, which do not overlap; `peers_out`: of `exchange_results`.
void all_reduce_written(Channel& channel, const CallId& call, const std::byte* in, std::byte* out,
                        std::byte* peers_out, std::size_t count, DType dtype);

}  // namespace tpkernels::host
