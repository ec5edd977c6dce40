// Negative control: weakens the memory orderings of the file that is compiled with this header. The
// results are still correct on x86, but a race detector must report the races.
#pragma once

#include <atomic>

#if defined(WITHOUT_ACQUIRE)
#define memory_order_acquire memory_order_relaxed
#elif defined(WITHOUT_RELEASE)
#define memory_order_release memory_order_relaxed
#define memory_order_seq_cst memory_order_relaxed
#endif
