// An init that another thread can end (lightcc_cancel_init), before it begins and until the world has formed.
#pragma once
#include <string>

#include "base/deadline.h"

namespace lightcc {

struct CancelledInit {
  std::string job;
  Error why;
};

// While it lives, the job's init is under way in this process, of which there is one at a time. Throws why it was
// cancelled, if it was already.
class CancellableInit {
 public:
  explicit CancellableInit(const std::string& job);
  ~CancellableInit();
  CancellableInit(const CancellableInit&) = delete;
  CancellableInit& operator=(const CancellableInit&) = delete;

  const std::string job;
  Cancellation cancellation;
};

}  // namespace lightcc
