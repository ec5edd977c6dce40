// Problem: fp32 sums over K depend on the order of the additions. A row-parallel GEMM adds the K
// slice of each rank first, so the result depends on the number of ranks.
//
// Algorithm: K is divided into units, and every rank holds complete units. The elements of a unit
// are summed in order. Node (level, i) of a binary tree is the sum of units [i << level, (i + 1) <<
// level), computed as left child + right child. The nodes that have no right sibling at the end of
// K are added from right to left. A rank sends the largest nodes that consist of its units, in
// fp32: one node if all ranks hold the same power of 2 of units, otherwise at most about 2 log2 of
// its units. Every rank then computes the remaining nodes.
//
// Invariant (bitwise reproducible): the number of units alone determines all additions. The split
// of the units over the ranks has no influence.
//
// A stack machine runs the additions. Each step adds nodes from the top of the stack to a new node,
// and pushes the sum or emits it as a result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tpkernels::host {

// Adds one unit of the local slice of K.
struct SumStep {
  std::size_t depth;   // stack size before the step
  std::size_t merges;  // nodes to add, from the top of the stack
  int node;            // index of the emitted result, or -1: push the sum
};

// The additions within the local slice of K. After the last step, the nodes on the stack are the
// last results, from the bottom to the top.
struct LocalSums {
  std::size_t unit = 0;  // elements of K
  std::vector<SumStep> steps;
  std::size_t nodes = 0;      // number of results
  std::size_t remaining = 0;  // stack size after the last step
};

class SumTree {
 public:
  // `sizes`: elements of K of each rank. They are multiples of `unit`, except for the last nonzero
  // size. Throws std::invalid_argument otherwise.
  SumTree(const std::vector<std::size_t>& sizes, std::size_t unit, std::size_t rank);

  const LocalSums& local() const { return local_; }
  // Number of nodes that a rank sends.
  std::size_t nodes(std::size_t rank) const { return nodes_[rank]; }
  std::size_t max_nodes() const;
  // For each node of all ranks, in order: the number of nodes to add from the top of the stack.
  const std::vector<std::size_t>& merges() const { return merges_; }

 private:
  LocalSums local_;
  std::vector<std::size_t> nodes_, merges_;
};

}  // namespace tpkernels::host
