// A collective of several stages, through which a vector passes in parts (chunks, or tensors). Each stage takes the
// parts in their order. While it works on one, the stages before it work on later ones, so that the network, the
// memory and the cores are busy at the same time.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "collective/phases.h"

namespace lightcc {

class Pipeline {
 public:
  struct Stage {
    const char* name;  // of its phase in a timeline
    size_t parts;      // that pass through it
    std::function<std::unique_ptr<Work>(size_t part)> start;
    // How many parts it may have begun by now; none: those that have left the stage before, or all.
    std::function<size_t()> ready = nullptr;
    const std::vector<int>* members = nullptr;  // whom its works number in waiting_for(); nullptr: the group's members
    size_t at_once = 1;                         // works in flight at most
    // Where collectives use a stage in their order: the number of the one whose turn it is, and that of this one. A
    // collective passes the turn on when its parts have left the stage, or are in flight where several may be.
    uint64_t* turn = nullptr;
    uint64_t number = 0;
  };

  explicit Pipeline(std::vector<Stage>);
  bool step();
  bool done() const { return left(stages_.size() - 1) == stages_.back().stage.parts; }
  size_t left(size_t stage) const { return stages_[stage].left; }  // so many parts
  int waiting_for() const;             // whoever holds up the oldest part; -1: nobody
  void note(PhaseTimes&) const;
  void clear();                        // drops what is in flight

 private:
  struct Running {
    Stage stage;
    std::vector<std::unique_ptr<Work>> works = {};  // in flight, the oldest first
    size_t left = 0;
    size_t begun() const { return left + works.size(); }
  };
  size_t ready(size_t stage) const;
  bool step(size_t stage);

  std::vector<Running> stages_;
};

}  // namespace lightcc
