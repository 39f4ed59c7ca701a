// Runs one Schedule over Links: the only place where schedules meet payload. Each step streams through the
// links' own memory, piece by piece: copied or reduced straight out of it. float16 and bfloat16 are rounded
// after each step here, not once at the end: what travels between ranks is the wire type.
// Links that can (BulkLink) carry records from and into the collective's own memory. They may use it until they are
// released, which is the caller's to do: also an Execution that is done may still be sending out of it.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "collective/collective.h"
#include "collective/schedule.h"
#include "device/device.h"
#include "net/link.h"

namespace lightcc {

class Execution : public Work {
 public:
  // links[member] leads there; nullptr at our own place. They and the Collective's memory must outlive this.
  // One thread at a time, as for Link. What a link throws passes through; the collective cannot go on then.
  Execution(std::shared_ptr<const Schedule>, const Collective&, std::span<Link* const> links);

  bool step() override;
  bool done() const override { return round_ == schedule_->size(); }
  int waiting_for() const override;
  // Its links may still send out of the collective's memory, or have something to tell at their release.
  bool uses_bulk() const { return uses_bulk_; }

 private:
  struct Progress {
    int64_t moved = 0;  // elements
    int64_t posted = 0; // of a recv, where its link takes posts; at least as many as moved
    int64_t dotted = 0; // of them, already in the dot products
    int after = -1;     // the step of this round that goes first: same peer, same direction
  };
  void enter_round();
  bool may_move(size_t step) const;
  size_t move_piece(const Step&, Progress&);
  bool send_piece(const Step&, int64_t moved, size_t bytes);
  bool receive_piece(const Step&, Progress&, int64_t most, size_t bytes);
  void add_dots(const Step&, Progress&);
  void reduce_piece(const Step&, int64_t moved, int64_t count);
  void combine_piece(const Step&, int64_t moved, int64_t count);
  size_t bytes_in(Memory memory) const { return memory == Memory::dots ? sizeof(double) : element_bytes_; }
  int& last_of(const Step& step) { return last_[2 * size_t(step.peer) + step.writes()]; }
  std::byte* at(Place, int64_t element) const;
  const std::byte* aligned(const std::byte* record, size_t bytes, size_t element_bytes);
  void store(std::byte* to, std::span<const void* const> from, int64_t count, double pre, double post) const;

  std::shared_ptr<const Schedule> schedule_;
  std::span<Link* const> links_;
  Reduction reduction_;
  int index_;
  size_t element_bytes_;
  std::vector<TensorPlace> tensors_;
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<std::byte> aligned_;  // a record that came at no address of its numbers' kind
  std::vector<double> dots_;
  std::byte* memories_[4];  // by Memory; the input is never written
  size_t round_ = 0;
  bool uses_bulk_ = false;
  std::vector<Progress> progress_;  // of the round's steps
  std::vector<int> last_;           // while a round is entered, by peer and direction: the step that was last so far
};

}  // namespace lightcc
