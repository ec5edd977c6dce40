// Which memory of this process lies in symmetric tensors that users made. Under the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace tpkernels::host {

class Segments {
 public:
  // The identity of a new segment, the same on all ranks, with this rank's region of it.
  std::uint64_t add(std::uintptr_t address, std::size_t bytes) {
    living_[address] = {++made_, bytes};
    return made_;
  }

  void forget(std::uint64_t identity) {
    for (auto it = living_.begin(); it != living_.end(); ++it) {
      if (it->second.identity == identity) {
        living_.erase(it);
        return;
      }
    }
  }

  void clear() { living_.clear(); }
  std::size_t size() const { return living_.size(); }

  // (identity, offset in bytes) of memory that lies in a segment; identity 0 where it does not.
  std::pair<std::uint64_t, std::size_t> locate(std::uintptr_t address, std::size_t bytes) const {
    auto it = living_.upper_bound(address);
    if (it == living_.begin()) return {0, 0};
    --it;
    const std::size_t offset = address - it->first;
    if (bytes > it->second.bytes || offset > it->second.bytes - bytes) return {0, 0};
    return {it->second.identity, offset};
  }

 private:
  struct Segment {
    std::uint64_t identity;
    std::size_t bytes;
  };
  std::uint64_t made_ = 0;
  std::map<std::uintptr_t, Segment> living_;  // by address
};

}  // namespace tpkernels::host
