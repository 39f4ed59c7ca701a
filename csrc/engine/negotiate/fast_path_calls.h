// The calls of a rank that take the fast path: at most one at a time, whose caller makes its steps itself.
#pragma once
#include <atomic>

#include "engine/negotiate/process_sets.h"
#include "engine/request/call.h"
#include "engine/request/fast_path_facts.h"

namespace lightcc {

class FastPathCalls {
 public:
  FastPathCalls(ProcessSets& sets, Inbox& inbox) : sets_(sets), inbox_(inbox) {}  // which outlive it

  // Under the progress lock, as end(). Returns whose group it has begun in; nullptr: it may not (fast_path_facts.h).
  // *number: its automatic one, if it has one.
  GroupEngine* begin(const Call&, FastPathFacts, uint64_t* number);
  void end() { name_.store(0, std::memory_order_relaxed); }
  // The same call as a request, for what is begun here and ends elsewhere.
  static RequestPtr request_of(const Call&, uint64_t number);

  // Is a call of this name there, of another thread then? Any thread.
  bool has_name_of(const Request&) const;

 private:
  ProcessSets& sets_;
  Inbox& inbox_;
  std::atomic<uint64_t> name_{0};  // hash of its name; 0: there is none, or it has none
};

}  // namespace lightcc
