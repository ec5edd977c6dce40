// Runs ranks as threads of one process, each with separate memory. For sanitized programs that
// include the kernels.
#pragma once

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

struct Switches {
  bool single_buffer = false;
  bool skip_waits = false;
};

// The region of a rank, with two buffers from `buffers_offset` on, and its state.
template <u64 buffers_offset, u64 buffer_bytes>
struct Memory {
  std::vector<u64> region = std::vector<u64>((buffers_offset + 2 * buffer_bytes) / 8 + 16);
  std::vector<u64> state = std::vector<u64>(kStateFlags + 1);
  u64 control[2] = {};
  int wrong = 0;

  u64 begin() const { return (reinterpret_cast<u64>(region.data()) + 127) / 128 * 128; }

  Workspace workspace(int rank, const std::vector<u64>& regions, int signals,
                      const Switches& switches) {
    return {regions.data(),
            state.data(),
            control,
            rank,
            static_cast<int>(regions.size()),
            7,
            signals,
            5'000'000'000,
            buffers_offset,
            switches.single_buffer ? 0 : buffer_bytes,
            static_cast<u64>(rank),
            2 * 200'000ull + (switches.skip_waits ? 1 : 0)};
  }
};

// Calls run(rank, ranks, regions, switches) in a thread per rank. Returns the exit code.
template <class Rank, class Run>
int run_ranks(int argc, char** argv, std::vector<Rank>& ranks, int calls, const Run& run) {
  Switches switches;
  for (int i = 1; i < argc; ++i) {
    switches.single_buffer |= std::string(argv[i]) == "--single-buffer";
    switches.skip_waits |= std::string(argv[i]) == "--skip-waits";
  }
  std::vector<u64> regions;
  for (const Rank& rank : ranks) regions.push_back(rank.begin());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { run(static_cast<int>(r), ranks, regions, switches); });
  }
  for (std::thread& thread : threads) thread.join();
  int wrong = 0;
  for (const Rank& rank : ranks) wrong += rank.wrong;
  std::printf("%d calls, %d wrong\n", calls, wrong);
  return wrong == 0 ? 0 : 1;
}
