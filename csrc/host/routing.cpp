#include "host/routing.h"

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace tpkernels::host {
namespace {

[[noreturn]] void refuse(std::size_t token, std::size_t slot, long long expert, std::size_t count,
                         const std::vector<std::size_t>& tokens) {
  std::size_t rank = 0;
  for (; token >= tokens[rank]; ++rank) token -= tokens[rank];
  throw std::invalid_argument("topk_ids of rank " + std::to_string(rank) + " contains expert " +
                              std::to_string(expert) + " at [" + std::to_string(token) + ", " +
                              std::to_string(slot) + "], which is out of range; expected 0 to " +
                              std::to_string(count - 1));
}

}  // namespace

Routing::Routing(const void* topk_ids, bool int64_ids, std::size_t k,
                 std::vector<std::size_t> tokens, const std::vector<std::size_t>& experts_per_rank)
    : k(k), tokens(std::move(tokens)), rows(experts_per_rank.size()) {
  std::vector<int> rank_of_expert;
  for (std::size_t r = 0; r < experts_per_rank.size(); ++r) {
    rank_of_expert.insert(rank_of_expert.end(), experts_per_rank[r], static_cast<int>(r));
  }
  counts.resize(rank_of_expert.size());
  const std::size_t assignments = first_token(static_cast<int>(this->tokens.size())) * k;
  expert_rank.resize(assignments);
  expert_row.resize(assignments);
  const auto get_expert = [&](std::size_t assignment) {
    const long long expert = int64_ids ? static_cast<const std::int64_t*>(topk_ids)[assignment]
                                       : static_cast<const std::int32_t*>(topk_ids)[assignment];
    if (expert < 0 || static_cast<std::size_t>(expert) >= counts.size()) {
      refuse(assignment / k, assignment % k, expert, counts.size(), this->tokens);
    }
    return static_cast<std::size_t>(expert);
  };
  for (std::size_t i = 0; i < assignments; ++i) ++counts[get_expert(i)];
  std::vector<std::size_t> next(counts.size());  // next row of each expert
  for (std::size_t e = 0; e < counts.size(); ++e) {
    std::size_t& num_rows = rows[static_cast<std::size_t>(rank_of_expert[e])];
    next[e] = std::exchange(num_rows, num_rows + counts[e]);
  }
  for (std::size_t i = 0; i < assignments; ++i) {
    const std::size_t expert = get_expert(i);
    expert_rank[i] = rank_of_expert[expert];
    expert_row[i] = next[expert]++;
  }
}

std::size_t Routing::first_token(int owner) const {
  return std::accumulate(tokens.begin(), tokens.begin() + owner, std::size_t{0});
}

}  // namespace tpkernels::host
