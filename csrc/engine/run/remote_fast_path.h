// The fast path of two members on different hosts: each sends its slot to the other on the control plane, so what a
// member wrote before it left comes before that it has left. A small call's data travel in its slot, and each member
// adds up both: a call takes as long as one message. With a larger one's hash alone both begin at once.
#pragma once
#include <array>
#include <functional>
#include <string>

#include "engine/negotiate/control/call_slot.h"
#include "engine/run/fast_path.h"

namespace lightcc {

class RemoteFastPath : public FastPath {
 public:
  static constexpr size_t kEagerBytes = 32 << 10;  // more fill the control plane's links
  using Send = std::function<void(std::string)>;   // to the other member
  using Start = std::function<std::unique_ptr<Work>(const Collective&)>;

  RemoteFastPath(const Group&, Send, Start);       // of two members
  // The other member's slot, as it came. Throws Error{internal} if it cannot be that of this turn or of the next.
  void receive(std::string bytes);
  void remind();                                   // the other one, which may sleep: it looks at what it has received

 private:
  bool has_written(int member, uint64_t turn) const override;
  Slot slot(int member, uint64_t turn, size_t bytes) const override;
  void write(uint64_t turn, uint64_t hash, const Collective*, bool eager) override;
  std::unique_ptr<Work> start(const Collective&, uint64_t turn) override;

  const Send send_;
  const Start start_;
  CallSlot own_{};                                 // the last, without its data
  uint64_t received_ = 0;                          // the turn of the other's last slot
  std::array<std::string, 2> slots_;               // of the other, by turn
};

}  // namespace lightcc
