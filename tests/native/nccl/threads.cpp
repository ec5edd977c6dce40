// Threads that concurrently call, check and abort one communicator, over the libnccl of
// fake_nccl.cpp. Exits with 1 if the library was misused: called with a freed communicator, or with
// one on which another call was in progress.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "nccl/communicator.h"

using namespace tpkernels::nccl;

namespace {

constexpr int kRounds = 100, kCalls = 20;

void all_reduce(Communicator& communicator) {
  float x[8] = {};
  communicator.enqueue({{OperationKind::kAllReduce, x, x, 8, tpkernels::host::DType::kF32, 0, {}}});
}

}  // namespace

int main(int, char** argv) {
  void* fake = dlopen(argv[1], RTLD_NOW);
  if (fake == nullptr) return 2;
  reinterpret_cast<void (*)(int)>(dlsym(fake, "fake_progress"))(3);
  // Leaves time for an abort to interfere, if that were possible.
  reinterpret_cast<void (*)(double)>(dlsym(fake, "fake_poll_delay"))(20e-6);
  const auto library = std::make_shared<const Library>(argv[1]);
  std::atomic<int> ended_by_abort{0};
  for (int round = 0; round < kRounds; ++round) {
    Communicator communicator(library, library->unique_id(), 0, 1, "threads", 30.0);
    const auto run = [&](auto&& step) {
      return std::thread([&ended_by_abort, step] {
        try {
          for (int i = 0; i < kCalls; ++i) step(i);
        } catch (const Error& error) {
          if (std::string(error.type) == "GroupBrokenError") ++ended_by_abort;
        }
      });
    };
    std::vector<std::thread> threads;
    threads.push_back(run([&](int) { all_reduce(communicator); }));
    threads.push_back(run([&](int) { all_reduce(communicator); }));
    threads.push_back(run([&](int i) {
      communicator.check();
      if (i == kCalls - 1 && round % 2 == 1) communicator.abort("a test");
    }));
    for (std::thread& thread : threads) thread.join();
    if (round % 4 == 0) communicator.close();
  }
  const int misuse = reinterpret_cast<int (*)()>(dlsym(fake, "fake_misuse"))();
  const int alive = reinterpret_cast<int (*)()>(dlsym(fake, "fake_alive"))();
  std::printf("%d calls ended by abort, misuse %d, alive %d\n", ended_by_abort.load(), misuse,
              alive);
  return misuse != 0 || alive != 0 || ended_by_abort == 0 ? 1 : 0;
}
