// Runs a grid of blocks of threads on CPU threads. Blocks start in increasing order and few run at
// a time, as on a busy GPU. A kernel that needs more blocks to run concurrently hangs here.
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

// What a thread did one after the other in a kernel.
struct Counts {
  int barriers = 0;  // of its block
  int releases = 0;  // at system scope: each waits until the stores before it have arrived
  int atomics = 0;   // of the GPU, which order memory as well
};

// Negative controls of the stores of two words.
enum class Tearing {
  kBetweenWords,    // as to PTX: either word may be there first
  kOneFlagPerLine,  // the flag of the first word stands for both, as if a line were never torn
  kTornWords,       // a word is stored in halves, the epoch first
};
inline Tearing tearing = Tearing::kBetweenWords;

// Faults of one kernel on one rank, for tests of `tpkernels qualify`.
enum class Fault {
  kNone,
  kMissingFence,  // stores of packs arrive after the words that announce them
  kLostWakeUp,    // no word is announced
};
inline Fault fault = Fault::kNone;
// What a thread has stored that has not arrived.
struct Late {
  void* to;
  unsigned word[4];
};
inline thread_local std::vector<Late> late;
inline void store_late() {
  for (const Late& store : late) std::memcpy(store.to, store.word, sizeof(store.word));
  late.clear();
}

// Negative control of clusters: their barriers only hold a block's own threads.
inline bool loose = false;

// The kernel queued before an early launch: its results appear only while the early one runs.
struct Previous {
  std::vector<char> results;
  char* to = nullptr;
  std::atomic<bool> ended{true};
  bool awaited = true;  // negative control: nobody waits for it
};
inline Previous previous;

struct Grid {
  int blocks;
  int threads;             // per block
  Counts* most = nullptr;  // of any thread, if asked for
  int cluster = 1;         // blocks that run at the same time
};

// The barrier of a block's threads. It returns whether any thread passed true.
class BlockBarrier {
 public:
  explicit BlockBarrier(int size) : size_(size) {}

  bool arrive_and_wait(bool value) {
    std::unique_lock lock(mutex_);
    any_ = any_ || value;
    const unsigned turn = turn_;
    if (++arrived_ == size_) {
      result_ = any_;
      any_ = false;
      arrived_ = 0;
      ++turn_;
      all_.notify_all();
      return result_;
    }
    all_.wait(lock, [&] { return turn_ != turn; });
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int size_, arrived_ = 0;
  unsigned turn_ = 0;
  bool any_ = false, result_ = false;
};

constexpr int kScratchFloats = 1120;

// What the threads of a block share.
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
  int number = 0;  // of those of the grid
};

struct Here {
  const Grid* grid = nullptr;
  Cluster* cluster = nullptr;
  BlockBarrier* barrier = nullptr;
  int block = 0;
  int thread = 0;
  Counts counts = {};
};
inline thread_local Here here;

// For one thread of the grid at a time.
inline void take_most(Counts& most, const Counts& counts) {
  most.barriers = std::max(most.barriers, counts.barriers);
  most.releases = std::max(most.releases, counts.releases);
  most.atomics = std::max(most.atomics, counts.atomics);
}

// Runs a kernel, at most `at_once` blocks at a time, but a whole cluster.
inline void run(const Grid& grid, int at_once, const std::function<void()>& kernel) {
  std::atomic<int> next{0};
  std::mutex counting;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::thread> all;
  const auto run_thread = [&](Cluster* cluster, int block, int thread) {
    for (;;) {
      if (block == 0 && thread == 0) cluster->number = next.fetch_add(1);
      cluster->barrier.arrive_and_wait(false);
      const int number = cluster->number * grid.cluster + block;
      if (number >= grid.blocks) return;
      Block& own = *cluster->blocks[block];
      here = {&grid, cluster, &own.barrier, number, thread};
      kernel();
      store_late();
      if (grid.most != nullptr) {
        const std::lock_guard lock(counting);
        take_most(*grid.most, here.counts);
      }
      cluster->barrier.arrive_and_wait(false);
    }
  };
  for (int i = 0; i < std::max(1, at_once / grid.cluster); ++i) {
    clusters.push_back(std::make_unique<Cluster>(grid));
    for (int block = 0; block < grid.cluster; ++block) {
      for (int thread = 0; thread < grid.threads; ++thread) {
        all.emplace_back(run_thread, clusters.back().get(), block, thread);
      }
    }
  }
  for (std::thread& one : all) one.join();
}

}  // namespace emulated
