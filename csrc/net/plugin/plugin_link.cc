#include "net/plugin/plugin_link.h"

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
      in_(frames) {}

// ---- both communicators

PluginHandle PluginStream::listen() {
  PluginHandle handle{};
  device_.check(device_.plugin().listen(device_.context(), device_.index(), handle.bytes, &listener_), "listening");
  return handle;
}

bool PluginStream::connect(PluginHandle& of_peer) {
  NetPlugin& plugin = device_.plugin();
  if (!sender_ && !holds(plugin.connect(device_.context(), device_.index(), of_peer.bytes, &sender_), "connecting"))
    return false;
  if (!receiver_ && !holds(plugin.accept(listener_, &receiver_), "accepting a connection")) return false;
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
  ring.memory.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, frames_ * stride_)));
  if (!ring.memory) throw std::bad_alloc();
}

void PluginStream::enroll(Ring& ring, void* communicator) {
  allocate(ring);
  const nccl::Result result = device_.plugin().reg_mr(communicator, ring.memory.get(), frames_ * stride_,
                                                      nccl::kHostPointers, &ring.registration);
  device_.check(result, "registering memory");
}

// When a communicator is closed, its plugin uses the memory no more.
void PluginStream::close() {
  NetPlugin& plugin = device_.plugin();
  if (out_.registration) plugin.dereg_mr(sender_, std::exchange(out_.registration, nullptr));
  if (in_.registration) plugin.dereg_mr(receiver_, std::exchange(in_.registration, nullptr));
  if (sender_) plugin.close_send(std::exchange(sender_, nullptr));
  if (receiver_) plugin.close_recv(std::exchange(receiver_, nullptr));
  if (listener_) plugin.close_listen(std::exchange(listener_, nullptr));
  if (failure_.empty()) failure_ = "was closed";
}

void PluginStream::abandon() {
  out_.registration = in_.registration = sender_ = receiver_ = listener_ = nullptr;
}

bool PluginStream::holds(nccl::Result result, const char* attempted) {
  if (result == nccl::kSuccess) return true;
  const std::string failure = device_.failure(result, attempted);
  if (failure_.empty()) failure_ = failure;
  return false;
}

// ---- sending

std::byte* PluginStream::reserve(size_t n) {
  if (n > record_bytes_) throw Error(Code::internal, "a record of " + std::to_string(n) + " bytes to " + peer_);
  allocate(out_);
  if (filled_ + n > record_bytes_) flush();
  reap();
  if (!failure_.empty()) return out_.memory.get();
  return full_ - done_ < frames_ ? frame(out_, full_) + filled_ : nullptr;
}

void PluginStream::commit(size_t n) {
  if (!failure_.empty()) return;
  out_.sizes[full_ % frames_] = filled_ + n;
  filled_ += round_up(n);
  if (filled_ >= record_bytes_) flush();
}

void PluginStream::flush() {
  if (filled_ == 0) return;
  ++full_;
  filled_ = 0;
  hand_over();
}

void PluginStream::hand_over() {
  for (; connected() && failure_.empty() && handed_ < full_; ++handed_) {
    void*& request = out_.requests[handed_ % frames_];
    const size_t bytes = out_.sizes[handed_ % frames_];
    request = nullptr;
    if (!holds(device_.plugin().isend(sender_, frame(out_, handed_), bytes, 0, out_.registration, &request), "sending"))
      return;
    if (!request) return;  // it cannot begin yet
  }
}

void PluginStream::reap() {
  for (; failure_.empty() && done_ < handed_; ++done_) {
    int done = 0;
    if (!holds(device_.plugin().test(out_.requests[done_ % frames_], &done, nullptr), "sending") || !done) return;
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
  if (arrived_ == posted_ || !receiver_) return false;
  int done = 0, bytes = 0;
  void*& request = in_.requests[arrived_ % frames_];
  if (!request || !holds(device_.plugin().test(request, &done, &bytes), "receiving")) return request = nullptr, false;
  if (!done) return false;
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
  for (; connected() && failure_.empty() && posted_ < consumed_ + frames_; ++posted_) {
    void* data = frame(in_, posted_);
    void*& request = in_.requests[posted_ % frames_];
    size_t bytes = record_bytes_;
    int tag = 0;
    request = nullptr;
    if (!holds(device_.plugin().irecv(receiver_, 1, &data, &bytes, &tag, &in_.registration, &request), "receiving") ||
        !request)
      return;
  }
}

bool PluginStream::step() {
  if (!connected()) return false;
  const uint64_t done = done_;
  post();
  hand_over();
  reap();
  return done_ > done || (arrived_ == consumed_ && arrived());
}

}  // namespace lightcc
