#include "net/flow.h"

#include <cstring>

#include "base/error.h"

namespace lightcc {
namespace {

[[noreturn]] void malformed(const std::string& what) {
  throw Error(Code::internal, "a connection carries what is no frame of lightcc: " + what);
}

}  // namespace

Flow::Flow(size_t capacity)
    : capacity_(capacity),
      out_(ring(capacity)),
      in_(ring(capacity)),
      writer_(&out_head_, out_.get(), capacity, {&out_tail_}),
      reader_(&in_head_, in_.get(), capacity, &in_tail_) {}

Flow::Ring Flow::ring(size_t capacity) {
  Ring ring(static_cast<std::byte*>(std::aligned_alloc(kLine, capacity)));
  if (!ring) throw Error(Code::internal, "no memory for a connection's ring of " + std::to_string(capacity) + " bytes");
  return ring;
}

void Flow::commit(size_t n) {
  const uint64_t begin = record_start(out_head_.at, round_up(n), capacity_);
  writer_.commit(n);
  const uint64_t end = out_head_.at;
  if (!runs_.empty() && runs_.back().end == begin) runs_.back().end = end;
  else runs_.push_back({begin, end});
}

// Decides on the next frame, if there is reason for one.
void Flow::next_frame() {
  leaving_ = {};
  leaving_.consumed = in_tail_.at, leaving_.received = in_head_.at;
  for (const Run& run : runs_) {
    if (run.end <= sent_) continue;
    leaving_.position = std::max(sent_, run.begin);
    const uint64_t to_wrap = capacity_ - leaving_.position % capacity_;
    leaving_.bytes = uint32_t(std::min(run.end - leaving_.position, to_wrap));
    break;
  }
  if (leaving_.bytes == 0) {
    const bool consumed_much = leaving_.consumed - told_consumed_ >= capacity_ / 4;
    if (!consumed_much && !owes_bye() && !(answer_ && told_received_ != leaving_.received)) return;
    leaving_.position = out_head_.at;
    if (owes_bye()) leaving_.kind = FrameHeader::bye;
  }
  frame_bytes_ = sizeof leaving_ + leaving_.bytes;
}

int Flow::to_send(std::array<iovec, 2>& pieces) {
  if (frame_bytes_ == 0) next_frame();
  if (frame_bytes_ == 0) return 0;
  int count = 0;
  if (left_ < sizeof leaving_)
    pieces[size_t(count++)] = {reinterpret_cast<std::byte*>(&leaving_) + left_, sizeof leaving_ - left_};
  const size_t body = left_ > sizeof leaving_ ? left_ - sizeof leaving_ : 0;
  if (leaving_.bytes > body)
    pieces[size_t(count++)] = {out_.get() + leaving_.position % capacity_ + body, leaving_.bytes - body};
  return count;
}

void Flow::sent(size_t bytes) {
  left_ += bytes;
  if (left_ < frame_bytes_) return;
  sent_ = std::max(sent_, leaving_.position + leaving_.bytes);
  told_consumed_ = leaving_.consumed, told_received_ = leaving_.received;
  if (leaving_.kind == FrameHeader::bye) said_bye_ = true;
  left_ = frame_bytes_ = 0;
}

iovec Flow::to_receive() {
  if (arrived_ < sizeof arriving_)
    return {reinterpret_cast<std::byte*>(&arriving_) + arrived_, sizeof arriving_ - arrived_};
  const size_t body = arrived_ - sizeof arriving_;
  return {in_.get() + arriving_.position % capacity_ + body, arriving_.bytes - body};
}

void Flow::came(size_t bytes) {
  arrived_ += bytes;
  if (arrived_ < sizeof arriving_) return;
  if (arrived_ == sizeof arriving_ && bytes > 0) take_header();
  if (arrived_ > sizeof arriving_) in_head_.at = arriving_.position + (arrived_ - sizeof arriving_);
  if (arrived_ == sizeof arriving_ + arriving_.bytes) arrived_ = 0;
}

void Flow::feed(std::string_view bytes) {
  while (!bytes.empty()) {
    const iovec to = to_receive();
    const size_t n = std::min(bytes.size(), to.iov_len);
    std::memcpy(to.iov_base, bytes.data(), n);
    came(n);
    bytes.remove_prefix(n);
  }
}

void Flow::learn(uint64_t peer_received) {
  peer_received_ = peer_received;
  while (!runs_.empty() && runs_.front().end <= peer_received_) runs_.pop_front();
}

void Flow::take_header() {
  const FrameHeader& h = arriving_;
  const uint64_t head = in_head_.at, out_head = out_head_.at;
  if (h.kind != FrameHeader::data && h.kind != FrameHeader::bye) malformed("kind " + std::to_string(h.kind));
  if (h.consumed < out_tail_.at || h.consumed > h.received || h.received < peer_received_ || h.received > out_head)
    malformed("it acknowledges what was never sent");
  out_tail_.at = h.consumed;
  learn(h.received);
  if (h.kind == FrameHeader::bye) {
    if (h.bytes != 0 || h.position != head) malformed("a goodbye in the middle of data");
    peer_finished_ = answer_ = true;
    told_received_ = UINT64_MAX;  // answer even if there is nothing new to tell
  }
  if (h.bytes == 0) return;
  const uint64_t end = h.position + h.bytes;
  const bool follows = h.position == head || (h.position > head && h.position - head < capacity_ &&
                                              h.position % capacity_ == 0);
  if (!follows || h.bytes > capacity_ - h.position % capacity_ || end - in_tail_.at > capacity_)
    malformed(std::to_string(h.bytes) + " bytes at a place where they cannot be");
}

void Flow::restart(uint64_t peer_received) {
  if (peer_received < peer_received_ || peer_received > out_head_.at)
    throw Error(Code::internal, "the other end claims to have received what was never sent");
  learn(peer_received);
  sent_ = peer_received;
  left_ = frame_bytes_ = arrived_ = 0;
  told_consumed_ = in_tail_.at - std::min<uint64_t>(in_tail_.at, capacity_ / 4);  // perhaps it was told in vain
  said_bye_ = false;
  if (answer_) told_received_ = UINT64_MAX;
}

}  // namespace lightcc
