// The fast path of a call on which its rank blocks while it has nothing else in flight: the members compare their calls
// with each other, without negotiation. Invariants:
// 1. Calls are made in turns. In each, every member writes one of its slots once: a call (its hash, and its data or
//    where they lie) or a refusal.
// 2. A slot once written is not changed in its turn. So all members see the same slots and conclude the same: equal
//    calls run, all others are negotiated.
// 3. A member that sees others wait while it is busy with something else refuses.
// 4. Two slots a member are enough: a member that writes that of turn t has seen all of turn t-1, and their writers had
//    finished turn t-2 before.
// Where the slots are is a derived class's to know: in shared memory (shared_fast_path.h), or with the other member of
// two, on another host (remote_fast_path.h).
#pragma once
#include <memory>
#include <vector>

#include "collective/collective.h"
#include "net/group.h"

namespace lightcc {

// A step of wyhash (Wang Yi 2019) for each word: both halves of one 128-bit product. It is on the way of every call.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  __extension__ using Uint128 = unsigned __int128;
  const Uint128 product = Uint128(hash ^ 0xa0761d6478bd642f) * (word ^ 0xe7037ed1a0b428db);
  return uint64_t(product) ^ uint64_t(product >> 64);
}

class FastPath {
 public:
  enum class State { idle, waiting, running, done, refused };

  FastPath(const Group&, size_t eager_bytes);  // the data of calls of so many bytes lie in the slots
  virtual ~FastPath() = default;

  bool ready() const;  // no turn is open: a call may begin
  // The allreduce that begin() starts, to be filled in while the fast path is not active(): dtype, op, factors, input,
  // output and count. It is one object for all calls, since a new one costs as much as the sum of a few numbers.
  Collective& call() { return call_; }
  // hash stands for all that must agree. The caller has nothing else in flight in this group, starts nothing else in it
  // while active(), and negotiates what is refused.
  void begin(uint64_t hash);
  bool active() const { return state_ == State::waiting || state_ == State::running; }
  State step(bool* moved = nullptr);  // one bounded piece; after done or refused it is idle
  // This rank does something else; true if it refused. At once, or if others have waited for a while: what it does is
  // often over in a moment, and then it comes.
  bool refuse_if_awaited(uint64_t patience_ns);
  void member_left(int member) { left_[size_t(member)] = 1; }
  void drop() { state_ = State::idle, work_.reset(); }  // the epoch ends
  std::vector<int> missing() const;   // members that have not written their slot of the open turn

 protected:
  struct Slot {
    bool refusal;
    uint64_t hash;
    const void* data;                 // of a call that is eager
  };
  const Group& group_;

 private:
  virtual bool has_written(int member, uint64_t turn) const = 0;
  virtual Slot slot(int member, uint64_t turn, size_t bytes) const = 0;  // that has been written, of a call of so many
  // This member's slot: of the call, with its data if `eager`; or a refusal (nullptr).
  virtual void write(uint64_t turn, uint64_t hash, const Collective*, bool eager) = 0;
  virtual std::unique_ptr<Work> start(const Collective&, uint64_t turn) = 0;  // of equal calls that are not eager
  bool is_eager() const { return bytes_ <= eager_bytes_; }
  State finish(State);
  void add_up();

  const size_t eager_bytes_;
  std::vector<char> left_;
  uint64_t turn_ = 0;                 // for which this rank wrote a slot last
  State state_ = State::idle;
  Collective call_{};
  uint64_t hash_ = 0;
  uint64_t awaited_ns_ = 0;           // since when, as far as it was seen; 0: not
  size_t bytes_ = 0;
  int seen_ = 0;                      // members whose slot of the turn holds the same call
  std::vector<const void*> inputs_;
  std::unique_ptr<Work> work_;
};

}  // namespace lightcc
