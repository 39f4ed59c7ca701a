#include "collective/move.h"

#include <algorithm>

#include "device/device.h"

namespace lightcc {
namespace {

// Both ends know the size of a part, so both know its blocks.
size_t block_of(size_t part_bytes, size_t moved) { return std::min(Host::kRecordBytes, part_bytes - moved); }

}  // namespace

Move::Move(SharedBackend& backend, const Collective& c)
    : backend_(backend), c_(c), to_all_(c.kind != Kind::alltoall), out_(size_t(c.size)), in_(size_t(c.size)),
      heard_taken_(size_t(c.size)) {
  const size_t element = size_of(c.dtype);
  auto* input = const_cast<std::byte*>(static_cast<const std::byte*>(c.input));
  auto* output = static_cast<std::byte*>(c.output);
  if (c.kind == Kind::broadcast) {
    Part& part = c.index == c.root ? out_[size_t(c.index)] : in_[size_t(c.root)];
    part.data = output, part.bytes = size_t(c.count) * element;
    return;
  }
  for (size_t v = 0, read = 0, written = 0; v < size_t(c.size); ++v) {
    in_[v].data = output + written, in_[v].bytes = size_t(c.counts[v]) * element;
    written += in_[v].bytes;
    if (to_all_) continue;
    out_[v].data = input + read, out_[v].bytes = size_t(c.send[v]) * element;
    read += out_[v].bytes;
  }
  Part& own = in_[size_t(c.index)];
  if (to_all_) out_[size_t(c.index)].data = input, out_[size_t(c.index)].bytes = own.bytes;
  own_ = own, own_from_ = out_[size_t(c.index)].data;
  if (!to_all_) out_[size_t(c.index)] = {};
  own = {};
}

std::byte* Move::reserve(int to, size_t n) { return to_all_ ? backend_.reserve(n) : backend_.links_[to]->reserve(n); }
void Move::commit(int to, size_t n) { to_all_ ? backend_.commit(n) : backend_.links_[to]->commit(n); }
const std::byte* Move::peek(int from, size_t n) {
  return to_all_ ? backend_.peek(from, n) : backend_.links_[from]->peek(n);
}
void Move::consume(int from, size_t n) { to_all_ ? backend_.consume(from, n) : backend_.links_[from]->consume(n); }

bool Move::offer(Part& part, int to) {
  if (part.bytes == 0 || part.offered) return false;
  std::byte* record = reserve(to, sizeof(int64_t));
  if (!record) return false;
  const int64_t offset = backend_.host_.arena()->offset_of(part.data, part.bytes);
  new (record) int64_t(offset);
  commit(to, sizeof(int64_t));
  part.offered = true, part.direct = offset >= 0;
  if (part.direct) part.moved = part.bytes;
  return true;
}

bool Move::publish(Part& part, int to) {
  if (!part.offered || part.over()) return false;
  const size_t n = block_of(part.bytes, part.moved);
  std::byte* record = reserve(to, n);
  if (!record) return false;
  lightcc::copy(record, part.data + part.moved, n);
  commit(to, n);
  part.moved += n;
  return true;
}

bool Move::take(Part& part, int from) {
  if (part.over()) return false;
  if (!part.offered) {
    const std::byte* record = peek(from, sizeof(int64_t));
    if (!record) return false;
    const int64_t offset = *reinterpret_cast<const int64_t*>(record);
    consume(from, sizeof(int64_t));
    part.offered = true, part.direct = offset >= 0;
    if (part.direct) part.from = backend_.host_.base(backend_.members_[size_t(from)]) + offset;
    return true;
  }
  const size_t n = block_of(part.bytes, part.moved);
  const std::byte* block = part.direct ? part.from + part.moved : peek(from, n);
  if (!block) return false;
  lightcc::copy(part.data + part.moved, block, n);
  if (!part.direct) consume(from, n);
  part.moved += n;
  return true;
}

// On a link, behind the blocks that alltoall sends there.
bool Move::say_taken(int to) {
  Part& part = in_[size_t(to)];
  if (!part.direct || !part.over() || part.taken || (!to_all_ && !out_[size_t(to)].over())) return false;
  if (!backend_.links_[size_t(to)]->reserve(1)) return false;
  backend_.links_[size_t(to)]->commit(1);
  part.taken = true;
  return true;
}
bool Move::hear_taken(int from) {
  char& heard = heard_taken_[size_t(from)];
  if (!out(from).direct || heard || (!to_all_ && !in_[size_t(from)].over())) return false;
  if (!backend_.links_[size_t(from)]->peek(1)) return false;
  backend_.links_[size_t(from)]->consume(1);
  heard = 1;
  return true;
}

bool Move::copy_own() {
  if (own_.over()) return false;
  const size_t n = std::min(Host::kRecordBytes, own_.bytes - own_.moved);
  if (own_.data != own_from_) lightcc::copy(own_.data + own_.moved, own_from_ + own_.moved, n);
  own_.moved += n;
  return true;
}

bool Move::step() {
  bool moved = copy_own();
  for (int v = 0; v < c_.size; ++v) {
    moved |= offer(out_[size_t(v)], v);
    moved |= publish(out_[size_t(v)], v);
    if (v != c_.index) moved |= take(in_[size_t(v)], v);
  }
  done_ = own_.over() && out_[size_t(c_.index)].over();
  for (int v = 0; v < c_.size; ++v) {
    if (v == c_.index) continue;
    moved |= say_taken(v);
    moved |= hear_taken(v);
    const Part &gives = out_[size_t(v)], &takes = in_[size_t(v)];
    const bool heard = !out(v).direct || heard_taken_[size_t(v)];
    if (!gives.over() || !takes.over() || takes.direct != takes.taken || !heard) done_ = false, waiting_for_ = v;
  }
  return moved || done_;
}

}  // namespace lightcc
