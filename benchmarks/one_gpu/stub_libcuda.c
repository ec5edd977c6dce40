// A libcuda.so.1 for machines without a GPU. Every call succeeds and has no effect. Triton can then
// compile kernels for sm_90 in the usual flow, and fills its cache.
//
//     gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 stub_libcuda.c
#include <stddef.h>
#include <stdint.h>

#define CALL(name, effect, ...) \
  int name(__VA_ARGS__) {       \
    effect;                     \
    return 0;                   \
  }
#define NOTHING (void)0

CALL(cuInit, NOTHING, unsigned flags)
CALL(cuDriverGetVersion, *version = 13000, int* version)
CALL(cuGetErrorName, *name = "an error", int code, const char** name)
CALL(cuGetErrorString, *text = "an error of the stub", int code, const char** text)

CALL(cuDeviceGetCount, *count = 1, int* count)
CALL(cuDeviceGet, *device = ordinal, int* device, int ordinal)
CALL(cuDevicePrimaryCtxRetain, *context = (void*)1, void** context, int device)
CALL(cuCtxGetCurrent, *context = (void*)1, void** context)
CALL(cuCtxSetCurrent, NOTHING, void* context)
CALL(cuCtxPushCurrent_v2, NOTHING, void* context)
CALL(cuCtxPopCurrent_v2, *context = (void*)1, void** context)
CALL(cuCtxGetLimit, *value = 1 << 20, size_t* value, int limit)
CALL(cuCtxSetLimit, NOTHING, int limit, size_t value)

CALL(cuModuleLoadData, *module = (void*)2, void** module, const void* image)
CALL(cuModuleUnload, NOTHING, void* module)
CALL(cuModuleGetFunction, *function = (void*)3, void** function, void* module, const char* name)
CALL(cuFuncGetAttribute, *value = attribute == 0 ? 1024 : 0, int* value, int attribute, void* of)
CALL(cuFuncSetAttribute, NOTHING, void* function, int attribute, int value)
CALL(cuFuncSetCacheConfig, NOTHING, void* function, int config)
CALL(cuOccupancyMaxActiveClusters, *count = 1, int* count, void* function, void* config)

CALL(cuPointerGetAttribute, *value = pointer, uint64_t* value, int attribute, uint64_t pointer)
CALL(cuTensorMapEncodeTiled, NOTHING, void* map, int type, unsigned rank, void* address,
     const uint64_t* sizes, const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
     int interleave, int swizzle, int promotion, int fill)
CALL(cuLaunchKernelEx, NOTHING, const void* config, void* function, void** parameters, void** extra)
CALL(cuMemcpyAsync, NOTHING, uint64_t to, uint64_t from, size_t bytes, void* stream)
CALL(cuStreamWriteValue64_v2, NOTHING, void* stream, uint64_t to, uint64_t value, unsigned flags)

// Attributes of an H100: shared memory per block (opt-in, default), multiprocessors, compute
// capability 9.0.
CALL(cuDeviceGetAttribute,
     *value = attribute == 97   ? 232448
              : attribute == 8  ? 49152
              : attribute == 16 ? 132
              : attribute == 75 ? 9
              : attribute == 76 ? 0
                                : 32,
     int* value, int attribute, int device)
