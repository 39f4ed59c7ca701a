// The engine's process sets: one group engine for each that this rank belongs to, made and removed at a point at which
// all ranks are.
#include "engine/engine_impl.h"
#include "engine/lifecycle/hosts_subject.h"

namespace lightcc {

std::string Engine::Impl::plans_text() {
  while (!progress_lock_.try_lock()) {
    if (stopping_) return "";  // shutdown keeps the progress lock
    std::this_thread::yield();
  }
  std::string text;
  for (auto& [id, group_engine] : group_engines_) {
    const std::string plans = group_engine->plans_text();
    if (!plans.empty()) text += "process set " + std::to_string(id) + "\n" + plans;
  }
  progress_lock_.unlock();
  return text;
}

std::unique_ptr<GroupEngine> Engine::Impl::make_group_engine(std::shared_ptr<const Group> group) {
  return std::make_unique<GroupEngine>(*peers_, std::move(group), config_, outputs_, pinned_, counters_,
                                       tracing_, progress_lock_, launches_, effects_, surroundings_,
                                       CacheFile::of(config_.cache_dir, hosts_subject(*peers_, config_)));
}

// The members, or the id of the group to remove, came as the request's shape: so that ranks agree on them.
void Engine::Impl::change_groups(Request& request) {
  progress_lock_.assert_held();
  if (epoch_.over()) return;
  const Shape& numbers = request.what.tensors[0].shape;
  if (request.what.kind == Kind::remove_group) {
    int group = int(numbers[0]);
    if (auto it = group_engines_.find(group); it != group_engines_.end()) {
      it->second->fail_all(Code::invalid_argument, "its process set was removed");
      it->second->end_nccl(now_ns() + NcclLaunches::kQueuedNs);
      launches_.forget(group);
    }
    group_engines_.erase(group);
    peers_->reset_group(group);
    groups_.remove(group);
    inbox_.forget_group(group);
    request.changed_group = group;
    return;
  }
  const auto group = groups_.add({numbers.begin(), numbers.end()}, peers_->rank(), peers_->topology());
  if (group->contains(peers_->rank())) {
    auto& group_engine = group_engines_[group->id()];
    group_engine = make_group_engine(group);
    if (join_) {
      ++join_parts_;
      group_engine->submit(join_);
    }
  }
  request.changed_group = group->id();
}

}  // namespace lightcc
