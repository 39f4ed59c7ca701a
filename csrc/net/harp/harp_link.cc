#include "net/harp/harp_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace lightcc {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

HarpStream::HarpStream(harp_context* context, std::string name, size_t record_bytes)
    : context_(context),
      name_(std::move(name)),
      record_bytes_(record_bytes),
      stride_((record_bytes + kAlignment - 1) / kAlignment * kAlignment),
      in_flight_(std::clamp(kMemory / stride_, kLeastFrames, kMostFrames)) {}

void HarpStream::close() {
  is_over_ = true;
  record_ = nullptr;
  if (connection_) harp_close(std::exchange(connection_, nullptr));
  if (frames_) harp_free(context_, std::exchange(frames_, nullptr));
}

void HarpStream::attach(harp_connection* connection) {
  connection_ = connection;
  hand_over();
}

// ---- sending

std::byte* HarpStream::reserve(size_t n) {
  if (n > record_bytes_) throw Error(Code::internal, "a record of " + std::to_string(n) + " bytes to " + name_);
  if (!frames_) frames_ = static_cast<std::byte*>(harp_alloc(context_, in_flight_.size() * stride_));
  if (!frames_) throw Error(Code::internal, "no memory to send to " + name_ + ": " + harp_error());
  if (committed_ - done_ >= in_flight_.size() / 2) reap();
  return is_over_ || committed_ - done_ < in_flight_.size() ? frame(committed_) : nullptr;
}

void HarpStream::commit(size_t n) {
  if (is_over_) return;
  in_flight_[committed_++ % in_flight_.size()] = {n, nullptr};
  hand_over();
}

void HarpStream::hand_over() {
  if (!connection_ || is_over_) return;
  for (; handed_ < committed_; ++handed_) {
    InFlight& next = in_flight_[handed_ % in_flight_.size()];
    const int status = harp_send(connection_, frame(handed_), next.bytes, &next.request);
    if (status == HARP_PENDING) return;  // it is not connected yet, or has too many requests
    if (status != HARP_OK) return void(is_over_ = true);
  }
}

// Those that have been received, in order: their frames are free.
void HarpStream::reap() {
  for (; done_ < handed_; ++done_) {
    const int status = harp_test(in_flight_[done_ % in_flight_.size()].request, nullptr);
    if (status == HARP_PENDING) return;
    is_over_ |= status != HARP_OK;
  }
}

void HarpStream::send_notice(const HarpNotice& notice) {
  notice_ = {"", frame_of({notice.code, std::string(truncate_utf8(notice.why, record_bytes_ - kAlignment))})};
  step();
}

// ---- receiving

const std::byte* HarpStream::peek(size_t n) {
  if (!record_) receive();
  if (!record_) return nullptr;
  if (record_size_ != n)
    throw Error(Code::internal, name_ + " has sent a record of " + std::to_string(record_size_) +
                                    " bytes in place of " + std::to_string(n));
  return static_cast<const std::byte*>(record_);
}

void HarpStream::consume() {
  record_ = nullptr;
  if (++consumed_ == kTogether) give_back();
}

void HarpStream::discard() {
  while (record_) consume(), receive();
}

void HarpStream::give_back() {
  if (consumed_ > 0) harp_consume(connection_, std::exchange(consumed_, 0));
}

void HarpStream::receive() {
  while (connection_ && !record_ && !received_notice_) {
    const void* record = nullptr;
    const int status = harp_recv_zc(connection_, &record, &record_size_);
    if (status == HARP_PENDING) return give_back();
    if (status == HARP_LOCAL_FAULT)
      throw Error(Code::internal, std::string("HARP ended on this host: ") + harp_error());
    if (status != HARP_OK) throw Error(Code::peer_lost, name_ + " cannot be reached any more: " + harp_error());
    if (expects_notice_) {
      received_notice_ = notice_in({static_cast<const char*>(record), record_size_});
    } else if (record_size_ > 0) {
      record_ = record;
      return;
    }
    expects_notice_ = true;
    ++consumed_;
    give_back();
  }
}

void HarpStream::step() {
  if (!connection_) return;
  hand_over();
  reap();
  for (; !notice_.empty(); notice_.pop_front()) {
    std::byte* to = reserve(notice_.front().size());
    if (!to) break;
    std::memcpy(to, notice_.front().data(), notice_.front().size());
    commit(notice_.front().size());
  }
  receive();
}

}  // namespace lightcc
