#include "net/plugin/plugin_link.h"

#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"

namespace lightcc {

PluginStream::PluginStream(PluginDevice& device, std::string peer, size_t record_bytes, size_t frames)
    : device_(device),
      peer_(std::move(peer)),
      record_bytes_(record_bytes),
      stride_((record_bytes + kPageBytes - 1) / kPageBytes * kPageBytes),
      frames_(frames),
      out_(frames),
      in_(frames),
      unsent_(1) {}

// ---- both communicators

PluginHandle PluginStream::listen() {
  PluginHandle handle{};
  device_.check(device_.plugin().listen(device_.context(), device_.index(), handle.bytes, &listener_), "listening");
  return handle;
}

bool PluginStream::connect(PluginHandle& of_peer) {
  NetPlugin& plugin = device_.plugin();
  const auto connect = [&] { return plugin.connect(device_.context(), device_.index(), of_peer.bytes, &sender_); };
  if (!sender_ && !holds(send_failure_, connect(), "connecting")) return false;
  if (!receiver_ && !holds(receive_failure_, plugin.accept(listener_, &receiver_), "accepting a connection"))
    return false;
  if (!connected()) return false;
  plugin.close_listen(std::exchange(listener_, nullptr));
  enroll(out_, sender_);
  enroll(in_, receiver_);
  post();
  hand_over();
  return true;
}

void PluginStream::allocate(Ring& ring) {
  if (ring.memory) return;
  ring.memory.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, ring.sizes.size() * stride_)));
  if (!ring.memory) throw std::bad_alloc();
}

// With too little memory that may be locked, RDMA's plugins fail here.
void PluginStream::enroll(Ring& ring, void* communicator) {
  allocate(ring);
  const nccl::Result result = device_.plugin().reg_mr(communicator, ring.memory.get(), frames_ * stride_,
                                                      nccl::kHostPointers, &ring.registration);
  if (holds(send_failure_, result, "registering memory")) return;
  receive_failure_ = send_failure_;
  throw Error(Code::internal, send_failure_);
}

// When a communicator is closed, its plugin uses the memory no more.
void PluginStream::close() {
  NetPlugin& plugin = device_.plugin();
  if (out_.registration) plugin.dereg_mr(sender_, std::exchange(out_.registration, nullptr));
  if (in_.registration) plugin.dereg_mr(receiver_, std::exchange(in_.registration, nullptr));
  if (sender_) plugin.close_send(std::exchange(sender_, nullptr));
  if (receiver_) plugin.close_recv(std::exchange(receiver_, nullptr));
  if (listener_) plugin.close_listen(std::exchange(listener_, nullptr));
  send_failure_ = receive_failure_ = "it was closed";
}

void PluginStream::abandon() {
  out_.registration = in_.registration = sender_ = receiver_ = listener_ = nullptr;
}

bool PluginStream::holds(std::string& failure, nccl::Result result, const char* attempted) const {
  if (result == nccl::kSuccess) return true;
  failure = device_.failure(result, attempted);
  return false;
}

// ---- sending

std::byte* PluginStream::reserve(size_t n) {
  if (n > record_bytes_) throw Error(Code::internal, "a record of " + std::to_string(n) + " bytes to " + peer_);
  reserved_ = nullptr;
  if (filled_ + n > record_bytes_) flush();
  hand_over();
  reap();
  if (!send_failure_.empty()) {
    allocate(unsent_);  // the plugin may still read the other
    return unsent_.memory.get();
  }
  if (full_ - done_ == frames_) return nullptr;
  allocate(out_);
  return reserved_ = frame(out_, full_) + filled_;
}

void PluginStream::commit(size_t n) {
  const std::byte* from = std::exchange(reserved_, nullptr);
  if (!from) return;  // to nobody
  std::byte* to = frame(out_, full_) + filled_;
  if (to != from) std::memmove(to, from, n);  // what stood before it was sent meanwhile
  out_.sizes[full_ % frames_] = filled_ + n;
  filled_ += round_up(n);
  if (filled_ >= record_bytes_) flush();
}

bool PluginStream::flush() {
  if (filled_ == 0) return true;
  if (reserved_) reap();
  if (reserved_ && full_ - done_ + 1 == frames_ && send_failure_.empty()) return false;  // it would have no frame
  ++full_;
  filled_ = 0;
  hand_over();
  return true;
}

void PluginStream::hand_over() {
  for (; connected() && send_failure_.empty() && handed_ < full_; ++handed_) {
    void*& request = out_.requests[handed_ % frames_];
    const size_t bytes = out_.sizes[handed_ % frames_];
    request = nullptr;
    const nccl::Result result =
        device_.plugin().isend(sender_, frame(out_, handed_), bytes, 0, out_.registration, &request);
    if (!holds(send_failure_, result, "sending")) return;
    if (!request) return;  // it cannot begin yet
  }
}

void PluginStream::reap() {
  for (; send_failure_.empty() && done_ < handed_; ++done_) {
    int done = 0;
    const nccl::Result result = device_.plugin().test(out_.requests[done_ % frames_], &done, nullptr);
    if (!holds(send_failure_, result, "sending") || !done) return;
  }
}

// ---- receiving

const std::byte* PluginStream::peek(size_t n) {
  if (consumed_ == arrived_ && !arrived()) return nullptr;
  const size_t left = in_.sizes[consumed_ % frames_] - read_;
  if (left < n)
    throw Error(Code::internal,
                peer_ + " has sent a record of " + std::to_string(left) + " bytes in place of " + std::to_string(n));
  return frame(in_, consumed_) + read_;
}

// The next frame has come.
bool PluginStream::arrived() {
  if (arrived_ == posted_ || !receiver_ || !receive_failure_.empty()) return false;
  int done = 0, bytes = 0;
  const nccl::Result result = device_.plugin().test(in_.requests[arrived_ % frames_], &done, &bytes);
  if (!holds(receive_failure_, result, "receiving") || !done) return false;
  in_.sizes[arrived_++ % frames_] = size_t(bytes);
  return true;
}

void PluginStream::consume(size_t n) {
  read_ += round_up(n);
  if (read_ < in_.sizes[consumed_ % frames_]) return;
  read_ = 0;
  ++consumed_;
  post();
}

void PluginStream::post() {
  for (; connected() && receive_failure_.empty() && posted_ < consumed_ + frames_; ++posted_) {
    void* data = frame(in_, posted_);
    void*& request = in_.requests[posted_ % frames_];
    size_t bytes = record_bytes_;
    int tag = 0;
    request = nullptr;
    const nccl::Result result =
        device_.plugin().irecv(receiver_, 1, &data, &bytes, &tag, &in_.registration, &request);
    if (!holds(receive_failure_, result, "receiving") || !request) return;
  }
}

bool PluginStream::step() {
  if (!connected()) return false;
  const uint64_t done = done_;
  post();
  hand_over();
  reap();
  const uint64_t arrived_before = arrived_;
  while (arrived()) {}
  return done_ > done || arrived_ > arrived_before;
}

}  // namespace lightcc
