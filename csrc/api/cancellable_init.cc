#include "api/cancellable_init.h"

#include <algorithm>

#include "api/global_state.h"
#include "api/lightcc.h"
#include "base/text.h"

namespace lightcc {
namespace {

// A job is used once, so a cancel can be remembered for an init that is yet to come, and of no use later. More are kept
// than can be on their way to a process that is slow to begin them.
constexpr size_t kCancelledInits = 64;
constexpr size_t kCauseBytes = 300;  // short enough to stand in an error

const CancelledInit* find_cancelled(const GlobalState& s, const std::string& job) {
  const auto found = std::find_if(s.cancelled_inits.begin(), s.cancelled_inits.end(),
                                  [&](const CancelledInit& one) { return one.job == job; });
  return found == s.cancelled_inits.end() ? nullptr : &*found;
}

}  // namespace

CancellableInit::CancellableInit(const std::string& of_job) : job(of_job) {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  if (const CancelledInit* cancelled = find_cancelled(s, job)) throw cancelled->why;
  s.init_under_way = this;
}

CancellableInit::~CancellableInit() {
  GlobalState& s = global_state();
  std::lock_guard lock(s.mutex);
  s.init_under_way = nullptr;
}

}  // namespace lightcc

using namespace lightcc;

extern "C" int lightcc_cancel_init(const char* job, const char* cause) {
  return guard([&] {
    if (!job || !cause) refuse("cancel_init: give a job and a cause");
    const Error why(Code::shut_down, "init: " + std::string(truncate_utf8(cause, kCauseBytes)));
    GlobalState& s = global_state();
    std::lock_guard lock(s.mutex);
    if (find_cancelled(s, job)) return 0;
    s.cancelled_inits.push_back({job, why});
    if (s.cancelled_inits.size() > kCancelledInits) s.cancelled_inits.pop_front();
    if (s.init_under_way && s.init_under_way->job == job) s.init_under_way->cancellation.cancel(why);
    return 0;
  });
}
