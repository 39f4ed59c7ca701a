#include "collective/execution.h"

#include "base/error.h"

namespace lightcc {
namespace {
constexpr size_t kPieceBytes = 64 << 10;   // reduced out of the cache that it was received into
constexpr size_t kStepBytes = 256 << 10;   // the bounded work of one step()
}  // namespace

Execution::Execution(std::shared_ptr<const Schedule> schedule, const Collective& c, std::span<Link* const> links)
    : schedule_(std::move(schedule)), links_(links), reduction_{c.dtype, c.op, c.pre, c.post}, index_(c.index),
      element_bytes_(size_of(c.dtype)),
      scratch_(std::make_unique<std::byte[]>(size_t(scratch_count(*schedule_)) * element_bytes_)),
      memories_{static_cast<std::byte*>(const_cast<void*>(c.input)), static_cast<std::byte*>(c.output),
                scratch_.get()} {
  enter_round();
}

// Passes over rounds in which this rank has nothing to do.
void Execution::enter_round() {
  for (; !done(); ++round_) {
    const auto& steps = (*schedule_)[round_];
    progress_.assign(steps.size(), {});
    bool empty = true;
    for (size_t i = 0; i < steps.size(); ++i) {
      empty = empty && steps[i].count == 0;
      if (steps[i].kind == Step::Kind::copy) continue;
      for (size_t j = 0; j < i; ++j)
        if (steps[j].peer == steps[i].peer && steps[j].writes() == steps[i].writes()) progress_[i].after = int(j);
    }
    if (!empty) return;
  }
}

bool Execution::may_move(size_t i) const {
  const auto& steps = (*schedule_)[round_];
  const int after = progress_[i].after;
  return progress_[i].moved < steps[i].count && (after < 0 || progress_[after].moved == steps[after].count);
}

bool Execution::step() {
  size_t bytes = 0;
  while (!done() && bytes < kStepBytes) {
    const auto& steps = (*schedule_)[round_];
    size_t pass_bytes = 0;
    bool complete = true;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (may_move(i)) pass_bytes += move_piece(steps[i], progress_[i]);
      complete = complete && progress_[i].moved == steps[i].count;
    }
    if (complete) {
      ++round_;
      enter_round();
    } else if (pass_bytes == 0) {
      break;
    }
    bytes += pass_bytes;
  }
  return bytes != 0;
}

int Execution::waiting_for() const {
  if (done()) return -1;
  const auto& steps = (*schedule_)[round_];
  for (size_t i = 0; i < steps.size(); ++i)
    if (steps[i].peer >= 0 && may_move(i)) return steps[i].peer;
  return -1;
}

std::byte* Execution::at(Place place, int64_t element) const {
  return memories_[int(place.memory)] + size_t(place.offset + element) * element_bytes_;
}

void Execution::store(std::byte* to, std::span<const void* const> from, int64_t count, double pre,
                      double post) const {
  void* const out[] = {to};
  reduce({reduction_.dtype, reduction_.op, pre, post}, out, from, size_t(count));
}

// Moves the step's next piece, a whole record, if its link lets it; returns the bytes. Both ends of a link
// have the same record_bytes(), so they cut a step into the same records.
size_t Execution::move_piece(const Step& step, Progress& progress) {
  Link* const link = step.peer < 0 ? nullptr : links_[size_t(step.peer)];
  const size_t most_bytes = link ? std::min(link->record_bytes(), kPieceBytes) : kPieceBytes;
  if (most_bytes < element_bytes_) {
    throw Error(Code::internal, "rank " + std::to_string(step.peer) + " of the group is reached by records of " +
                                    std::to_string(most_bytes) + " bytes, which cannot hold one " +
                                    name_of(reduction_.dtype));
  }
  const int64_t n = std::min(step.count - progress.moved, int64_t(most_bytes / element_bytes_));
  const size_t bytes = size_t(n) * element_bytes_;
  const double post = step.completes ? reduction_.post : 1.0;

  switch (step.kind) {
    case Step::Kind::send: {
      std::byte* record = link->reserve(bytes);
      if (!record) return 0;
      lightcc::copy(record, at(step.from, progress.moved), bytes);
      link->commit(bytes);
      break;
    }
    case Step::Kind::recv: {
      const std::byte* record = link->peek(bytes);
      if (!record) return 0;
      lightcc::copy(at(step.to, progress.moved), record, bytes);
      link->consume(bytes);
      break;
    }
    case Step::Kind::recv_reduce: {
      const std::byte* record = link->peek(bytes);
      if (!record) return 0;
      // The lower rank's share first, so that two ranks that exchange theirs end with equal bits.
      const void* ours = at(step.from, progress.moved);
      const void* in[] = {step.peer < index_ ? record : ours, step.peer < index_ ? ours : record};
      store(at(step.to, progress.moved), in, n, 1.0, post);
      link->consume(bytes);
      break;
    }
    case Step::Kind::copy: {
      const double pre = step.from.memory == Memory::input ? reduction_.pre : 1.0;
      const void* in[] = {at(step.from, progress.moved)};
      std::byte* to = at(step.to, progress.moved);
      if (pre != 1.0 || post != 1.0) store(to, in, n, pre, post);
      else if (to != in[0]) lightcc::copy(to, in[0], bytes);
      break;
    }
  }
  progress.moved += n;
  return bytes;
}

}  // namespace lightcc
