// Telling a process from its forks, for the price of a load.
#pragma once

#include <cstdint>

namespace tpkernels::host {

// How many forks lie between the process that first asked and this one. What keeps the number of
// the process that made it knows when it is used in a copy.
std::uint32_t fork_generation();

}  // namespace tpkernels::host
