// One end of a link over a network plugin: a communicator each way, and a ring of frames for each. A frame is one
// message, and holds the records that were committed between two flushes, or as many as it has room for, each at a
// multiple of 64 bytes: the receiver knows their sizes. It is received where a receive was posted, its records are lent
// there, and when the last is consumed the frame is posted again. So a sender has room for as many frames as the
// receiver has, and then waits: a plugin that cannot begin to send says so, or its request is not over.
//
// Where the communicators come from: plugin_transport.h. A plugin knows no finer end than that a call fails, also where
// the peer has just closed in peace: it is kept here, and the transport finds out why.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "net/plugin/plugin_device.h"

namespace lightcc {

struct PluginHandle {  // a plugin keeps in it how far connecting has come
  alignas(16) char bytes[nccl::kHandleBytes];
};

class PluginStream {
 public:
  // peer: its name, for errors. The largest record takes a frame. frames: of each ring, at most as many as NCCL has
  // requests under way. Both are the same at both ends.
  PluginStream(PluginDevice&, std::string peer, size_t record_bytes, size_t frames);
  ~PluginStream() { close(); }
  PluginStream(const PluginStream&) = delete;

  // First the handle by which the peer connects to this end, then tries to connect both ways until it is true.
  PluginHandle listen();
  bool connect(PluginHandle& of_peer);
  bool connected() const { return sender_ && receiver_; }
  void close();
  void abandon();  // in a forked child: all is the parent's

  // Link's half; see link.h. What is committed before both are connected waits for it.
  std::byte* reserve(size_t n);
  void commit(size_t n);
  const std::byte* peek(size_t n);
  void consume(size_t n);
  size_t record_bytes() const { return record_bytes_; }

  // Sends what was committed, also where the frame is not full. False: not yet, a record that is reserved behind it
  // would not find a frame of its own.
  bool flush();
  bool step();   // what can be done without waiting; true if a record has come, or there is room again
  bool delivered() const { return done_ == full_ && filled_ == 0; }  // the plugin has said so
  uint64_t sent() const { return full_; }                            // frames
  bool has_received(uint64_t frames) const { return arrived_ >= frames; }
  // What has failed; "": nothing. After the one records are committed to nobody; after the other those that came stay.
  const std::string& send_failure() const { return send_failure_; }
  bool failed() const { return !send_failure_.empty() || !receive_failure_.empty(); }
  const std::string& failure() const { return send_failure_.empty() ? receive_failure_ : send_failure_; }

 private:
  static constexpr size_t kPageBytes = 4096;
  struct Ring {
    explicit Ring(size_t frames) : requests(frames), sizes(frames) {}
    struct Freer {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::unique_ptr<std::byte, Freer> memory;
    void* registration = nullptr;
    std::vector<void*> requests;
    std::vector<size_t> sizes;
  };
  std::byte* frame(const Ring& ring, uint64_t number) const { return ring.memory.get() + number % frames_ * stride_; }
  void allocate(Ring&);
  void enroll(Ring&, void* communicator);
  void hand_over();
  void reap();
  void post();
  bool arrived();
  bool holds(std::string& failure, nccl::Result, const char* attempted) const;

  PluginDevice& device_;
  const std::string peer_;
  const size_t record_bytes_, stride_, frames_;
  void *listener_ = nullptr, *sender_ = nullptr, *receiver_ = nullptr;
  std::string send_failure_, receive_failure_;

  // How many frames are full, given to the plugin, and sent; for how many receives were posted, how many have come, in
  // order, and were consumed. Behind them the one that is being filled, or read.
  Ring out_, in_, unsent_;
  uint64_t full_ = 0, handed_ = 0, done_ = 0;
  uint64_t posted_ = 0, arrived_ = 0, consumed_ = 0;
  size_t filled_ = 0, read_ = 0;  // bytes
  std::byte* reserved_ = nullptr;  // where the next record is being written
};

}  // namespace lightcc
