// Memory for results that two ranks map (csrc/host/shared_results.h), in the pool.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "check.h"
#include "host/arena.h"
#include "host/pool.h"
#include "host/shared_results.h"
#include "pool_checks.h"

namespace tpkernels::test {
namespace {

using host::Pool;

// A region for each of two ranks, and the memory of rank 1 in it.
std::shared_ptr<host::SharedResults> make_results(std::size_t bytes,
                                                  std::uint32_t private_calls = 0) {
  const int memory = host::Arena::create(bytes, 2);
  auto arena = std::make_shared<host::Arena>(memory, bytes, 2);
  close(memory);
  return std::make_shared<host::SharedResults>(std::move(arena), 1, private_calls);
}

}  // namespace

TEST_CASE(shared_blocks_return_to_their_owner, kThreads) {
  const auto results = make_results(16 * kMiB), others = make_results(16 * kMiB);
  Pool pool;
  pool.set_limit(12 * kMiB);
  const auto first = *pool.take(4 * kMiB, results), second = *pool.take(8 * kMiB, results);
  const auto end = *pool.take(4 * kMiB, results);
  CHECK(!pool.take(4 * kMiB, results));  // the region is full
  CHECK(results->offset_of(second->data(), 8 * kMiB) == 4 * kMiB);
  CHECK(!results->offset_of(second->data(), 12 * kMiB + 1) && !others->offset_of(first->data(), 1));
  CHECK(results->at(1, 12 * kMiB, 4 * kMiB) == end->data() &&
        !results->at(1, 12 * kMiB + 1, 4 * kMiB));
  std::byte* const kept = first->data();
  std::memset(kept, 1, 12 * kMiB);
  pool.give_back(first);
  const auto private_one = *pool.take(4 * kMiB), foreign = *pool.take(4 * kMiB, others);
  CHECK(!results->offset_of(private_one->data(), 1) && !results->offset_of(foreign->data(), 1));
  const auto again = *pool.take(4 * kMiB, results);
  CHECK(again->data() == kept);
  pool.give_back(again);
  pool.give_back(second);
  check_usage(pool, 12 * kMiB, 12 * kMiB);
  CHECK(!pool.take(12 * kMiB, results));  // idle blocks of other sizes stay
  pool.set_limit(0);
  pool.set_limit(12 * kMiB);
  const auto merged = *pool.take(12 * kMiB, results);
  CHECK(merged->data() == kept && filled_with(merged, 0));
  check_usage(pool, 24 * kMiB, 0);
  for (const auto& block : {end, private_one, foreign, merged}) pool.give_back(block);
  pool.set_limit(0);
}

// What a stopped peer may still write to is neither handed out again nor given to the kernel.
TEST_CASE(retired_memory_is_not_reused, kThreads) {
  auto results = make_results(16 * kMiB);
  Pool pool;
  pool.set_limit(64 * kMiB);
  const auto idle = *pool.take(4 * kMiB, results), in_call = *pool.take(4 * kMiB, results);
  std::byte* const data = in_call->data();
  std::memset(data, 3, 4 * kMiB);
  pool.give_back(idle);
  pool.close(*results, true);
  check_usage(pool, 4 * kMiB, 0);
  pool.give_back(in_call);
  check_usage(pool, 0, 0);
  CHECK(!pool.take(4 * kMiB, results) && !results->take(4096));
  CHECK(data[0] == std::byte{3} && data[4 * kMiB - 1] == std::byte{3});
  CHECK(results.use_count() == 1);
}

TEST_CASE(memory_of_a_closed_region_goes_back, kThreads) {
  auto results = make_results(16 * kMiB);
  Pool pool;
  pool.set_limit(64 * kMiB);
  const auto in_use = *pool.take(4 * kMiB, results);
  std::byte* const data = in_use->data();
  std::memset(data, 3, 4 * kMiB);
  pool.close(*results, false);
  CHECK(!pool.take(4 * kMiB, results) && filled_with(in_use, 3));
  pool.give_back(in_use);
  CHECK(data[0] == std::byte{0} && data[4 * kMiB - 1] == std::byte{0});
}

// New pages cost more than a few calls gain.
TEST_CASE(a_size_gets_shared_memory_when_it_is_usual, kThreads) {
  auto results = make_results(16 * kMiB, 2);
  Pool pool;
  pool.set_limit(64 * kMiB);
  const auto refusals = [&](std::size_t bytes) {
    int count = 0;
    std::optional<Pool::Block> block;
    while (!(block = pool.take(bytes, results))) ++count;
    pool.give_back(*block);
    return count;
  };
  CHECK(refusals(4 * kMiB) == 2 && refusals(8 * kMiB) == 2 && refusals(4 * kMiB) == 0);
  pool.set_limit(4 * kMiB);  // the idle blocks are too many
  pool.set_limit(64 * kMiB);
  CHECK(refusals(8 * kMiB) == 4 && refusals(2 * kMiB) == 4 && refusals(8 * kMiB) == 0);
}

// The child has the results as they were at the fork, whatever the parent does with the memory.
TEST_CASE(a_fork_keeps_shared_results, kFork) {
  auto results = make_results(16 * kMiB);
  Pool& pool = host::result_pool();
  pool.set_limit(16 * kMiB);
  const auto kept = *pool.take(4 * kMiB, results), idle = *pool.take(4 * kMiB, results);
  std::memset(kept->data(), 1, 4 * kMiB);
  std::memset(idle->data(), 5, 4 * kMiB);
  pool.give_back(idle);
  int ready[2], status = -1;
  CHECK(pipe(ready) == 0);
  const int pid = static_cast<int>(fork());
  if (pid == 0) {
    char byte;
    alarm(20);
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 0 || !filled_with(kept, 1)) _exit(1);
    std::memset(kept->data(), 4, 4 * kMiB);
    if (pool.take(4 * kMiB, results)) _exit(2);
    results.reset();  // the copy does not go with the arena
    if (!filled_with(kept, 4)) _exit(3);
    pool.give_back(kept);
    const auto again = pool.take(4 * kMiB);
    _exit(again && filled_with(*again, 4) ? 0 : 4);
  }
  std::memset(kept->data(), 2, 4 * kMiB);
  close(ready[1]);
  CHECK(waitpid(pid, &status, 0) == pid && status == 0, std::to_string(status));
  CHECK(filled_with(kept, 2));
  const auto again = *pool.take(4 * kMiB, results);
  CHECK(filled_with(again, 5));  // the child has given it to nobody
  pool.give_back(again);
  pool.give_back(kept);
  pool.set_limit(0);
  close(ready[0]);
}

}  // namespace tpkernels::test
