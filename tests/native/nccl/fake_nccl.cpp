// A scriptable libnccl for tests: it fails on request, stays in progress as long as requested, and
// logs its calls. It only moves data from a rank to itself.
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { kSuccess = 0, kInternalError = 3, kInvalidArgument = 4, kInProgress = 7 };

struct Config {  // ncclConfig_t, as NCCL 2.27 reads it
  std::size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char* net_name;
  int split_share, traffic_class;
  const char* comm_name;
  int collnet, cta_policy, shrink_share, nvls_ctas;
};

struct UniqueId {
  char bytes[128];
};

struct Message {
  const void* from;
  void* to;
  std::size_t bytes;
};

std::mutex mutex;  // guards everything below
int version = 23203;
std::map<std::string, int> results, calls;
std::map<std::string, int> delays;  // ms
double poll_delay = 0;
int polls_to_go = 0;  // how often each call first reports "in progress"; -1: forever
int async_result = kSuccess;
std::string log_text, last_error;
int misuse = 0;  // calls with a freed communicator, or with one on which a call is in progress
int ids_made = 0;
thread_local int depth = 0;
std::vector<Message> sends, receives;

}  // namespace

struct ncclComm {
  int rank, world;
  int polls;  // how many more polls report "in progress"
};

namespace {

std::set<ncclComm*> alive;

int enter(const char* function, ncclComm* comm, bool ends = false) {
  int delay = 0;
  int result = kSuccess;
  {
    const std::lock_guard lock(mutex);
    ++calls[function];
    if (comm != nullptr && alive.count(comm) == 0) {
      ++misuse;
      return kInvalidArgument;
    }
    if (comm != nullptr && !ends && comm->polls != 0) ++misuse;
    if (comm != nullptr && ends) alive.erase(comm);
    delay = delays.count(function) != 0 ? delays[function] : 0;
    result = results.count(function) != 0 ? results[function] : kSuccess;
    if (result != kSuccess && result != kInProgress) last_error = std::string(function) + " broke";
    if (comm != nullptr && !ends && depth == 0) comm->polls = polls_to_go;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  return result;
}

std::size_t size_of(int dtype) { return dtype == 8 ? 8 : dtype == 7 ? 4 : 2; }

void record(const char* name, std::size_t count, int dtype, int peer, void* stream) {
  const std::lock_guard lock(mutex);
  log_text += std::string(name) + " count=" + std::to_string(count) +
              " dtype=" + std::to_string(dtype) + " peer=" + std::to_string(peer) +
              " stream=" + std::to_string(reinterpret_cast<std::size_t>(stream)) +
              " group=" + std::to_string(depth) + "\n";
}

int move(const char* function, ncclComm* comm, const void* from, void* to, std::size_t count,
         int dtype, int peer, void* stream) {
  const int result = enter(function, comm);
  if (result != kSuccess) return result;
  record(function + 4, count, dtype, peer, stream);
  if (comm->world == 1 && from != to) std::memmove(to, from, count * size_of(dtype));
  return kSuccess;
}

}  // namespace

extern "C" {

void fake_version(int value) { version = value; }
void fake_result(const char* function, int code) { results[function] = code; }
void fake_delay(const char* function, int ms) { delays[function] = ms; }
void fake_poll_delay(double seconds) { poll_delay = seconds; }
void fake_progress(int polls) { polls_to_go = polls; }
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
const char* fake_log() { return log_text.c_str(); }

static std::string last_config, last_id;
const char* fake_config() { return last_config.c_str(); }
const char* fake_id() { return last_id.c_str(); }

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
  const Config& c = *config;
  last_config = c.comm_name;
  if (c.net_name != nullptr) last_config += c.net_name;
  for (const std::size_t value : {c.size, std::size_t{c.magic}, std::size_t{c.version}}) {
    last_config += " " + std::to_string(value);
  }
  for (const int value :
       {c.blocking, c.cga, c.min_ctas, c.max_ctas, c.split_share, c.cta_policy, c.nvls_ctas}) {
    last_config += " " + std::to_string(value);
  }
  last_id.clear();
  for (const char byte : id.bytes) last_id += std::to_string(byte & 0xff) + " ";
  *comm = nullptr;
  if (result != kSuccess && result != kInProgress) return result;
  const std::lock_guard lock(mutex);
  *comm = new ncclComm{rank, world, polls_to_go};
  alive.insert(*comm);
  return result;
}

int ncclCommGetAsyncError(ncclComm* comm, int* code) {
  std::this_thread::sleep_for(std::chrono::duration<double>(poll_delay));
  const std::lock_guard lock(mutex);
  ++calls["ncclCommGetAsyncError"];
  if (alive.count(comm) == 0) {
    ++misuse;
    return kInvalidArgument;
  }
  if (comm->polls != 0) {
    if (comm->polls > 0) --comm->polls;
    *code = kInProgress;
  } else {
    *code = async_result;
  }
  return kSuccess;
}

int ncclCommAbort(ncclComm* comm) { return enter("ncclCommAbort", comm, true); }
int ncclCommDestroy(ncclComm* comm) { return enter("ncclCommDestroy", comm, true); }
int ncclCommFinalize(ncclComm* comm) { return enter("ncclCommFinalize", comm); }

const char* ncclGetErrorString(int code) {
  static thread_local std::string text;
  text = "fake error " + std::to_string(code);
  return text.c_str();
}
const char* ncclGetLastError(ncclComm*) { return last_error.c_str(); }

int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, ncclComm* comm,
                  void* stream) {
  return move("ncclAllGather", comm, from, to, count, dtype, -1, stream);
}
int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int op,
                      ncclComm* comm, void* stream) {
  return op != 0 ? kInvalidArgument
                 : move("ncclReduceScatter", comm, from, to, count, dtype, -1, stream);
}
int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int op, ncclComm* comm,
                  void* stream) {
  return op != 0 ? kInvalidArgument
                 : move("ncclAllReduce", comm, from, to, count, dtype, -1, stream);
}
int ncclBroadcast(const void* from, void* to, std::size_t count, int dtype, int root,
                  ncclComm* comm, void* stream) {
  return move("ncclBroadcast", comm, from, to, count, dtype, root, stream);
}
int ncclSend(const void* from, std::size_t count, int dtype, int peer, ncclComm* comm,
             void* stream) {
  const int result = enter("ncclSend", comm);
  if (result != kSuccess) return result;
  record("Send", count, dtype, peer, stream);
  const std::lock_guard lock(mutex);
  if (peer == comm->rank) sends.push_back({from, nullptr, count * size_of(dtype)});
  return kSuccess;
}
int ncclRecv(void* to, std::size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
  const int result = enter("ncclRecv", comm);
  if (result != kSuccess) return result;
  record("Recv", count, dtype, peer, stream);
  const std::lock_guard lock(mutex);
  if (peer == comm->rank) receives.push_back({nullptr, to, count * size_of(dtype)});
  return kSuccess;
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
    std::memcpy(receives[i].to, sends[i].from, sends[i].bytes);
  }
  sends.clear();
  receives.clear();
  for (ncclComm* comm : alive) comm->polls = polls_to_go;
  return result;
}
int fake_depth() { return depth; }

}  // extern "C"
