// The two rings of a TCP link without the connection: what has been committed and is on its way out, what has arrived
// and is not consumed. No I/O here, so that a connection may break and be replaced, and a test may be both ends.
//
// Each direction is a ring image: both ends have rings of one capacity, and a byte has the same position in both. A
// frame says where its bytes belong, so the gap before a record that would have wrapped (ring_buffer.h) is not sent.
// What the other end has consumed is free again at this one: it never receives what it has no room for. What it has
// received need not be sent again when a new connection takes the place of a broken one.
#pragma once
#include <sys/uio.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string_view>

#include "net/ring_buffer.h"

namespace lightcc {

struct FrameHeader {           // as it travels, before its bytes
  enum Kind : uint32_t { data, fin };  // fin: the sender has committed its last record
  uint64_t position = 0;       // of the first byte
  uint64_t consumed = 0, received = 0;  // by the sender, in the other direction
  uint32_t bytes = 0;
  Kind kind = data;
};
static_assert(sizeof(FrameHeader) == 32);

class TcpStream {
 public:
  explicit TcpStream(size_t capacity);

  // Link's half; see link.h. n <= capacity / 4.
  std::byte* reserve(size_t n) { return writer_.reserve(n); }
  void commit(size_t n);
  const std::byte* peek(size_t n) { return reader_.peek(n); }
  void consume(size_t n) { reader_.consume(n); }
  void finish() { finishing_ = true; }             // nothing more will be committed: send fin behind the last record

  // The connection's half. What is to be written next, as one or two pieces (0: nothing), then how much of it went out.
  int to_send(std::array<iovec, 2>&);
  void sent(size_t bytes);
  // Where the next bytes that come in belong, then how many came; or the bytes themselves. Throws Error{internal} when
  // they are no frame of this stream.
  iovec to_receive();
  void arrived(size_t bytes);
  void feed(std::string_view bytes);
  // A new connection: the other end had received so much when the old one broke. Throws Error{internal} if that cannot
  // be.
  void restart(uint64_t peer_received);

  uint64_t received() const { return in_head_.at; }
  bool peer_finished() const { return peer_finished_; }
  bool delivered() const { return peer_received_ == out_head_.at && !owes_fin(); }  // all of it, fin included

 private:
  struct Range { uint64_t begin, end; };           // positions without a gap
  struct Freed { void operator()(std::byte* p) const { std::free(p); } };
  using Ring = std::unique_ptr<std::byte[], Freed>;
  static Ring ring(size_t capacity);
  bool owes_fin() const { return finishing_ && !sent_fin_; }
  void next_frame();
  void take_header();
  void acknowledged(uint64_t peer_received);

  const size_t capacity_;
  const Ring out_, in_;
  Cursor out_head_, out_tail_, in_head_, in_tail_; // tail: consumed by the reader
  RingWriter writer_;
  RingReader reader_;

  std::deque<Range> unreceived_;                   // committed and not known to be received
  uint64_t sent_ = 0;                              // up to here in whole frames
  uint64_t peer_received_ = 0;
  FrameHeader outgoing_{};                         // the frame that is being sent
  size_t frame_sent_ = 0, frame_bytes_ = 0;        // of it: sent; in all, header included; 0: no frame
  uint64_t acknowledged_consumed_ = 0, acknowledged_received_ = 0;
  bool finishing_ = false, sent_fin_ = false;
  FrameHeader incoming_{};
  size_t arrived_ = 0;                             // of the frame that comes in, header included
  bool owes_answer_ = false, peer_finished_ = false;  // the other end sent fin; it waits to hear what we have received
};

}  // namespace lightcc
