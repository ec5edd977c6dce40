#include "host/sum_tree.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tpkernels::host {
namespace {

struct Node {
  std::size_t level, index;
  bool is_right() const { return index % 2 != 0; }
};

// Adds the left siblings on top of the stack to `node`. Returns their number.
std::size_t merge(std::vector<Node>& stack, Node& node) {
  std::size_t merges = 0;
  while (node.is_right() && !stack.empty() && stack.back().level == node.level &&
         stack.back().index + 1 == node.index) {
    stack.pop_back();
    node = {node.level + 1, node.index / 2};
    ++merges;
  }
  return merges;
}

// Fills `local` with the steps for units [begin, end) of `total`. Returns the resulting nodes.
std::vector<Node> plan_local_sums(std::size_t begin, std::size_t end, std::size_t total,
                                  LocalSums& local) {
  std::vector<Node> stack, results;
  for (std::size_t unit = begin; unit < end; ++unit) {
    Node node{0, unit};
    SumStep step{stack.size(), merge(stack, node), -1};
    const bool is_root = begin == 0 && unit + 1 == total;
    if (is_root) {
      step.merges += stack.size();
      stack.clear();
    }
    if (is_root || node.is_right()) {  // a lower rank holds the left sibling
      step.node = static_cast<int>(results.size());
      results.push_back(node);
    } else {
      stack.push_back(node);
    }
    local.steps.push_back(step);
  }
  local.remaining = stack.size();
  results.insert(results.end(), stack.begin(), stack.end());
  local.nodes = results.size();
  return results;
}

}  // namespace

SumTree::SumTree(const std::vector<std::size_t>& sizes, std::size_t unit, std::size_t rank) {
  std::size_t k = 0;
  for (const std::size_t size : sizes) {
    if (unit == 0 || (size != 0 && k % unit != 0)) {
      throw std::invalid_argument("the slices of K must end at multiples of " +
                                  std::to_string(unit) + ", not at " + std::to_string(k));
    }
    k += size;
  }
  if (k == 0 || rank >= sizes.size())
    throw std::invalid_argument("K is " + std::to_string(k) + " on " +
                                std::to_string(sizes.size()) + " ranks, and the rank is " +
                                std::to_string(rank));
  const std::size_t total = (k + unit - 1) / unit;
  std::vector<Node> stack;
  std::size_t begin = 0;
  for (std::size_t r = 0; r < sizes.size(); ++r) {
    const std::size_t end = begin + (sizes[r] + unit - 1) / unit;
    LocalSums local{unit, {}, 0, 0};
    for (Node node : plan_local_sums(begin, end, total, local)) {
      merges_.push_back(merge(stack, node));
      stack.push_back(node);
    }
    nodes_.push_back(local.nodes);
    if (r == rank) local_ = std::move(local);
    begin = end;
  }
  merges_.back() += stack.size() - 1;
}

std::size_t SumTree::max_nodes() const { return *std::max_element(nodes_.begin(), nodes_.end()); }

}  // namespace tpkernels::host
