#include "net/tcp/tcp_stream.h"

#include <cstring>

#include "base/error.h"

namespace lightcc {
namespace {

[[noreturn]] void malformed(const std::string& what) {
  throw Error(Code::internal, "a connection carries what is no frame of lightcc: " + what);
}

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

int TcpStream::to_send(std::array<iovec, 2>& pieces) {
  if (frame_bytes_ == 0) next_frame();
  if (frame_bytes_ == 0) return 0;
  int count = 0;
  if (frame_sent_ < sizeof outgoing_)
    pieces[size_t(count++)] = {reinterpret_cast<std::byte*>(&outgoing_) + frame_sent_, sizeof outgoing_ - frame_sent_};
  const size_t body = frame_sent_ > sizeof outgoing_ ? frame_sent_ - sizeof outgoing_ : 0;
  if (outgoing_.bytes > body)
    pieces[size_t(count++)] = {out_.get() + outgoing_.position % capacity_ + body, outgoing_.bytes - body};
  return count;
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

iovec TcpStream::to_receive() {
  if (arrived_ < sizeof incoming_)
    return {reinterpret_cast<std::byte*>(&incoming_) + arrived_, sizeof incoming_ - arrived_};
  const size_t body = arrived_ - sizeof incoming_;
  return {in_.get() + incoming_.position % capacity_ + body, incoming_.bytes - body};
}

void TcpStream::arrived(size_t bytes) {
  arrived_ += bytes;
  if (arrived_ < sizeof incoming_) return;
  if (arrived_ == sizeof incoming_ && bytes > 0) take_header();
  if (arrived_ > sizeof incoming_) in_head_.at = incoming_.position + (arrived_ - sizeof incoming_);
  if (arrived_ == sizeof incoming_ + incoming_.bytes) arrived_ = 0;
}

void TcpStream::feed(std::string_view bytes) {
  while (!bytes.empty()) {
    const iovec to = to_receive();
    const size_t n = std::min(bytes.size(), to.iov_len);
    std::memcpy(to.iov_base, bytes.data(), n);
    arrived(n);
    bytes.remove_prefix(n);
  }
}

void TcpStream::acknowledged(uint64_t peer_received) {
  peer_received_ = peer_received;
  while (!unreceived_.empty() && unreceived_.front().end <= peer_received_) unreceived_.pop_front();
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
