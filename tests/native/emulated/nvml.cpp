// NVML for tests: GPUs "GPU-0" to "GPU-7". All pairs are linked except the ordered pair in
// EMULATED_UNLINKED, for example "0-2".
#include <cstdio>
#include <cstdlib>

static bool initialized = false;
static constexpr int kSuccess = 0, kUninitialized = 1, kInvalid = 2, kNotFound = 6;
static constexpr int kNvlink = 2;                     // NVML_P2P_CAPS_INDEX_NVLINK
static constexpr int kLinked = 0, kNotSupported = 5;  // NVML_P2P_STATUS_OK and NOT_SUPPORTED

extern "C" {

int nvmlInit_v2() {
  initialized = true;
  return kSuccess;
}
int nvmlShutdown() {
  initialized = false;
  return kSuccess;
}
int nvmlSystemGetDriverVersion(char* buffer, unsigned size) {
  if (!initialized) return kUninitialized;
  const char* version = std::getenv("EMULATED_DRIVER");
  std::snprintf(buffer, size, "%s", version != nullptr ? version : "580.65.06");
  return kSuccess;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, long* gpu) {  // handle: GPU number + 1
  int number = -1;
  if (!initialized) return kUninitialized;
  if (std::sscanf(uuid, "GPU-%d", &number) != 1) return kInvalid;
  *gpu = number + 1;
  return number < 0 || number > 7 ? kNotFound : kSuccess;
}
int nvmlDeviceGetP2PStatus(long gpu, long peer, int index, int* status) {
  if (!initialized) return kUninitialized;
  if (index != kNvlink || gpu < 1 || gpu > 8 || peer < 1 || peer > 8) return kInvalid;
  int first = -1, second = -1;
  const char* unlinked = std::getenv("EMULATED_UNLINKED");
  if (unlinked != nullptr) std::sscanf(unlinked, "%d-%d", &first, &second);
  *status = gpu == first + 1 && peer == second + 1 ? kNotSupported : kLinked;
  return kSuccess;
}
}
