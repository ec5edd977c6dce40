// Distinguishes a process from its forks at the cost of one load.
#pragma once

#include <cstdint>

namespace tpkernels::host {

// Number of forks between the process that first called this and the current one. An object that
// stores it at construction can later detect that it is used in a fork.
std::uint32_t fork_generation();

}  // namespace tpkernels::host
