// For negative controls: weakens the memory orderings of the file that is compiled with it. The
// result still computes the right values on x86, but a race detector must report it.
#pragma once

#include <atomic>

#if defined(WITHOUT_ACQUIRE)
#define memory_order_acquire memory_order_relaxed
#elif defined(WITHOUT_RELEASE)
#define memory_order_release memory_order_relaxed
#define memory_order_seq_cst memory_order_relaxed
#endif
