#include "host/call_records.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <utility>

namespace tpkernels::host {
namespace {

// Microseconds of CLOCK_MONOTONIC, up to one tick (at most 10 ms) late. Reading the precise clock
// takes 35 ns, the coarse clock less than 10 ns.
std::uint64_t coarse_now_us() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1000000 +
         static_cast<std::uint64_t>(time.tv_nsec) / 1000;
}

struct Caller {
  char text[128];
  std::size_t size;
};
thread_local Caller next_caller;  // zero

}  // namespace

void set_caller(std::string_view caller) {
  next_caller.size = std::min(caller.size(), sizeof(next_caller.text));
  std::memcpy(next_caller.text, caller.data(), next_caller.size);
}

std::string_view take_caller() {
  const std::size_t size = next_caller.size;
  next_caller.size = 0;
  return {next_caller.text, size};
}

void CallRing::begin(std::uint32_t number, std::string_view text, std::string_view caller) {
  const std::uint64_t n = count.load(std::memory_order_relaxed);
  CallRecord& record = records[n % kRecordedCalls];
  record.stamp.store(2 * n + 1, std::memory_order_relaxed);
  // Release: a reader that sees one of these values also sees the new stamp.
  record.number.store(number, std::memory_order_release);
  record.epoch.store(number, std::memory_order_release);
  record.state.store(CallState::kStarted, std::memory_order_release);
  record.start_us.store(coarse_now_us(), std::memory_order_release);
  record.text.write(text);
  record.caller.write(caller);
  record.stamp.store(2 * n + 2, std::memory_order_release);
  count.store(n + 1, std::memory_order_release);
}

void CallRing::advance(std::uint32_t epoch) {
  const std::uint64_t n = count.load(std::memory_order_relaxed);
  if (n > 0) records[(n - 1) % kRecordedCalls].epoch.store(epoch, std::memory_order_release);
}

void CallRing::end(CallState state) {
  const std::uint64_t n = count.load(std::memory_order_relaxed);
  if (n == 0) return;
  CallRecord& record = records[(n - 1) % kRecordedCalls];
  if (record.state.load(std::memory_order_relaxed) != CallState::kStarted) return;
  record.end_us.store(coarse_now_us(), std::memory_order_relaxed);
  record.state.store(state, std::memory_order_release);
}

RankCalls read_rank(const std::byte* region, std::size_t ring_offset, std::size_t limit) {
  RankCalls rank;
  const auto& info = *reinterpret_cast<const RankInfo*>(region);
  if (info.magic.load(std::memory_order_acquire) != RankInfo::kMagic) return rank;
  rank.rank = info.group_rank.load(std::memory_order_relaxed);
  rank.pid = info.pid.load(std::memory_order_relaxed);
  const auto& ring = *reinterpret_cast<const CallRing*>(region + ring_offset);
  const std::uint64_t count = ring.count.load(std::memory_order_acquire);
  const std::uint64_t copied = std::min<std::uint64_t>({count, limit, kRecordedCalls});
  for (std::uint64_t n = count; n-- > count - copied;) {
    const CallRecord& record = ring.records[n % kRecordedCalls];
    if (record.stamp.load(std::memory_order_acquire) != 2 * n + 2) continue;
    CallInfo call{record.number.load(std::memory_order_acquire),
                  record.epoch.load(std::memory_order_acquire),
                  record.state.load(std::memory_order_acquire),
                  record.start_us.load(std::memory_order_acquire),
                  record.end_us.load(std::memory_order_acquire),
                  record.text.read(),
                  record.caller.read()};
    if (record.stamp.load(std::memory_order_relaxed) == 2 * n + 2) {
      rank.calls.push_back(std::move(call));
    }
  }
  return rank;
}

GroupRecords read_records(int fd, std::size_t limit) {
  struct stat file{};
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw std::runtime_error(what);
  };
  require(fstat(fd, &file) == 0 && file.st_size >= static_cast<off_t>(sizeof(RankInfo)),
          "it is not a workspace of tpkernels");
  const int seals = fcntl(fd, F_GET_SEALS);  // a file that shrinks would cause SIGBUS
  require(seals >= 0 && (seals & F_SEAL_SHRINK) != 0, "the size of its memory is not sealed");
  const auto bytes = static_cast<std::size_t>(file.st_size);
  void* const base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  require(base != MAP_FAILED, "its memory cannot be mapped");
  const auto unmap = [bytes](void* memory) { munmap(memory, bytes); };
  const std::unique_ptr<void, decltype(unmap)> mapping(base, unmap);
  const auto* const region = static_cast<const std::byte*>(base);
  const auto& info = *reinterpret_cast<const RankInfo*>(region);
  const std::uint64_t magic = info.magic.load(std::memory_order_acquire);
  require(magic != 0, "its rank 0 has not set up the group yet");
  require(magic == RankInfo::kMagic, "it runs a different version of tpkernels");
  const auto world = static_cast<std::size_t>(info.world.load(std::memory_order_relaxed));
  const std::size_t ring_offset = info.ring_offset.load(std::memory_order_relaxed);
  require(world > 0 && bytes % world == 0 && ring_offset % 64 == 0 &&
              ring_offset + sizeof(CallRing) <= bytes / world,
          "the layout of its memory is invalid");
  GroupRecords records{info.group.read(), {}};
  for (std::size_t rank = 0; rank < world; ++rank) {
    records.ranks.push_back(read_rank(region + rank * (bytes / world), ring_offset, limit));
    RankCalls& calls = records.ranks.back();
    if (calls.pid != 0) calls.process_state = process_state(calls.pid);
  }
  return records;
}

char process_state(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return 'X';
  const std::size_t end = stat.rfind(") ");  // the name of the process may contain both characters
  return end + 2 < stat.size() && end != std::string::npos ? stat[end + 2] : '?';
}

char pidfd_state(int pidfd) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(pidfd));
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 4, "Pid:") != 0) continue;
    const int pid = std::atoi(line.c_str() + 4);
    return pid > 0 ? process_state(pid) : pid < 0 ? 'X' : '?';
  }
  return '?';
}

// Text.

namespace {

std::string ago(std::uint64_t then_us) {
  char text[32];
  const std::uint64_t now_us = std::max(coarse_now_us(), then_us);
  std::snprintf(text, sizeof(text), "%.1f s ago", static_cast<double>(now_us - then_us) / 1e6);
  return text;
}

std::string call_name(const CallInfo& call) {
  const std::string chunk =
      call.epoch == call.number ? "" : " (now #" + std::to_string(call.epoch) + ")";
  return "#" + std::to_string(call.number) + chunk + " " + call.text;
}

std::string call_line(const CallInfo& call) {
  const char* const states[] = {", started ", ", completed ", ", failed "};
  const auto state = static_cast<std::size_t>(call.state) % 3;
  return call_name(call) + states[state] + ago(state == 0 ? call.start_us : call.end_us) +
         (call.caller.empty() ? "" : ", " + call.caller);
}

std::string process_text(char state) {
  if (is_stopped(state)) return "its process is stopped (SIGSTOP or a debugger)";
  return state == 'X' || state == 'Z' ? "its process has ended" : "";
}

// Epochs wrap around.
bool is_before(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) < 0; }

bool has_made(const RankCalls& rank, std::uint32_t number) {
  return !rank.calls.empty() && !is_before(rank.calls.front().number, number);
}

}  // namespace

std::string format_records(const std::vector<RankCalls>& ranks) {
  const CallInfo* newest = nullptr;  // of the calls in progress
  for (const RankCalls& rank : ranks) {
    if (rank.calls.empty() || rank.calls.front().state == CallState::kCompleted) continue;
    const CallInfo& call = rank.calls.front();
    if (!newest || is_before(newest->number, call.number)) newest = &call;
  }
  std::string lines, table;
  bool all_made = true;
  for (const RankCalls& rank : ranks) {
    const std::string name = "rank " + std::to_string(rank.rank);
    const std::string process = process_text(rank.process_state);
    const bool made = !newest || has_made(rank, newest->number);
    all_made = all_made && made;
    std::string line;
    if (rank.pid == 0) {
      line = "a rank has not set up the group";
    } else if (!made) {
      line = name + " has not made call #" + std::to_string(newest->number);
      line += rank.calls.empty() ? "; it has made no call"
                                 : "; its last call was " + call_line(rank.calls.front());
    } else if (!process.empty()) {
      line = name;
    }
    if (!line.empty()) {
      const char* const separator = made ? ": " : "; ";
      lines += line + (process.empty() ? "" : separator + process) + "\n";
    }
    if (rank.pid == 0) continue;
    table += name + " (pid " + std::to_string(rank.pid) + ")" +
             (process.empty() ? "" : ", " + process) + ":\n";
    if (!made) table += "  has not made call #" + std::to_string(newest->number) + "\n";
    for (const CallInfo& call : rank.calls) table += "  call " + call_line(call) + "\n";
    if (rank.calls.empty()) table += "  no call\n";
  }
  if (!newest) {
    lines += "no rank is in a call\n";
  } else if (all_made) {
    lines += "all ranks have made call " + call_name(*newest) + "\n";
  }
  if (!table.empty()) table.pop_back();  // the last newline
  return lines + "Last calls of each rank, newest first:\n" + table;
}

}  // namespace tpkernels::host
