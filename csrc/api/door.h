// What every door needs: the one static engine and the tables around it, and the border that no exception crosses.
#pragma once
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "engine/engine.h"
#include "net/join.h"

namespace lightcc {

struct State {
  std::mutex mutex;                                   // guards all of this, never held across a wait
  std::shared_ptr<Engine> engine;
  std::map<std::string, int> epochs;                  // by job: its inits so far
  std::optional<Meeting> meeting;                     // opened, for lightcc_init_at
  int64_t next_handle = 1;
  std::unordered_map<int64_t, RequestPtr> handles;    // of the present epoch and, until released, of earlier ones
  std::unordered_map<int64_t, RequestPtr> prepared;
  std::map<void*, std::shared_ptr<Arena>> memory;     // what lightcc_alloc gave out
  uint64_t copied_before = 0;                         // bytes copied before init
  bool forked = false;
  std::string how;                                    // the ranks met
  std::string notes;                                  // on settings, that the last init has logged
};
State& state();

// Does nothing on a rank that is not to write. asked: by whom, for the error.
void start_timeline(Timeline&, const World&, const std::string& pattern, bool mark_cycles, const std::string& asked);
std::shared_ptr<Engine> engine();                     // throws Error{shut_down} when there is none
void set_last_error(const std::string& text);         // of the calling thread
[[noreturn]] inline void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

// Every door's body. sign: -1 for doors that return a number on success.
template <class Body> auto guard(Body body, int sign = 1) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    set_last_error(error.what());
    return sign * int(error.code());
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return sign * int(Code::internal);
  }
}

}  // namespace lightcc
