// Takes orderings out of the file that it is included before, for negative controls: what remains
// computes the right values on x86, and a race detector must report it all the same.
#pragma once

#include <atomic>

#if defined(WITHOUT_ACQUIRE)
#define memory_order_acquire memory_order_relaxed
#elif defined(WITHOUT_RELEASE)
#define memory_order_release memory_order_relaxed
#define memory_order_seq_cst memory_order_relaxed
#endif
