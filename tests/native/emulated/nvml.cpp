// NVML made for tests: GPUs "GPU-0" to "GPU-7", all linked but for the pair
// in EMULATED_UNLINKED ("0-2", in this order).
#include <cstdio>
#include <cstdlib>

static bool begun = false;
static constexpr int kSuccess = 0, kUninitialized = 1, kInvalid = 2, kNotFound = 6;
static constexpr int kNvlink = 2;            // NVML_P2P_CAPS_INDEX_NVLINK
static constexpr int kLinked = 0, kNot = 5;  // NVML_P2P_STATUS_OK and NOT_SUPPORTED

extern "C" {

int nvmlInit_v2() {
  begun = true;
  return kSuccess;
}
int nvmlShutdown() {
  begun = false;
  return kSuccess;
}
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  if (!begun) return kUninitialized;
  const char* version = std::getenv("EMULATED_DRIVER");
  std::snprintf(text, size, "%s", version != nullptr ? version : "580.65.06");
  return kSuccess;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, long* gpu) {  // a handle is its number + 1
  int number = -1;
  if (!begun) return kUninitialized;
  if (std::sscanf(uuid, "GPU-%d", &number) != 1) return kInvalid;
  *gpu = number + 1;
  return number < 0 || number > 7 ? kNotFound : kSuccess;
}
int nvmlDeviceGetP2PStatus(long gpu, long peer, int index, int* status) {
  if (!begun) return kUninitialized;
  if (index != kNvlink || gpu < 1 || gpu > 8 || peer < 1 || peer > 8) return kInvalid;
  int from = -1, to = -1;
  const char* unlinked = std::getenv("EMULATED_UNLINKED");
  if (unlinked != nullptr) std::sscanf(unlinked, "%d-%d", &from, &to);
  *status = gpu == from + 1 && peer == to + 1 ? kNot : kLinked;
  return kSuccess;
}
}
