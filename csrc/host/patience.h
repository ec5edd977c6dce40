// How long a waiter polls before it sleeps: waking from sleep takes some 50 us, longer than most
// waits of a decode step, while polling through the waits of a training step would waste a core.
//
// It polls for long where most of the last waits were shorter than that, and for kLeast of it
// otherwise. Polling never takes more than kShare of the time. No logarithms: what a wait costs is
// mostly the memory that it touches, when a model has emptied the caches.
#pragma once

#include <algorithm>

namespace tpkernels::host {

class Patience {
 public:
  // `most_us` bounds one wait's polling; 0: none.
  explicit Patience(double most_us) : most_us_(most_us) {}

  // For how long to poll in a wait that begins at `now_us`.
  double begin(double now_us) {
    allowance_us_ = std::min(kBurst * most_us_, allowance_us_ + kShare * (now_us - last_us_));
    last_us_ = now_us;
    return std::min(balance_ >= 0 ? most_us_ : kLeast * most_us_, allowance_us_);
  }

  // The wait has ended, after `polled_us` of polling.
  void end(double waited_us, double polled_us) {
    allowance_us_ -= polled_us;
    balance_ =
        waited_us < most_us_ ? std::min(balance_ + 1, kMemory) : std::max(balance_ - 1, -kMemory);
  }

 private:
  static constexpr double kLeast = 0.05;  // of `most_us`: 100 us of 2 ms
  static constexpr double kShare = 0.5;   // of the time
  static constexpr double kBurst = 4;     // waits of `most_us` in a row
  static constexpr int kMemory = 8;       // waits after which another kind is the usual one

  double most_us_;
  double allowance_us_ = 0;
  double last_us_ = -1e9;  // long ago: the first waits may poll
  int balance_ = kMemory;  // of short waits and long ones
};

}  // namespace tpkernels::host
