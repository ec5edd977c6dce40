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

Routing::Routing(const void* experts, bool wide, std::size_t k, std::vector<std::size_t> tokens,
                 const std::vector<std::size_t>& held)
    : k(k), tokens(std::move(tokens)), rows(held.size()) {
  std::vector<int> holder;  // of each expert
  for (std::size_t r = 0; r < held.size(); ++r) {
    holder.insert(holder.end(), held[r], static_cast<int>(r));
  }
  counts.resize(holder.size());
  const std::size_t routes = first_token(static_cast<int>(this->tokens.size())) * k;
  rank.resize(routes);
  row.resize(routes);
  const auto expert_of = [&](std::size_t route) {
    const long long expert = wide ? static_cast<const std::int64_t*>(experts)[route]
                                  : static_cast<const std::int32_t*>(experts)[route];
    if (expert < 0 || static_cast<std::size_t>(expert) >= counts.size()) {
      refuse(route / k, route % k, expert, counts.size(), this->tokens);
    }
    return static_cast<std::size_t>(expert);
  };
  for (std::size_t i = 0; i < routes; ++i) ++counts[expert_of(i)];
  std::vector<std::size_t> next(counts.size());  // row of each expert
  for (std::size_t e = 0; e < counts.size(); ++e) {
    std::size_t& taken = rows[static_cast<std::size_t>(holder[e])];
    next[e] = std::exchange(taken, taken + counts[e]);
  }
  for (std::size_t i = 0; i < routes; ++i) {
    const std::size_t expert = expert_of(i);
    rank[i] = holder[expert];
    row[i] = next[expert]++;
  }
}

std::size_t Routing::first_token(int of_rank) const {
  return std::accumulate(tokens.begin(), tokens.begin() + of_rank, std::size_t{0});
}

}  // namespace tpkernels::host
