#include "collective/copy_collective.h"

#include <algorithm>

#include "device/device.h"

namespace lightcc {
namespace {

// Both ends know the size of a transfer, so both know its blocks.
size_t block_of(size_t bytes, size_t moved) { return std::min(LocalRanks::kRecordBytes, bytes - moved); }

}  // namespace

CopyCollective::CopyCollective(SharedBackend& backend, const Collective& c)
    : backend_(backend),
      c_(c),
      to_all_(c.kind != Kind::alltoall),
      out_(size_t(c.size)),
      in_(size_t(c.size)),
      acked_(size_t(c.size)) {
  const size_t element = size_of(c.dtype);
  auto* input = const_cast<std::byte*>(static_cast<const std::byte*>(c.input));
  auto* output = static_cast<std::byte*>(c.output);
  if (c.kind == Kind::broadcast) {
    Transfer& transfer = c.index == c.root ? out_[size_t(c.index)] : in_[size_t(c.root)];
    transfer.data = output;
    transfer.bytes = size_t(c.count) * element;
    return;
  }
  for (size_t v = 0, read = 0, written = 0; v < size_t(c.size); ++v) {
    in_[v].data = output + written;
    in_[v].bytes = size_t(c.counts[v]) * element;
    written += in_[v].bytes;
    if (to_all_) continue;
    out_[v].data = input + read;
    out_[v].bytes = size_t(c.send[v]) * element;
    read += out_[v].bytes;
  }
  Transfer& own = in_[size_t(c.index)];
  if (to_all_) {
    out_[size_t(c.index)].data = input;
    out_[size_t(c.index)].bytes = own.bytes;
  }
  own_ = own;
  own_from_ = out_[size_t(c.index)].data;
  if (!to_all_) out_[size_t(c.index)] = {};
  own = {};
}

std::byte* CopyCollective::reserve(int to, size_t n) {
  return to_all_ ? backend_.reserve(n) : backend_.links_[to]->reserve(n);
}
void CopyCollective::commit(int to, size_t n) { to_all_ ? backend_.commit(n) : backend_.links_[to]->commit(n); }
const std::byte* CopyCollective::peek(int from, size_t n) {
  return to_all_ ? backend_.peek(from, n) : backend_.links_[from]->peek(n);
}
void CopyCollective::consume(int from, size_t n) {
  to_all_ ? backend_.consume(from, n) : backend_.links_[from]->consume(n);
}

bool CopyCollective::offer(Transfer& transfer, int to) {
  if (transfer.bytes == 0 || transfer.offered) return false;
  std::byte* record = reserve(to, sizeof(int64_t));
  if (!record) return false;
  const int64_t offset = backend_.local_ranks_.arena()->offset_of(transfer.data, transfer.bytes);
  new (record) int64_t(offset);
  commit(to, sizeof(int64_t));
  transfer.offered = true;
  transfer.direct = offset >= 0;
  if (transfer.direct) transfer.moved = transfer.bytes;
  return true;
}

bool CopyCollective::publish(Transfer& transfer, int to) {
  if (!transfer.offered || transfer.over()) return false;
  const size_t n = block_of(transfer.bytes, transfer.moved);
  std::byte* record = reserve(to, n);
  if (!record) return false;
  stage(record, transfer.data + transfer.moved, n);
  commit(to, n);
  transfer.moved += n;
  return true;
}

bool CopyCollective::receive(Transfer& transfer, int from) {
  if (transfer.over()) return false;
  if (!transfer.offered) {
    const std::byte* record = peek(from, sizeof(int64_t));
    if (!record) return false;
    const int64_t offset = *reinterpret_cast<const int64_t*>(record);
    consume(from, sizeof(int64_t));
    transfer.offered = true;
    transfer.direct = offset >= 0;
    if (transfer.direct) transfer.from = backend_.local_ranks_.base(backend_.members_[size_t(from)]) + offset;
    return true;
  }
  const size_t n = block_of(transfer.bytes, transfer.moved);
  const std::byte* block = transfer.direct ? transfer.from + transfer.moved : peek(from, n);
  if (!block) return false;
  std::byte* const to = transfer.data + transfer.moved;
  if (transfer.direct) {
    lightcc::copy(to, block, n);
  } else {
    stage(to, block, n);
    consume(from, n);
  }
  transfer.moved += n;
  return true;
}

// On a link, behind the blocks that alltoall sends there.
bool CopyCollective::send_ack(int to) {
  Transfer& transfer = in_[size_t(to)];
  if (!transfer.direct || !transfer.over() || transfer.acked || (!to_all_ && !out_[size_t(to)].over())) return false;
  if (!backend_.links_[size_t(to)]->reserve(1)) return false;
  backend_.links_[size_t(to)]->commit(1);
  transfer.acked = true;
  return true;
}
bool CopyCollective::receive_ack(int from) {
  char& acked = acked_[size_t(from)];
  if (!outgoing(from).direct || acked || (!to_all_ && !in_[size_t(from)].over())) return false;
  if (!backend_.links_[size_t(from)]->peek(1)) return false;
  backend_.links_[size_t(from)]->consume(1);
  acked = 1;
  return true;
}

bool CopyCollective::copy_own() {
  if (own_.over()) return false;
  const size_t n = std::min(LocalRanks::kRecordBytes, own_.bytes - own_.moved);
  if (own_.data != own_from_) lightcc::copy(own_.data + own_.moved, own_from_ + own_.moved, n);
  own_.moved += n;
  return true;
}

bool CopyCollective::step() {
  bool moved = copy_own();
  for (int v = 0; v < c_.size; ++v) {
    moved |= offer(out_[size_t(v)], v);
    moved |= publish(out_[size_t(v)], v);
    if (v != c_.index) moved |= receive(in_[size_t(v)], v);
  }
  done_ = own_.over() && out_[size_t(c_.index)].over();
  if (!out_[size_t(c_.index)].over()) waiting_for_ = backend_.slowest_reader();  // of what goes to all
  for (int v = 0; v < c_.size; ++v) {
    if (v == c_.index) continue;
    moved |= send_ack(v);
    moved |= receive_ack(v);
    const Transfer &gives = out_[size_t(v)], &takes = in_[size_t(v)];
    const bool acked = !outgoing(v).direct || acked_[size_t(v)];
    if (!gives.over() || !takes.over() || takes.direct != takes.acked || !acked) {
      done_ = false;
      waiting_for_ = v;
    }
  }
  return moved || done_;
}

}  // namespace lightcc
