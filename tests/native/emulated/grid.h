// A grid of blocks of threads, run by CPU threads. Blocks start in increasing order and few run at
// a time, as on a GPU that is full: a kernel that needs more of them to run together hangs here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emulated {

constexpr std::uint64_t kMulticast = 1ull << 60;

struct Grid {
  int blocks;
  int threads;  // of a block
  int world = 1;
  const unsigned long long* regions = nullptr;  // for multicast
};

// The threads of a block: they meet, and tell each other whether any came with true.
class Team {
 public:
  explicit Team(int size) : size_(size) {}

  bool meet(bool value) {
    std::unique_lock lock(mutex_);
    any_ = any_ || value;
    const unsigned turn = turn_;
    if (++come_ == size_) {
      result_ = any_;
      any_ = false;
      come_ = 0;
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
  int size_, come_ = 0;
  unsigned turn_ = 0;
  bool any_ = false, result_ = false;
};

struct Here {
  const Grid* grid = nullptr;
  Team* team = nullptr;
  int block = 0;
  int thread = 0;
};
inline thread_local Here here;

// Runs a kernel, at most `at_once` blocks at a time.
inline void run(const Grid& grid, int at_once, const std::function<void()>& kernel) {
  std::atomic<int> next{0};
  std::vector<std::unique_ptr<Team>> teams;
  std::vector<int> block_of(at_once);
  std::vector<std::thread> all;
  for (int lane = 0; lane < at_once; ++lane) {
    teams.push_back(std::make_unique<Team>(grid.threads));
    for (int thread = 0; thread < grid.threads; ++thread) {
      all.emplace_back([&, lane, thread, team = teams.back().get()] {
        for (;;) {
          if (thread == 0) block_of[lane] = next.fetch_add(1);
          team->meet(false);
          if (block_of[lane] >= grid.blocks) return;
          here = {&grid, team, block_of[lane], thread};
          kernel();
          team->meet(false);
        }
      });
    }
  }
  for (std::thread& one : all) one.join();
}

}  // namespace emulated
