// The extension tpkernels._C: one submodule per folder of csrc/, each with its own bindings. There
// are no torch headers, so one build serves every torch version.
#include "cuda/bindings.h"

#include <pybind11/pybind11.h>

#include "calls/bindings.h"
#include "host/bindings.h"
#include "nccl/bindings.h"

// def_submodule also adds each submodule to sys.modules, so `import tpkernels._C.host` works.
PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ part of tpkernels";
  auto host = m.def_submodule("host", "Shared memory, signals and collectives within one host");
  auto nccl = m.def_submodule("nccl", "NCCL, loaded at run time");
  auto cuda = m.def_submodule("cuda", "The CUDA C++ kernels and their launches");
  auto calls = m.def_submodule("calls", "The ops' kernels");
  tpkernels::host::bind(host);
  tpkernels::calls::bind(calls);
  tpkernels::nccl::bind(nccl);
  tpkernels::cuda::bind(cuda);
}
