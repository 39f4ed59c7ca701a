// The process sets of a rank, and the group engine of each that the rank belongs to. They are made and removed at a
// point at which all ranks are. join() is announced in all of them, behind what the rank submitted before, and ends
// when all ranks have joined in each; nothing is submitted meanwhile. Only whoever holds the progress lock calls it.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "engine/negotiate/group_engine.h"
#include "engine/request/inbox.h"

namespace lightcc {

class ProcessSets {
 public:
  // Everything outlives it.
  ProcessSets(const GroupResources&, Inbox&);

  GroupEngine& world() { return *engines_.at(0); }
  GroupEngine* find(int id) {                           // nullptr: there is none, or this rank is not in it
    const auto it = engines_.find(id);
    return it == engines_.end() ? nullptr : it->second.get();
  }
  size_t size() const { return engines_.size(); }
  template <class Body> void for_each(Body body) {      // in the order of their numbers
    for (auto& [id, engine] : engines_) body(*engine);
  }

  void change(Request&);                                // of Kind::add_group or remove_group
  std::string plans_text();
  void await_turn(const Group&);                        // nccl_launches.h
  void fail_all(Code, const std::string& text);
  void end_nccl(uint64_t deadline_ns);

  void join(const RequestPtr&);
  const RequestPtr& joining() const { return join_; }   // nullptr: this rank has not called join()
  // A group engine is done with it: does it go on nevertheless? `over`: all of them are done with it, or will be.
  enum class Join { goes_on, fails, over };             // fails: once what can still finish has finished
  Join join_ended(const RequestPtr&, Code, bool over);

 private:
  GroupEngine* add(std::vector<int> ranks, int* id);    // nullptr: this rank is not in it
  void tell_who_has_left(GroupEngine& added);

  const GroupResources& shared_;
  Inbox& inbox_;
  std::map<int, std::unique_ptr<GroupEngine>> engines_;
  RequestPtr join_;
  int join_parts_ = 0;                                  // group engines in which not all have joined
};

}  // namespace lightcc
