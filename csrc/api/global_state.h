// What every function of the C API needs: the one static engine and the tables around it, and guard(), which no
// exception crosses.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "api/cancellable_init.h"
#include "base/error.h"
#include "engine/engine.h"
#include "net/bootstrap/epoch.h"
#include "net/bootstrap/launchers.h"

namespace lightcc {

class Compressor;

struct GlobalState {
  std::mutex mutex;                                   // guards all of this, never held across a wait
  std::shared_ptr<Engine> engine;
  std::map<std::string, Epoch> epochs;                // by job: the next one
  std::optional<Rendezvous> rendezvous;               // opened, for lightcc_init_at
  CancellableInit* init_under_way = nullptr;
  std::deque<CancelledInit> cancelled_inits;          // the last ones
  int64_t next_handle = 1;
  std::unordered_map<int64_t, RequestPtr> handles;    // of the present epoch and, until released, of earlier ones
  std::unordered_map<int64_t, RequestPtr> prepared;
  int next_codec = 1;
  std::unordered_map<int, std::shared_ptr<Compressor>> codecs;
  std::map<std::string, int> codec_names;
  std::unordered_map<void*, std::function<void()>> memory;  // what was given out that is not malloc's: frees it
  uint64_t copied_before = 0, staged_before = 0;      // bytes copied before init
  std::optional<World> forked_from;                   // the rank whose child this process is, which is none itself
  std::string how;                                    // the ranks met
  std::string init_call = "init()";                   // as the user writes it
  std::string notes;                                  // on settings, that the last init has logged
};
GlobalState& global_state();
// Only tests set it, whose ranks are threads: the state of the calling thread's rank, or nullptr.
extern GlobalState* (*global_state_of_thread)();

// Does nothing on a rank that is not to write. asked: by whom, for the error.
void start_timeline(Timeline&, const World&, const std::string& pattern, bool mark_cycles, bool by_bucket,
                    const std::string& asked);
std::shared_ptr<Compressor> compressor(int codec);   // throws Error{invalid_argument} if there is none
void forget_residuals(const std::function<bool(int group)>& ended);  // what was left behind in groups that are no more
std::shared_ptr<Engine> engine();                     // throws Error{shut_down} when there is none
void set_last_error(const std::string& text);         // of the calling thread
void keep_owner(void* data, std::function<void()> free);  // until lightcc_free(data)
[[noreturn]] inline void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

// The body of every function of the C API. sign: -1 for those that return a number on success.
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
