#include "net/tcp/tcp_stream.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"

namespace lightcc {
namespace {

[[noreturn]] void malformed(const std::string& what) {
  throw Error(Code::internal, "a connection carries what is no frame of lightcc: " + what);
}

std::byte* at(std::byte* ring, uint64_t position, size_t capacity) { return ring + position % capacity; }

}  // namespace

TcpStream::TcpStream(size_t capacity)
    : capacity_(capacity),
      out_(ring(capacity)),
      in_(ring(capacity)),
      writer_(&out_head_, out_.get(), capacity, {&out_tail_}),
      reader_(&in_head_, in_.get(), capacity, &in_tail_) {}

TcpStream::Ring TcpStream::ring(size_t capacity) {
  Ring ring(static_cast<std::byte*>(std::aligned_alloc(kLine, capacity)));
  if (!ring) throw Error(Code::internal, "no memory for a connection's ring of " + std::to_string(capacity) + " bytes");
  return ring;
}

void TcpStream::commit(size_t n) {
  const uint64_t begin = record_start(out_head_.at, round_up(n), capacity_);
  writer_.commit(n);
  const uint64_t end = out_head_.at;
  if (!unreceived_.empty() && unreceived_.back().end == begin) unreceived_.back().end = end;
  else unreceived_.push_back({begin, end});
}

// ---- what lies in memory of the caller's

bool TcpStream::send_from(const std::byte* data, size_t n) {
  if (!reserve(n)) return false;
  const uint64_t begin = record_start(out_head_.at, round_up(n), capacity_);
  commit(n);
  lent_.push_back({begin, begin + n, const_cast<std::byte*>(data)});
  return true;
}

void TcpStream::post(std::byte* to, size_t n) {
  const uint64_t next = posted_.empty() ? in_tail_.at.load() : round_up(posted_.back().end);
  const uint64_t begin = record_start(next, round_up(n), capacity_), end = begin + n;
  posted_.push_back({{begin, end, to}, std::clamp(in_head_.at.load(), begin, end)});
}

const std::byte* TcpStream::peek(size_t n) {
  const std::byte* record = reader_.peek(n);
  if (!record || posted_.empty() || posted_.front().begin != record_start(in_tail_.at, round_up(n), capacity_))
    return record;
  Posted& one = posted_.front();
  if (is_lent(one)) take_back_lent(lent());
  std::memcpy(one.memory, record, one.in_ring - one.begin);
  staged_ += one.in_ring - one.begin;
  return one.memory;
}

void TcpStream::consume(size_t n) {
  reader_.consume(n);
  if (!posted_.empty() && posted_.front().begin < in_tail_.at) posted_.pop_front();
}

// Whether any of its memory is lent: bytes that have yet to leave it stand where it shall arrive.
bool TcpStream::is_lent(const Posted& one) const {
  const auto overlaps = [&](const Lent& lent) {
    return lent.memory < one.memory + (one.end - one.begin) && one.memory < lent.memory + (lent.end - lent.begin);
  };
  return std::any_of(lent_.begin(), lent_.end(), overlaps);
}

void TcpStream::take_back_lent(uint64_t before) {
  for (; !lent_.empty() && lent_.front().begin < before; lent_.pop_front()) {
    const Lent& one = lent_.front();
    std::memcpy(at(out_.get(), one.begin, capacity_), one.memory, one.end - one.begin);
    staged_ += one.end - one.begin;
  }
}

size_t TcpStream::release_lent(uint64_t before) {
  take_back_lent(before);
  return std::exchange(staged_, 0);
}

size_t TcpStream::release() {
  take_back_lent(lent());
  for (const Posted& one : posted_) {
    const uint64_t until = std::clamp(in_head_.at.load(), one.in_ring, one.end);
    std::memcpy(at(in_.get(), one.in_ring, capacity_), one.memory + (one.in_ring - one.begin), until - one.in_ring);
    staged_ += until - one.in_ring;
  }
  posted_.clear();
  return std::exchange(staged_, 0);
}

// ---- the connection

// Decides on the next frame, if there is reason for one.
void TcpStream::next_frame() {
  outgoing_ = {};
  outgoing_.consumed = in_tail_.at;
  outgoing_.received = in_head_.at;
  for (const Range& range : unreceived_) {
    if (range.end <= sent_) continue;
    outgoing_.position = std::max(sent_, range.begin);
    const uint64_t to_wrap = capacity_ - outgoing_.position % capacity_;
    outgoing_.bytes = uint32_t(std::min(range.end - outgoing_.position, to_wrap));
    break;
  }
  if (outgoing_.bytes == 0) {
    const bool consumed_much = outgoing_.consumed - acknowledged_consumed_ >= capacity_ / 4;
    if (!consumed_much && !owes_fin() && !(owes_answer_ && acknowledged_received_ != outgoing_.received)) return;
    outgoing_.position = out_head_.at;
    if (owes_fin()) outgoing_.kind = FrameHeader::fin;
  }
  frame_bytes_ = sizeof outgoing_ + outgoing_.bytes;
}

// Where the bytes [begin, end) lie: in the records' own memory where that is in use, else in the ring. Fills `pieces`
// with the first of them and returns how many.
template <class Records, class InUse>
static size_t cut(uint64_t begin, uint64_t end, const Records& records, std::byte* ring, size_t capacity, InUse in_use,
                  std::span<iovec> pieces) {
  size_t count = 0;
  auto one = records.begin();
  while (begin < end && count < pieces.size()) {
    while (one != records.end() && (one->end <= begin || !in_use(*one))) ++one;
    const bool inside = one != records.end() && one->begin <= begin;
    const uint64_t until = one == records.end() ? end : std::min(end, inside ? one->end : one->begin);
    pieces[count++] = {inside ? one->memory + (begin - one->begin) : at(ring, begin, capacity), until - begin};
    begin = until;
  }
  return count;
}

size_t TcpStream::to_send(Pieces pieces) {
  if (frame_bytes_ == 0) next_frame();
  if (frame_bytes_ == 0) return 0;
  size_t count = 0;
  if (frame_sent_ < sizeof outgoing_)
    pieces[count++] = {reinterpret_cast<std::byte*>(&outgoing_) + frame_sent_, sizeof outgoing_ - frame_sent_};
  const size_t body = frame_sent_ > sizeof outgoing_ ? frame_sent_ - sizeof outgoing_ : 0;
  const uint64_t begin = outgoing_.position + body, end = outgoing_.position + outgoing_.bytes;
  return count + cut(begin, end, lent_, out_.get(), capacity_, [](const Lent&) { return true; },
                     pieces.subspan(count));
}

void TcpStream::sent(size_t bytes) {
  frame_sent_ += bytes;
  if (frame_sent_ < frame_bytes_) return;
  sent_ = std::max(sent_, outgoing_.position + outgoing_.bytes);
  acknowledged_consumed_ = outgoing_.consumed;
  acknowledged_received_ = outgoing_.received;
  if (outgoing_.kind == FrameHeader::fin) sent_fin_ = true;
  frame_sent_ = frame_bytes_ = 0;
}

size_t TcpStream::to_receive(Pieces pieces) {
  if (arrived_ < sizeof incoming_) {
    pieces[0] = {reinterpret_cast<std::byte*>(&incoming_) + arrived_, sizeof incoming_ - arrived_};
    return 1;
  }
  return cut(incoming_.position + (arrived_ - sizeof incoming_), incoming_.position + incoming_.bytes, posted_,
             in_.get(), capacity_, [&](const Posted& one) { return !is_lent(one); }, pieces);
}

void TcpStream::arrived(size_t bytes) {
  arrived_ += bytes;
  if (arrived_ < sizeof incoming_) return;
  if (arrived_ == sizeof incoming_ && bytes > 0) take_header();
  if (arrived_ > sizeof incoming_) {
    const uint64_t head = incoming_.position + (arrived_ - sizeof incoming_), before = head - bytes;
    for (Posted& one : posted_)
      if (one.begin < head && before < one.end && is_lent(one)) one.in_ring = std::min(one.end, head);
    in_head_.at = head;
  }
  if (arrived_ == sizeof incoming_ + incoming_.bytes) arrived_ = 0;
}

void TcpStream::feed(std::string_view bytes) {
  std::array<iovec, kPieces> pieces;
  while (!bytes.empty()) {
    to_receive(pieces);
    const size_t n = std::min(bytes.size(), pieces[0].iov_len);
    std::memcpy(pieces[0].iov_base, bytes.data(), n);
    arrived(n);
    bytes.remove_prefix(n);
  }
}

void TcpStream::acknowledged(uint64_t peer_received) {
  peer_received_ = peer_received;
  while (!unreceived_.empty() && unreceived_.front().end <= peer_received_) unreceived_.pop_front();
  while (!lent_.empty() && lent_.front().end <= peer_received_) lent_.pop_front();
}

void TcpStream::take_header() {
  const FrameHeader& h = incoming_;
  const uint64_t head = in_head_.at, out_head = out_head_.at;
  if (h.kind != FrameHeader::data && h.kind != FrameHeader::fin) malformed("kind " + std::to_string(h.kind));
  if (h.consumed < out_tail_.at || h.consumed > h.received || h.received < peer_received_ || h.received > out_head)
    malformed("it acknowledges what was never sent");
  out_tail_.at = h.consumed;
  acknowledged(h.received);
  if (h.kind == FrameHeader::fin) {
    if (h.bytes != 0 || h.position != head) malformed("a fin in the middle of data");
    peer_finished_ = owes_answer_ = true;
    acknowledged_received_ = UINT64_MAX;  // answer even if there is nothing new to tell
  }
  if (h.bytes == 0) return;
  const uint64_t end = h.position + h.bytes;
  const bool follows = h.position == head || (h.position > head && h.position - head < capacity_ &&
                                              h.position % capacity_ == 0);
  if (!follows || h.bytes > capacity_ - h.position % capacity_ || end - in_tail_.at > capacity_)
    malformed(std::to_string(h.bytes) + " bytes at a place where they cannot be");
}

void TcpStream::restart(uint64_t peer_received) {
  if (peer_received < peer_received_ || peer_received > out_head_.at)
    throw Error(Code::internal, "the other end claims to have received what was never sent");
  acknowledged(peer_received);
  sent_ = peer_received;
  frame_sent_ = frame_bytes_ = arrived_ = 0;
  acknowledged_consumed_ = in_tail_.at - std::min<uint64_t>(in_tail_.at, capacity_ / 4);  // perhaps it was told in vain
  sent_fin_ = false;
  if (owes_answer_) acknowledged_received_ = UINT64_MAX;
}

}  // namespace lightcc
