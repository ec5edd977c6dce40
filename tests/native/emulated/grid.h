// Runs a grid of blocks on CPU threads. Blocks start in increasing order and few run at a time, as
// on a busy GPU. A kernel that needs more concurrent blocks hangs here.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emulated {

// Counts of the operations that one thread executed sequentially in a kernel.
struct Counts {
  int barriers = 0;  // barriers of the block or cluster
  int releases = 0;  // releases at system scope; each waits for the preceding stores
  int atomics = 0;   // atomics at GPU scope that also order memory
};

// Visibility of stores of two words. The last two are negative controls.
enum class Tearing {
  kBetweenWords,    // as PTX allows: either word may become visible first
  kOneFlagPerLine,  // only the flag of the first word is checked, as if lines were never torn
  kTornWords,       // each word is stored in two halves, the epoch first
};
inline Tearing tearing = Tearing::kBetweenWords;

// Injected faults of one kernel on one rank, for tests of `tpkernels qualify`.
enum class Fault {
  kNone,
  kMissingFence,  // stores of packs become visible after their signals
  kLostWakeUp,    // signals are not stored
};
inline Fault fault = Fault::kNone;
// A store that is not visible yet.
struct PendingStore {
  void* dst;
  unsigned word[4];
};
inline thread_local std::vector<PendingStore> pending_stores;
inline void complete_pending_stores() {
  for (const PendingStore& store : pending_stores)
    std::memcpy(store.dst, store.word, sizeof(store.word));
  pending_stores.clear();
}

// Negative control: a cluster barrier synchronizes only one block.
inline bool loose = false;

// The kernel queued before an early launch. Its results become visible only while the launched
// kernel runs.
struct Previous {
  std::vector<char> results;
  char* dst = nullptr;
  std::atomic<bool> ended{true};
  bool awaited = true;  // false: negative control, the launched kernel does not wait
};
inline Previous previous;

struct Grid {
  int blocks;
  int threads;                   // per block
  Counts* max_counts = nullptr;  // maximum over all threads; null: not recorded
  int cluster = 1;               // blocks per cluster, which run concurrently
};

// Barrier of the threads of a block. Returns whether any thread passed true.
class BlockBarrier {
 public:
  explicit BlockBarrier(int size) : size_(size) {}

  bool arrive_and_wait(bool value) {
    std::unique_lock lock(mutex_);
    any_ = any_ || value;
    const unsigned generation = generation_;
    if (++arrived_ == size_) {
      result_ = any_;
      any_ = false;
      arrived_ = 0;
      ++generation_;
      all_.notify_all();
      return result_;
    }
    all_.wait(lock, [&] { return generation_ != generation; });
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int size_, arrived_ = 0;
  unsigned generation_ = 0;
  bool any_ = false, result_ = false;
};

constexpr int kScratchFloats = 1120;

// State shared by the threads of a block.
struct Block {
  explicit Block(int threads) : barrier(threads) {}
  BlockBarrier barrier;
  alignas(16) float scratch[kScratchFloats] = {};
};

struct Cluster {
  explicit Cluster(const Grid& grid) : barrier(grid.cluster * grid.threads) {
    for (int b = 0; b < grid.cluster; ++b) blocks.push_back(std::make_unique<Block>(grid.threads));
  }
  BlockBarrier barrier;
  std::vector<std::unique_ptr<Block>> blocks;
  int number = 0;  // index of the cluster in the grid
};

struct ThreadState {
  const Grid* grid = nullptr;
  Cluster* cluster = nullptr;
  BlockBarrier* barrier = nullptr;
  int block = 0;
  int thread = 0;
  Counts counts = {};
};
inline thread_local ThreadState current_thread;

// Requires a lock: one thread of the grid at a time.
inline void update_max(Counts& max_counts, const Counts& counts) {
  max_counts.barriers = std::max(max_counts.barriers, counts.barriers);
  max_counts.releases = std::max(max_counts.releases, counts.releases);
  max_counts.atomics = std::max(max_counts.atomics, counts.atomics);
}

// Runs a kernel with at most `max_blocks` concurrent blocks, but at least one cluster.
inline void run(const Grid& grid, int max_blocks, const std::function<void()>& kernel) {
  std::atomic<int> next{0};
  std::mutex counts_mutex;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::thread> threads;
  const auto run_thread = [&](Cluster* cluster, int block, int thread) {
    for (;;) {
      if (block == 0 && thread == 0) cluster->number = next.fetch_add(1);
      cluster->barrier.arrive_and_wait(false);
      const int number = cluster->number * grid.cluster + block;
      if (number >= grid.blocks) return;
      Block& local_block = *cluster->blocks[block];
      current_thread = {&grid, cluster, &local_block.barrier, number, thread};
      kernel();
      complete_pending_stores();
      if (grid.max_counts != nullptr) {
        const std::lock_guard lock(counts_mutex);
        update_max(*grid.max_counts, current_thread.counts);
      }
      cluster->barrier.arrive_and_wait(false);
    }
  };
  for (int i = 0; i < std::max(1, max_blocks / grid.cluster); ++i) {
    clusters.push_back(std::make_unique<Cluster>(grid));
    for (int block = 0; block < grid.cluster; ++block) {
      for (int thread = 0; thread < grid.threads; ++thread) {
        threads.emplace_back(run_thread, clusters.back().get(), block, thread);
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace emulated
