#include "collective/execution.h"

#include <cstring>
#include <utility>

#include "base/error.h"
#include "collective/adasum.h"
#include "device/adasum.h"

namespace lightcc {
namespace {
constexpr size_t kPieceBytes = 128 << 10;  // reduced out of the cache that it was received into
constexpr size_t kStepBytes = 512 << 10;   // the bounded work of one step()
constexpr size_t kBulkBytes = 64 << 10;    // sends of less are cheaper through the link's memory
constexpr int64_t kPostedPieces = 4;       // at a time, the awaited one included
constexpr int64_t kDotElements = 4 << 10;  // added up as one, so that the sum's bits do not depend on the records

// The tensors' parts of [begin, begin + count) of the whole vector: visit(tensor, begin, count).
template <class Visit>
void for_tensors(const std::vector<TensorPlace>& tensors, int64_t begin, int64_t count, Visit visit) {
  auto one = std::partition_point(tensors.begin(), tensors.end(),
                                  [&](const TensorPlace& t) { return t.offset + t.count <= begin; });
  for (; one != tensors.end() && one->offset < begin + count; ++one) {
    const int64_t first = std::max(begin, one->offset), last = std::min(begin + count, one->offset + one->count);
    if (first < last) visit(size_t(one - tensors.begin()), first, last - first);
  }
}
}  // namespace

Execution::Execution(std::shared_ptr<const Schedule> schedule, const Collective& c, std::span<Link* const> links)
    : schedule_(std::move(schedule)), links_(links),
      reduction_{c.dtype, is_adasum(c) ? ReduceOp::sum : c.op, c.pre, c.post},  // of one vector: the factors
      index_(c.index), element_bytes_(size_of(c.dtype)), tensors_(c.tensors),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(size_t(scratch_count(*schedule_)) * element_bytes_)),
      dots_(std::max(size_t(count_in(Memory::dots, *schedule_)), kDotProducts * tensors_.size())),
      memories_{static_cast<std::byte*>(const_cast<void*>(c.input)), static_cast<std::byte*>(c.output),
                scratch_.get(), reinterpret_cast<std::byte*>(dots_.data())},
      last_(2 * links.size(), -1) {
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
      if (steps[i].is_local()) continue;
      if (steps[i].kind == Step::Action::recv_dot) std::fill_n(dots_.begin(), kDotProducts * tensors_.size(), 0.0);
      if (steps[i].count == 0) continue;  // nothing waits for it
      progress_[i].after = std::exchange(last_of(steps[i]), int(i));
    }
    for (const Step& step : steps)
      if (!step.is_local()) last_of(step) = -1;
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
    if (!steps[i].is_local() && may_move(i)) return steps[i].peer;
  return -1;
}

std::byte* Execution::at(Place place, int64_t element) const {
  return memories_[int(place.memory)] + size_t(place.offset + element) * bytes_in(place.memory);
}

void Execution::store(std::byte* to, std::span<const void* const> from, int64_t count, double pre,
                      double post) const {
  void* const out[] = {to};
  reduce({reduction_.dtype, reduction_.op, pre, post}, out, from, size_t(count));
}

// The record itself, or a copy where its numbers may not be read in C++: a record may come at an odd address.
const std::byte* Execution::aligned(const std::byte* record, size_t bytes, size_t element_bytes) {
  if (reinterpret_cast<uintptr_t>(record) % element_bytes == 0) return record;
  if (aligned_.size() < bytes) aligned_.resize(bytes);
  std::memcpy(aligned_.data(), record, bytes);
  return aligned_.data();
}

// Moves the step's next piece, a whole record, if its link lets it; returns the bytes. Both ends of a link
// have the same record_bytes(), so they cut a step into the same records.
size_t Execution::move_piece(const Step& step, Progress& progress) {
  Link* const link = step.is_local() ? nullptr : links_[size_t(step.peer)];
  const size_t element_bytes = bytes_in(step.writes() ? step.to.memory : step.from.memory);
  const size_t most_bytes = link ? std::min(link->record_bytes(), kPieceBytes) : kPieceBytes;
  if (most_bytes < element_bytes) {
    throw Error(Code::internal, "rank " + std::to_string(step.peer) + " of the group is reached by records of " +
                                    std::to_string(most_bytes) + " bytes, which cannot hold an element of " +
                                    std::to_string(element_bytes));
  }
  const int64_t n = std::min(step.count - progress.moved, int64_t(most_bytes / element_bytes));
  const size_t bytes = size_t(n) * element_bytes;
  const double post = step.completes ? reduction_.post : 1.0;

  switch (step.kind) {
    case Step::Action::send:
      if (!send_piece(step, progress.moved, bytes)) return 0;
      break;
    case Step::Action::recv:
      if (!receive_piece(step, progress, int64_t(most_bytes / element_bytes), bytes)) return 0;
      break;
    case Step::Action::recv_reduce: {
      const std::byte* record = link->peek(bytes);
      if (!record) return 0;
      record = aligned(record, bytes, element_bytes);
      // The lower rank's share first, so that two ranks that exchange theirs end with equal bits.
      const void* ours = at(step.from, progress.moved);
      const void* in[] = {step.peer < index_ ? record : ours, step.peer < index_ ? ours : record};
      std::byte* to = at(step.to, progress.moved);
      if (step.to.memory == Memory::dots) {
        void* const out[] = {to};
        reduce({DType::float64, ReduceOp::sum}, out, in, size_t(n));
      } else {
        store(to, in, n, 1.0, post);
      }
      link->consume(bytes);
      break;
    }
    case Step::Action::recv_dot: {
      const std::byte* record = link->peek(bytes);
      if (!record) return 0;
      stage(at(step.to, progress.moved), record, bytes);
      link->consume(bytes);
      progress.moved += n;
      add_dots(step, progress);
      return bytes;
    }
    case Step::Action::reduce: reduce_piece(step, progress.moved, n); break;
    case Step::Action::combine: combine_piece(step, progress.moved, n); break;
    case Step::Action::copy: {
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

// While what has arrived is still in the cache.
void Execution::add_dots(const Step& step, Progress& progress) {
  const bool all = progress.moved == step.count;
  while (progress.dotted + kDotElements <= progress.moved || (all && progress.dotted < step.count)) {
    const int64_t n = std::min(kDotElements, step.count - progress.dotted);
    for_tensors(tensors_, step.from.offset + progress.dotted, n, [&](size_t tensor, int64_t begin, int64_t count) {
      const void* ours = at({step.from.memory, begin}, 0);
      const void* theirs = at(step.to, begin - step.from.offset);
      const bool swap = step.peer < index_;  // the lower rank's vector is a
      add_dot_products(reduction_.dtype, swap ? theirs : ours, swap ? ours : theirs, size_t(count),
                       &dots_[kDotProducts * tensor]);
    });
    progress.dotted += n;
  }
}

bool Execution::send_piece(const Step& step, int64_t moved, size_t bytes) {
  Link& link = *links_[size_t(step.peer)];
  const std::byte* const from = at(step.from, moved);
  BulkLink* const bulk = step.may_lend && size_t(step.count) * element_bytes_ >= kBulkBytes ? link.bulk() : nullptr;
  if (bulk) {
    uses_bulk_ = true;
    return bulk->send_from(from, bytes);
  }
  std::byte* const record = link.reserve(bytes);
  if (!record) return false;
  stage(record, from, bytes);
  link.commit(bytes);
  return true;
}

// most: elements of a piece that is not the last.
bool Execution::receive_piece(const Step& step, Progress& progress, int64_t most, size_t bytes) {
  Link& link = *links_[size_t(step.peer)];
  BulkLink* const bulk = link.bulk();
  const int64_t ahead = bulk ? std::min(step.count, progress.moved + most * kPostedPieces) : 0;
  uses_bulk_ = uses_bulk_ || (bulk && size_t(step.count) * element_bytes_ >= kBulkBytes);
  while (progress.posted < ahead) {
    const int64_t n = std::min(step.count - progress.posted, most);
    bulk->post(at(step.to, progress.posted), size_t(n) * bytes_in(step.to.memory));
    progress.posted += n;
  }
  const std::byte* const record = link.peek(bytes);
  if (!record) return false;
  if (std::byte* const to = at(step.to, progress.moved); record != to) stage(to, record, bytes);
  link.consume(bytes);
  return true;
}

void Execution::reduce_piece(const Step& step, int64_t moved, int64_t n) {
  std::vector<const void*> in{at(step.from, moved)};
  for (int slot = 0; slot < step.slots; ++slot) in.push_back(at(step.theirs, slot * step.count + moved));
  store(at(step.to, moved), in, n, 1.0, step.completes ? reduction_.post : 1.0);
}

void Execution::combine_piece(const Step& step, int64_t moved, int64_t n) {
  const double post = step.completes ? reduction_.post : 1.0;
  for_tensors(tensors_, step.from.offset + moved, n, [&](size_t tensor, int64_t begin, int64_t count) {
    const AdasumFactors by = adasum_factors(&dots_[size_t(step.dots) + kDotProducts * tensor]);
    const int64_t element = begin - step.from.offset;
    const void *ours = at(step.from, element), *theirs = at(step.theirs, element);
    const bool swap = step.peer < index_;
    add_scaled(reduction_.dtype, swap ? theirs : ours, by.a * post, swap ? ours : theirs, by.b * post,
               at(step.to, element), size_t(count));
  });
}

}  // namespace lightcc
