// Causal attention. Online softmax over blocks of 64 keys, which are counted from the first key of
// the sequence.
//
// Invariant (bitwise reproducible): the result of a query and head depends only on that query, the
// keys and values that it sees, their positions in the sequence, and the options. The batch,
// padding, chunks of a prefill, number of threads, strides and vector unit have no influence. This
// holds for finite inputs. Hidden keys and values may contain anything.
//
// Summation order of a row:
//   1. A score is one chain of fused multiply-adds over head_dim, in fp32. It is multiplied by
//      scale * log2(e), because the softmax uses powers of 2.
//   2. A block with a new maximum multiplies the earlier sums by 2^(old - new).
//   3. Weights stay fp32. A sum of values is one chain of fused multiply-adds in the order of the
//      keys. Weight i is added to sum i % 16, and the 16 sums are added pairwise at the end.
//   4. A sink adds its weight to the sum of weights after the last block. The result is divided
//      once and rounded once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpkernels::host {

// Queries [first_query, first_query + queries) of a batch entry. Query i sees the keys from
// first_key to own_key + i. These are indices into k. `skipped` keys of the sequence precede
// first_key and are not in k: its sliding window has passed them.
struct Sequence {
  std::int64_t batch, first_query, queries, first_key, own_key, skipped;
};

// A tensor [batch, head, row, element] with contiguous elements.
struct Heads {
  std::byte* data;
  std::size_t pitches[3];  // bytes from one batch entry, head and row to the next

  std::byte* row(std::size_t batch, std::size_t head, std::size_t row) const {
    return data + batch * pitches[0] + head * pitches[1] + row * pitches[2];
  }
};

struct Attention {
  Heads q, k, v, out;
  std::size_t heads = 0, kv_heads = 0;  // query heads [i * heads / kv_heads, ...) share kv head i
  std::size_t head_dim = 0, value_dim = 0;
  std::int64_t window = 0;  // maximum keys that a query sees, including its own; 0: no limit
  float scale = 1;
  float cap = 0;                 // a score becomes cap * tanh(score / cap); 0: no cap
  const float* sinks = nullptr;  // a logit per query head without a value; or null
  std::size_t kv_bytes = 0;      // bytes of all keys and values that the queries see

  static constexpr std::size_t kMaxRows = 192;  // rows per call
};

// Computes rows [first_row, first_row + rows) of a kv head of a sequence. Row r is query r / group
// and head r % group of the kv head, where group = heads / kv_heads. Rows that see no key are 0.
using AttentionFn = void (*)(const Attention& attention, const Sequence& sequence,
                             std::size_t kv_head, std::size_t first_row, std::size_t rows);

}  // namespace tpkernels::host
