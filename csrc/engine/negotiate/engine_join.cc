// join() of one rank: announced in every process set that the rank belongs to, it ends when all have joined in each of
// them. What the rank submitted before goes first, since a group engine keeps the order; nothing is submitted
// meanwhile.
#include "engine/engine_impl.h"

namespace lightcc {

void Engine::Impl::join(const RequestPtr& request) {
  progress_lock_.assert_held();
  join_ = request;
  join_parts_ = int(group_engines_.size());
  for (auto& [id, group_engine] : group_engines_) group_engine->submit(request);
}

// A group engine is done with it, in success or failure: does join() go on nevertheless?
bool Engine::Impl::join_goes_on(const RequestPtr& request, Code code, const std::string& text) {
  progress_lock_.assert_held();
  if (request->finished.load(std::memory_order_relaxed)) return true;  // it failed as a whole before
  const bool done_here = code == Code::ok || code == Code::invalid_argument;  // that is, its process set was removed
  if (request == join_ && done_here && --join_parts_ > 0) return true;
  if (request == join_ && !done_here && !epoch_.over() && !stopping_) {
    // It fails with the epoch, once what can still finish has finished.
    apply(epoch_event::JoinFailed{{code, text.substr(request->title().size() + 2)}});
    return true;
  }
  join_.reset();
  inbox_.end_join(code == Code::ok);
  return false;
}

}  // namespace lightcc
