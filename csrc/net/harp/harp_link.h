// One end of a stream of HARP's (docs/harp.md), which carries a Link: what waits to be sent, and the record that was
// lent last. A record is one packet, received where the port read it to. Where the connection comes from:
// harp_transport.h.
//
// On the wire: the connecting side says first which link it is for (harp_frames.h). A record without bytes is none of
// the link's: it says that the next one is a HarpNotice, the last thing that is sent.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "harp_plugin/harp.h"
#include "net/harp/harp_frames.h"
#include "net/link.h"

namespace lightcc {

class HarpStream {
 public:
  // name: of the peer, for errors. record_bytes: what both ends can carry. Its frames are of the context's memory.
  HarpStream(harp_context*, std::string name, size_t record_bytes);
  ~HarpStream() { close(); }
  HarpStream(const HarpStream&) = delete;

  bool connected() const { return connection_ != nullptr; }
  void attach(harp_connection*);
  void close();
  void abandon() { connection_ = nullptr, frames_ = nullptr; }  // in a forked child: they are the parent's
  size_t record_bytes() const { return record_bytes_; }

  // Link's half; see link.h. What is committed before there is a connection waits for it.
  std::byte* reserve(size_t n);
  void commit(size_t n);
  const std::byte* peek(size_t n);
  void consume();
  void discard();  // the records that have come; nobody uses the link any more, but the peer's notice is behind them

  void send_notice(const HarpNotice&);  // behind all that was committed, as soon as there is room
  // What can be done without waiting: hands over what waits, and looks for what has come. This and peek() throw
  // Error{peer_lost} when the connection is over, all that came before is consumed, and no notice was among it.
  void step();
  bool has_waiting() const { return !is_over_ && (handed_ < committed_ || !notice_.empty()); }
  bool delivered() const { return is_over_ || (done_ == committed_ && notice_.empty()); }
  bool has_committed() const { return committed_ > 0; }
  const std::optional<HarpNotice>& notice() const { return received_notice_; }  // of the peer

 private:
  struct InFlight {
    size_t bytes;
    harp_request* request;
  };
  static constexpr size_t kMemory = 1 << 20, kLeastFrames = 16, kMostFrames = 256;
  static constexpr size_t kTogether = 8;  // so many consumed records go back at once, or when no more have come

  std::byte* frame(uint64_t number) { return frames_ + number % in_flight_.size() * stride_; }
  void hand_over();
  void reap();
  void receive();
  void give_back();

  harp_context* const context_;
  const std::string name_;
  const size_t record_bytes_, stride_;
  harp_connection* connection_ = nullptr;

  // How many records were committed, given to HARP, and received by the peer. Those between have a frame each.
  std::vector<InFlight> in_flight_;  // a ring by number
  std::byte* frames_ = nullptr;
  uint64_t committed_ = 0, handed_ = 0, done_ = 0;
  std::deque<std::string> notice_;  // its records, which find no room yet
  bool is_over_ = false;            // nothing can be sent any more: records are committed to nobody

  const void* record_ = nullptr;  // lent and not consumed
  size_t record_size_ = 0;
  size_t consumed_ = 0;  // that HARP was not told of
  bool expects_notice_ = false;
  std::optional<HarpNotice> received_notice_;
};

}  // namespace lightcc
