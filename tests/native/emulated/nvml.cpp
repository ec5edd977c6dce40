// NVML made for the tests of symm/nvlink.py: GPUs "GPU-0" to "GPU-7", all linked but for the pair
// in EMULATED_UNLINKED ("0-2", in this order).
#include <cstdio>
#include <cstdlib>

namespace {

struct Gpu {
  int number;
};

Gpu gpus[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
bool begun = false;

constexpr int kSuccess = 0, kUninitialized = 1, kInvalid = 2, kNotFound = 6;
constexpr int kNvlink = 2;            // NVML_P2P_CAPS_INDEX_NVLINK
constexpr int kLinked = 0, kNot = 5;  // NVML_P2P_STATUS_OK and NOT_SUPPORTED

}  // namespace

extern "C" {

int nvmlInit_v2() {
  begun = true;
  return kSuccess;
}

int nvmlShutdown() {
  begun = false;
  return kSuccess;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Gpu** gpu) {
  int number = -1;
  if (!begun) return kUninitialized;
  if (std::sscanf(uuid, "GPU-%d", &number) != 1) return kInvalid;
  if (number < 0 || number > 7) return kNotFound;
  *gpu = &gpus[number];
  return kSuccess;
}

int nvmlDeviceGetP2PStatus(Gpu* gpu, Gpu* peer, int index, int* status) {
  if (!begun) return kUninitialized;
  if (index != kNvlink || gpu < gpus || gpu > gpus + 7 || peer < gpus || peer > gpus + 7) {
    return kInvalid;
  }
  int from = -1, to = -1;
  const char* unlinked = std::getenv("EMULATED_UNLINKED");
  if (unlinked != nullptr) std::sscanf(unlinked, "%d-%d", &from, &to);
  *status = gpu->number == from && peer->number == to ? kNot : kLinked;
  return kSuccess;
}
}
