// The short way for a call on which its rank blocks while it has nothing else in flight: it meets the others' calls in
// one line of shared memory, without negotiation.
//
// Members write signs in turns, one each a turn: a call (its hash, and its data or where they lie) or a refusal. A
// sign is never taken back, so all members see the same signs of a turn and conclude the same: equal calls run, all
// others are negotiated. A member that sees others wait while it is busy with something else refuses. Two slots are
// enough: who writes its sign of turn t has seen all of turn t-1, and their writers had finished turn t-2 before.
#pragma once
#include <vector>

#include "collective/shared.h"
#include "engine/run.h"

namespace lightcc {

inline uint64_t mix(uint64_t hash, uint64_t word) {  // a step of MurmurHash3's 64-bit finalizer for each word
  hash = (hash ^ word) * 0xff51afd7ed558ccd;
  hash = (hash ^ hash >> 33) * 0xc4ceb9fe1a85ec53;
  return hash ^ hash >> 33;
}

class Express {
 public:
  enum class State { idle, waiting, running, done, refused };

  Express(Host&, int group, const Members&, SharedBackend&);

  bool ready();  // no turn is open: a call may begin
  // An allreduce; hash stands for all that must agree. The caller has nothing else in flight in this group, starts
  // nothing else in it while active(), and negotiates what is refused.
  void begin(const Collective&, uint64_t hash);
  bool active() const { return state_ == State::waiting || state_ == State::running; }
  State step(bool* moved = nullptr);  // one bounded piece; after done or refused it is idle
  // This rank does something else; true if it refused. At once, or if others have waited for a while: what it does is
  // often over in a moment, and then it comes.
  bool refuse_if_awaited(bool at_once);
  void gone(int member) { gone_[size_t(member)] = 1; }
  void drop() { state_ = State::idle, work_.reset(); }  // the epoch ends
  std::vector<int> missing() const;   // members whose sign of the open turn is not there

 private:
  Sign& sign(int member, uint64_t turn) const;
  bool has_signed(int member, uint64_t turn) const;
  bool refused(int member) const;     // in the open turn
  void write(bool refusal);
  State finish(State);
  void add_up();

  Host& host_;
  const int group_;
  const Members& members_;
  SharedBackend& shared_;
  std::vector<char> gone_;
  uint64_t turn_ = 0;                 // whose sign this rank wrote last
  State state_ = State::idle;
  Collective call_{};
  uint64_t hash_ = 0;
  uint64_t awaited_ns_ = 0;           // since when, as far as it was seen; 0: not
  size_t bytes_ = 0;
  int seen_ = 0;                      // members whose sign of the turn is the same call
  std::vector<const void*> inputs_;
  std::unique_ptr<Work> work_;
};

}  // namespace lightcc
