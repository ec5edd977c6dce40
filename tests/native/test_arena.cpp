// The arena: sealed, private to its owner, and an error if memory runs out.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.h"

namespace tpkernels::test {
namespace {

using host::Arena;
using host::Channel;

template <class Error, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  check_failed("the call throws", __FILE__, __LINE__, "it succeeded");
}

}  // namespace

TEST_CASE(the_arena_is_sealed_and_private, kThreads) {
  const int fd = Arena::create(8192, 3);
  struct stat info{};
  CHECK(fstat(fd, &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK(info.st_size == 3 * 8192);
  CHECK(info.st_nlink == 0);
  CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  const int seals = fcntl(fd, F_GET_SEALS);
  CHECK((seals & F_SEAL_SHRINK) && (seals & F_SEAL_GROW) && (seals & F_SEAL_SEAL));
  CHECK(ftruncate(fd, 8192) != 0 && errno == EPERM);
  CHECK(ftruncate(fd, 1 << 20) != 0 && errno == EPERM);
  close(fd);
}

TEST_CASE(an_arena_that_is_not_sealed_is_refused, kThreads) {
  const int fd = host::open_memfd("unsealed");
  CHECK(ftruncate(fd, 8192) == 0);
  const std::string what = error_of<std::runtime_error>([&] { Arena(fd, 4096, 2); });
  CHECK(contains(what, "is not sealed"), what);
  close(fd);
}

// Uncommitted memory takes no space, and a commit stays within its region.
TEST_CASE(only_committed_parts_take_memory, kThreads) {
  const std::size_t region = std::size_t{4} << 20;
  const int fd = Arena::create(region, 2);
  Arena arena(fd, region, 2);
  const auto allocated = [&] {
    struct stat info{};
    CHECK(fstat(fd, &info) == 0);
    return static_cast<std::size_t>(info.st_blocks) * 512;
  };
  const std::size_t before = allocated();
  arena.commit(1, 0, 100);
  const std::size_t one = allocated();
  CHECK(one > before && one < 2 * region, std::to_string(one));
  arena.commit(1, 0, region);
  CHECK(allocated() >= region);
  std::memset(arena.region(1), 7, 100);
  arena.give_back(1, 100, region - 100);
  CHECK(allocated() <= one, std::to_string(allocated()));
  CHECK(arena.region(1)[0] == std::byte{7} && arena.region(1)[99] == std::byte{7});
  error_of<std::out_of_range>([&] { arena.give_back(1, 1, region); });
  error_of<std::out_of_range>([&] { arena.commit(1, 1, region); });
  error_of<std::out_of_range>([&] { arena.commit(2, 0, 1); });
  close(fd);
}

TEST_CASE(committed_parts_cover_the_buffers, kThreads) {
  for (const int world : {1, 3, 64}) {
    const std::size_t limit = std::size_t{1} << 20;
    const std::size_t bytes = Channel::region_bytes(world, limit);
    std::vector<char> committed(bytes, 0);
    std::size_t from = 0;
    for (const std::size_t to : {std::size_t{5000}, std::size_t{70000}, limit}) {
      for (const auto& [offset, size] : Channel::parts(world, bytes, from, to)) {
        CHECK(offset + size <= bytes);
        std::memset(committed.data() + offset, 1, size);
      }
      Setup setup;
      setup.world = world;
      setup.capacity = to;
      const auto channel = make_channel(setup, make_arena(world, bytes), 0);
      for (std::size_t i = 0; i < channel->buffer_offset(0) + to; ++i) CHECK(committed[i]);
      for (std::size_t i = 0; i < to; ++i) CHECK(committed[channel->buffer_offset(1) + i]);
      from = to;
    }
  }
}

TEST_CASE(regions_are_contiguous, kThreads) {
  const auto arena = make_arena(3, 8192);
  CHECK(arena->world() == 3 && arena->region_bytes() == 8192);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(arena->region(rank) == arena->region(0) + rank * 8192);
    for (int i = 0; i < 8192; ++i) CHECK(arena->region(rank)[i] == std::byte{0});
    std::memset(arena->region(rank), rank + 1, 8192);
  }
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(arena->region(rank)[0] == static_cast<std::byte>(rank + 1));
    CHECK(arena->region(rank)[8191] == static_cast<std::byte>(rank + 1));
  }
}

TEST_CASE(an_impossible_arena_is_an_error, kThreads) {
  CHECK(contains(error_of<std::runtime_error>([] { Arena::create(0, 2); }), "cannot size"));
  const std::size_t most = std::size_t{1} << 63;  // exceeds off_t
  CHECK(contains(error_of<std::runtime_error>([&] { Arena::create(most, 1); }), "cannot size"));
  const int fd = Arena::create(4096, 2);
  const std::string wrong = error_of<std::runtime_error>([&] { Arena(fd, 8192, 2); });
  CHECK(contains(wrong, "holds 8192 bytes, expected 16384"), wrong);
  error_of<std::runtime_error>([] { Arena(-1, 4096, 2); });
  close(fd);
}

// More memory than exists must be an error, not SIGBUS. Nothing is committed: the file gets its
// size, but the address space is too small to map it.
TEST_CASE(memory_that_cannot_be_mapped_is_an_error, kThreads) {
  const std::size_t huge = std::size_t{1} << 60;
  int fd = -1;
  try {
    fd = Arena::create(huge, 1);
  } catch (const std::runtime_error&) {
    return;  // the file system has a lower limit: also an error
  }
  const std::string what = error_of<std::runtime_error>([&] { Arena(fd, huge, 1); });
  CHECK(contains(what, "cannot map 1099511627776 MiB"), what);
  close(fd);
}

TEST_CASE(a_channel_with_the_wrong_number_of_ranks_is_refused, kThreads) {
  const auto arena = make_arena(2, Channel::region_bytes(2, 4096));
  const std::vector<int> two(2, -1), three(3, -1);
  error_of<std::invalid_argument>([&] { Channel(arena, 2, two, two, {}, 4096, 0); });
  error_of<std::invalid_argument>([&] { Channel(arena, -1, two, two, {}, 4096, 0); });
  error_of<std::invalid_argument>([&] { Channel(arena, 0, three, two, {}, 4096, 0); });
  error_of<std::invalid_argument>([&] { Channel(arena, 0, two, three, {}, 4096, 0); });
  error_of<std::invalid_argument>([&] { Channel(arena, 0, two, two, {}, 4097, 0); });
}

TEST_CASE(buffers_do_not_overlap, kThreads) {
  for (const int world : {1, 2, 7, 64}) {
    for (const std::size_t capacity : {std::size_t{1}, std::size_t{4096}, std::size_t{100000}}) {
      const std::size_t bytes = Channel::region_bytes(world, capacity);
      const auto arena = make_arena(world, bytes);
      Setup setup;
      setup.world = world;
      setup.capacity = capacity;
      const auto channel = make_channel(setup, arena, 0);
      CHECK(channel->capacity() == capacity);
      CHECK(channel->buffer_offset(0) + channel->capacity() <= channel->buffer_offset(1));
      CHECK(channel->buffer_offset(1) + channel->capacity() <= bytes);
      CHECK(channel->buffer_offset(0) % 4096 == 0);
      channel->begin(1, "first()");
      CHECK(channel->buffer(0) == arena->region(0) + channel->buffer_offset(1));
    }
  }
}

}  // namespace tpkernels::test
