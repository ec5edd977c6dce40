// Problem: MoE dispatch sends tokens to the ranks of their experts. Combine returns the expert
// outputs.
//
// Algorithm: a small all-gather provides the expert ids of all tokens to every rank. An assignment
// is one of the k choices of a token: (token, slot) -> expert. Each rank holds a block of
// consecutive experts. It has one row per assignment to them, sorted by expert, then by token and
// slot. So every rank computes the source and the destination of all rows, without an exchange of
// counts.
#pragma once

#include <cstddef>
#include <vector>

namespace tpkernels::host {

struct Routing {
  // topk_ids: [sum(tokens), k] expert ids of the tokens of all ranks in rank order; int32, or int64
  // if `int64_ids`. Rank r has `tokens[r]` tokens and `experts_per_rank[r]` experts. Throws
  // std::invalid_argument if an expert id is out of range.
  Routing(const void* topk_ids, bool int64_ids, std::size_t k, std::vector<std::size_t> tokens,
          const std::vector<std::size_t>& experts_per_rank);

  // Index of the first token of rank `owner`.
  std::size_t first_token(int owner) const;

  std::size_t k;
  std::vector<std::size_t> tokens;      // tokens per rank
  std::vector<std::size_t> counts;      // rows per expert
  std::vector<std::size_t> rows;        // rows per rank
  std::vector<int> expert_rank;         // per assignment: rank that holds its expert
  std::vector<std::size_t> expert_row;  // per assignment: row on that rank
};

}  // namespace tpkernels::host
