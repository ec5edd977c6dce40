// Problem: if a call hangs, a person must see which rank has not made which call, also if the
// process of that rank is stopped or has ended.
//
// Algorithm: each rank records its last 64 calls in a ring in its region. The memory outlives the
// process, because the peers map it. An outside process finds the ring through the `RankInfo` at
// the start of the region.
//
// Sync: only the owner of a region writes its ring. Every process that maps the memory may read it
// at any time. Call n of a rank is in slot n % 64, and the stamp of the slot is 2n + 1 while the
// owner writes the record, then 2n + 2. A reader loads the stamp before and after the record and
// drops the record unless it is 2n + 2 both times, so it never returns a torn record.
//
// Invariant (bounded reads): text is cut to the size of its field, and a reader never loops.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace tpkernels::host {

constexpr std::size_t kRecordedCalls = 64;

// Text of at most `kBytes` bytes of UTF-8, which ends at the first zero byte.
template <std::size_t kBytes>
struct AtomicText {
  std::atomic<std::uint64_t> words[kBytes / 8];

  void write(std::string_view text) {
    std::size_t size = std::min(text.size(), kBytes);
    // Do not cut within a character.
    while (size < text.size() && size > 0 && (text[size] & 0xC0) == 0x80) --size;
    for (std::size_t begin = 0; begin < kBytes; begin += 8) {
      std::uint64_t word = 0;
      if (begin < size)
        std::memcpy(&word, text.data() + begin, std::min<std::size_t>(8, size - begin));
      words[begin / 8].store(word, std::memory_order_release);
      if (begin + 8 > size) return;  // this word holds the zero byte
    }
  }
  std::string read() const {
    std::string text(kBytes, '\0');
    for (std::size_t begin = 0; begin < kBytes; begin += 8) {
      const std::uint64_t word = words[begin / 8].load(std::memory_order_acquire);
      std::memcpy(text.data() + begin, &word, 8);
    }
    return text.substr(0, text.find('\0'));
  }
};

enum class CallState : std::uint32_t { kStarted = 0, kCompleted = 1, kFailed = 2 };

struct CallRecord {
  std::atomic<std::uint64_t> stamp;
  std::atomic<std::uint32_t> number;  // epoch of the first chunk
  std::atomic<std::uint32_t> epoch;   // of the latest chunk
  std::atomic<CallState> state;
  std::atomic<std::uint64_t> start_us, end_us;  // CLOCK_MONOTONIC
  AtomicText<160> text;                         // op, shape, dtype
  AtomicText<120> caller;                       // "train.py:41 in step"; may be empty
};

class CallRing {
 public:
  // For the owner. Records a new call.
  void begin(std::uint32_t number, std::string_view text, std::string_view caller);
  // For the owner. A further chunk of the newest call has epoch `epoch`.
  void advance(std::uint32_t epoch);
  // For the owner. Ends the newest call. Does nothing if it has ended.
  void end(CallState state);

  std::atomic<std::uint64_t> count;  // calls begun
  alignas(64) CallRecord records[kRecordedCalls];
};

// The start of a region.
struct RankInfo {
  static constexpr std::uint64_t kMagic = 0x74706b6c00000001;  // "tpkl", version of the layout

  std::atomic<std::uint64_t> magic;  // stored last; 0 before the rank has set up its channel
  std::atomic<std::int32_t> world, group_rank, pid;
  std::atomic<std::uint32_t> ring_offset;  // of the CallRing in the region
  AtomicText<64> group;
};

// Copies of the records.
struct CallInfo {
  std::uint32_t number, epoch;
  CallState state;
  std::uint64_t start_us, end_us;
  std::string text, caller;
};

struct RankCalls {
  int rank = -1, pid = 0;       // rank in the group; pid 0: the rank has not set up its channel
  char process_state = '?';     // letter of /proc/PID/stat, 'X': has ended, '?': unknown
  std::vector<CallInfo> calls;  // newest first
};

struct GroupRecords {
  std::string group;
  std::vector<RankCalls> ranks;
};

// Copies at most `limit` of the newest calls of the rank that owns `region`.
RankCalls read_rank(const std::byte* region, std::size_t ring_offset, std::size_t limit);
// Copies the calls of all ranks from the memfd of a workspace. Throws std::runtime_error if the
// file is not a workspace, or is from a different version of this package.
GroupRecords read_records(int fd, std::size_t limit);
// Returns lines of text: which ranks have not made the newest call, then the calls of all ranks.
std::string format_records(const std::vector<RankCalls>& ranks);

// State of a process: the letter of /proc/PID/stat, or 'X' if there is no such process.
char process_state(int pid);
// State of the process of a pidfd. Works in every pid namespace. '?' if it is not visible here.
char pidfd_state(int pidfd);
inline bool is_stopped(char state) { return state == 'T' || state == 't'; }

// The Python line that makes the next call on this thread. `Channel::begin` records and clears it.
void set_caller(std::string_view caller);
std::string_view take_caller();

}  // namespace tpkernels::host
