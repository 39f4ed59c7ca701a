// What one rank tells the judge (judge.h) of itself: what its only waiting thread has been blocked on for long, and
// that it goes on; each once.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace lightcc {

class Disputes {
 public:
  explicit Disputes(int rank) { own_.rank = rank; }

  void block(const Request& request) {
    if (blocked()) return;
    own_.group = request.group, own_.kind = request.what.kind, own_.key = request.key, automatic_ = request.automatic;
    ++own_.state, untold_ = true;
  }
  void go_on() {
    if (!blocked()) return;
    own_.group = -1, own_.kind = Kind::barrier, own_.key.clear();
    ++own_.state, untold_ = true;
  }
  bool blocked() const { return own_.group >= 0; }
  bool blocked(uint32_t state) const { return blocked() && own_.state == state; }
  // What it is blocked on, while it is.
  int group() const { return own_.group; }
  Kind kind() const { return own_.kind; }
  bool automatic() const { return automatic_; }
  const std::string& key() const { return own_.key; }

  void accuse(const Accuse& accuse) { accusations_.push_back(accuse); }
  bool pending() const { return untold_ || !accusations_.empty(); }
  std::optional<Stuck> news() { return std::exchange(untold_, false) ? std::optional(own_) : std::nullopt; }
  std::vector<Accuse> accusations() { return std::exchange(accusations_, {}); }

  // It has said yes to an accusation, and stands by that until the request at issue has finished.
  struct Plead {
    Stuck own;
    bool automatic;
    Accuse accuse;
    bool is_of(const Request& request) const { return own.group == request.group && own.key == request.key; }
  };
  void plead(const Accuse& accuse) { plead_ = Plead{own_, automatic_, accuse}; }
  std::optional<Plead>& pleaded() { return plead_; }

 private:
  Stuck own_;
  bool automatic_ = false;
  bool untold_ = false;
  std::optional<Plead> plead_;
  std::vector<Accuse> accusations_;  // not yet answered
};

}  // namespace lightcc
