// Problem: tokens go to the experts that a router chose for them, which several ranks hold, and
// what the experts make of them comes back.
//
// Algorithm: every rank knows the routes of all tokens, from a small all-gather. A route is one of
// a token's k choices: (token, slot) -> expert. Each rank holds a block of consecutive experts and
// has a row for each route to them: by expert, and within one by token and slot. So every rank can
// tell where each row of every rank comes from and goes to, and no counts travel.
#pragma once

#include <cstddef>
#include <vector>

namespace tpkernels::host {

struct Routing {
  // `experts` has the expert of each route, [tokens, k], of int32 or (`wide`) int64: of the tokens
  // of all ranks, in rank order. The ranks have `tokens[r]` tokens and `held[r]` experts. Throws
  // std::invalid_argument for an expert that there is not.
  Routing(const void* experts, bool wide, std::size_t k, std::vector<std::size_t> tokens,
          const std::vector<std::size_t>& held);

  std::size_t first_token(int of_rank) const;

  std::size_t k;
  std::vector<std::size_t> tokens;  // of each rank
  std::vector<std::size_t> counts;  // rows of each expert
  std::vector<std::size_t> rows;    // of each rank
  std::vector<int> rank;            // that has the expert of each route
  std::vector<std::size_t> row;     // of each route, among that rank's
};

}  // namespace tpkernels::host
