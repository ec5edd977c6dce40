// A scriptable libnccl for tests. It fails on request, reports "in progress" as long as requested,
// and logs its calls. Data moves only from a rank to itself.
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

struct ncclComm {
  int rank, world;
  int polls;  // remaining polls that report "in progress"; -1: all
};

namespace {

enum Result { kSuccess = 0, kInvalidArgument = 4, kInProgress = 7 };

struct Config {  // ncclConfig_t, as NCCL 2.14 reads it
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

struct UniqueId {
  char bytes[128];
};

std::mutex mutex;  // guards everything below
int version = 23203;
std::map<std::string, int> results, calls;
std::map<std::string, int> delays;  // ms
int polls_per_call = 0;             // initial `polls` of each call
int async_result = kSuccess;
std::string log_text, last_error, last_init;
int misuse = 0;  // calls on a freed communicator, or during a call in progress on it
int ids_made = 0;
thread_local int depth = 0;
std::vector<std::pair<const void*, std::size_t>> sends;  // self-sends of the current group
std::vector<void*> receives;
std::set<ncclComm*> alive, in_group;

int enter(const std::string& function, ncclComm* comm, bool is_final = false) {
  int delay = 0;
  int result = kSuccess;
  {
    const std::lock_guard lock(mutex);
    ++calls[function];
    if (comm != nullptr && alive.count(comm) == 0) {
      ++misuse;
      return kInvalidArgument;
    }
    if (comm != nullptr && !is_final && comm->polls != 0) ++misuse;
    if (comm != nullptr && is_final) alive.erase(comm);
    delay = delays[function];
    result = results[function];
    if (result != kSuccess && result != kInProgress) last_error = function + " broke";
    if (comm != nullptr && !is_final && depth == 0) comm->polls = polls_per_call;
    if (comm != nullptr && depth > 0) in_group.insert(comm);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  return result;
}

std::size_t size_of(int dtype) { return dtype == 8 ? 8 : dtype == 7 ? 4 : 2; }

int move(const std::string& kind, ncclComm* comm, const void* src, void* dst, std::size_t count,
         int dtype, int peer, void* stream) {
  const int result = enter("nccl" + kind, comm);
  if (result != kSuccess) return result;
  const std::lock_guard lock(mutex);
  log_text += kind + " count=" + std::to_string(count) + " dtype=" + std::to_string(dtype) +
              " peer=" + std::to_string(peer) +
              " stream=" + std::to_string(reinterpret_cast<std::size_t>(stream)) + "\n";
  if (kind == "Send") {
    if (peer == comm->rank) sends.emplace_back(src, count * size_of(dtype));
  } else if (kind == "Recv") {
    if (peer == comm->rank) receives.push_back(dst);
  } else if (comm->world == 1 && src != dst) {
    std::memcpy(dst, src, count * size_of(dtype));
  }
  return kSuccess;
}

}  // namespace

extern "C" {

void fake_version(int value) { version = value; }
void fake_result(const char* function, int code) { results[function] = code; }
void fake_delay(const char* function, int ms) { delays[function] = ms; }
void fake_progress(int polls) { polls_per_call = polls; }
void fake_asynchronous(int code) {
  const std::lock_guard lock(mutex);
  async_result = code;
  if (code != kSuccess) last_error = "a link went down";
}
int fake_calls(const char* function) {
  const std::lock_guard lock(mutex);
  return calls[function];
}
int fake_misuse() { return misuse; }
int fake_alive() { return static_cast<int>(alive.size()); }
int fake_depth() { return depth; }
const char* fake_log() { return log_text.c_str(); }
const char* fake_init() { return last_init.c_str(); }  // config and bytes of the id

int ncclGetVersion(int* value) {
  *value = version;
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  const int result = enter("ncclGetUniqueId", nullptr);
  for (char& byte : id->bytes) byte = static_cast<char>(std::rand());
  id->bytes[0] = static_cast<char>(++ids_made);
  return result;
}

int ncclCommInitRankConfig(ncclComm** comm, int world, UniqueId id, int rank, Config* config) {
  const int result = enter("ncclCommInitRankConfig", nullptr);
  last_init = std::to_string(config->size) + " " + std::to_string(config->magic) + " " +
              std::to_string(config->version) + " " + std::to_string(config->blocking) + "\n";
  for (const char byte : id.bytes) last_init += std::to_string(byte & 0xff) + " ";
  if (result != kSuccess && result != kInProgress) return result;
  const std::lock_guard lock(mutex);
  *comm = new ncclComm{rank, world, polls_per_call};
  alive.insert(*comm);
  return result;
}

int ncclCommGetAsyncError(ncclComm* comm, int* code) {
  std::this_thread::sleep_for(std::chrono::microseconds(20));  // lets an abort interfere
  const std::lock_guard lock(mutex);
  ++calls["ncclCommGetAsyncError"];
  if (alive.count(comm) == 0) {
    ++misuse;
    return kInvalidArgument;
  }
  *code = comm->polls != 0 ? static_cast<int>(kInProgress) : async_result;
  if (comm->polls > 0) --comm->polls;
  return kSuccess;
}

int ncclCommAbort(ncclComm* comm) { return enter("ncclCommAbort", comm, true); }
int ncclCommDestroy(ncclComm* comm) { return enter("ncclCommDestroy", comm, true); }
int ncclCommFinalize(ncclComm* comm) { return enter("ncclCommFinalize", comm); }

const char* ncclGetErrorString(int code) {
  static thread_local std::string message;
  message = "fake error " + std::to_string(code);
  return message.c_str();
}
const char* ncclGetLastError(ncclComm*) { return last_error.c_str(); }

int ncclAllGather(const void* src, void* dst, std::size_t count, int dtype, ncclComm* comm,
                  void* stream) {
  return move("AllGather", comm, src, dst, count, dtype, -1, stream);
}
int ncclReduceScatter(const void* src, void* dst, std::size_t count, int dtype, int op,
                      ncclComm* comm, void* stream) {
  return op == 0 ? move("ReduceScatter", comm, src, dst, count, dtype, -1, stream) : 4;
}
int ncclAllReduce(const void* src, void* dst, std::size_t count, int dtype, int op, ncclComm* comm,
                  void* stream) {
  return op == 0 ? move("AllReduce", comm, src, dst, count, dtype, -1, stream) : 4;
}
int ncclBroadcast(const void* src, void* dst, std::size_t count, int dtype, int root,
                  ncclComm* comm, void* stream) {
  return move("Broadcast", comm, src, dst, count, dtype, root, stream);
}
int ncclSend(const void* src, std::size_t count, int dtype, int peer, ncclComm* comm,
             void* stream) {
  return move("Send", comm, src, nullptr, count, dtype, peer, stream);
}
int ncclRecv(void* dst, std::size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
  return move("Recv", comm, nullptr, dst, count, dtype, peer, stream);
}

int ncclGroupStart() {
  const int result = enter("ncclGroupStart", nullptr);
  if (result == kSuccess) ++depth;
  return result;
}
int ncclGroupEnd() {
  const int result = enter("ncclGroupEnd", nullptr);
  --depth;
  const std::lock_guard lock(mutex);
  for (std::size_t i = 0; i < sends.size() && i < receives.size(); ++i) {
    std::memcpy(receives[i], sends[i].first, sends[i].second);
  }
  sends.clear();
  receives.clear();
  for (ncclComm* comm : in_group) comm->polls = polls_per_call;
  in_group.clear();
  return result;
}

}  // extern "C"
