// A member's part in names that two threads of a rank use at the same time (control/coordinator_names.cc).
#include "engine/group_engine.h"

namespace lightcc {

void GroupEngine::contended(const std::string& key) {
  progress_lock_.assert_held();
  // From now on, for the fast path; the coordinator's words follow.
  if (withdrawn_.emplace(key, why_withdrawn(group_->rank(group_->index()))).second)
    send_up(Contended{key, group_->index()});
}

void GroupEngine::receive(const NameWithdrawn& withdrawn) {
  withdrawn_[withdrawn.key] = withdrawn.text;
  receive(Failure{withdrawn.key, Code::mismatch, withdrawn.text});
  send_up(NameGivenUp{withdrawn.key, group_->index()});
}

}  // namespace lightcc
