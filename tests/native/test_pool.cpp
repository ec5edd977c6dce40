// The pool: no block has two owners, and forks can go on. Its limit is in
// tests/local/test_memory.py.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "check.h"
#include "host/pool.h"

namespace tpkernels::test {
namespace {

using host::Pool;

constexpr std::size_t kMiB = std::size_t{1} << 20;

bool filled_with(const Pool::Block& block, int value) {
  const auto expected = static_cast<std::byte>(value);
  for (std::size_t i = 0; i < block->bytes(); i += 64) {
    if (block->data()[i] != expected) return false;
  }
  return block->data()[block->bytes() - 1] == expected;
}

void check_usage(const Pool& pool, std::size_t in_use, std::size_t idle) {
  const Pool::Usage usage = pool.usage();
  CHECK(usage.in_use == in_use && usage.idle == idle,
        std::to_string(usage.in_use) + " in use, " + std::to_string(usage.idle) + " idle");
}

}  // namespace

TEST_CASE(no_memory_is_no_block, kThreads) {
  Pool pool;
  pool.set_limit(std::size_t{1} << 62);
  pool.give_back(*pool.take(4 * kMiB));
  check_usage(pool, 0, 4 * kMiB);
  CHECK(!pool.take(std::size_t{1} << 60));
  check_usage(pool, 0, 0);  // the kernel got the idle block back
}

TEST_CASE(threads_share_a_pool, kThreads) {
  Pool pool;
  pool.set_limit(2 * kMiB);
  std::mutex mutex;
  std::deque<std::pair<Pool::Block, int>> handed_over;  // one thread fills, another gives back
  std::atomic<int> failures{0};
  const auto check_and_return = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    if (handed_over.empty()) return false;
    const auto [block, value] = handed_over.front();
    handed_over.pop_front();
    lock.unlock();
    if (!filled_with(block, value)) ++failures;
    pool.give_back(block);
    const Pool::Usage usage = pool.usage();
    if (usage.idle > usage.limit) ++failures;
    return true;
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int call = 0; call < options().calls; ++call) {
        const int value = (thread * 61 + call) % 251 + 1;
        const auto block =
            *pool.take((std::size_t{256} << 10) * static_cast<unsigned>(1 + call % 5));
        std::memset(block->data(), value, block->bytes());
        {
          const std::lock_guard<std::mutex> lock(mutex);
          handed_over.emplace_back(block, value);
        }
        if (call % 3 != 0) check_and_return();
      }
      while (check_and_return()) continue;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0, std::to_string(failures));
  CHECK(pool.usage().in_use == 0);
}

// Forks at any moment find the lock free and the lists whole.
TEST_CASE(a_fork_can_use_the_pool, kFork) {
  Pool& pool = host::result_pool();
  pool.set_limit(16 * kMiB);
  const auto ours = *pool.take(4 * kMiB);
  std::memset(ours->data(), 1, ours->bytes());
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&] {
      while (!done) pool.give_back(*pool.take(1 * kMiB));
    });
  }
  std::string failure;
  for (int i = 0; i < 50 && failure.empty(); ++i) {
    const int pid = static_cast<int>(fork());
    if (pid == 0) {
      alarm(20);  // ends a child that waits for a lock
      if (pool.usage().idle != 0 || !filled_with(ours, 1)) _exit(1);
      std::memset(ours->data(), 2, ours->bytes());
      pool.give_back(ours);
      const auto again = pool.take(4 * kMiB);
      _exit(again && filled_with(*again, 2) ? 0 : 2);
    }
    int status = -1;
    if (waitpid(pid, &status, 0) != pid || status != 0) failure = std::to_string(status);
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(failure.empty(), "a child ended with wait status " + failure);
  CHECK(filled_with(ours, 1));
  pool.give_back(ours);
  pool.set_limit(0);
}

}  // namespace tpkernels::test
