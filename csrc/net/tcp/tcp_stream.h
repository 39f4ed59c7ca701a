// The two rings of a TCP link without the connection: what has been committed and is on its way out, what has arrived
// and is not consumed. No I/O here, so that a connection may break and be replaced, and a test may be both ends.
//
// Each direction is a ring image: both ends have rings of one capacity, and a byte has the same position in both. A
// frame says where its bytes belong, so the gap before a record that would have wrapped (ring_buffer.h) is not sent.
// What the other end has consumed is free again at this one: it never receives what it has no room for. What it has
// received need not be sent again when a new connection takes the place of a broken one.
//
// Bulk: a record's bytes may lie in memory of the caller's instead of the ring, at either end. The wire does not know,
// and the ring's room for them stays theirs: what has to leave that memory early is copied there. Invariants:
// 1. What is lent is sent from the caller's memory, again if need be, until the other end has received it.
// 2. A posted record arrives in the caller's memory, but for its first bytes if they came before it was posted or while
//    that memory was still lent: those wait in the ring for peek().
// 3. No memory is lent while a post of it is open.
#pragma once
#include <sys/uio.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <span>
#include <string_view>

#include "net/ring_buffer.h"

namespace lightcc {

struct FrameHeader {           // as it travels, before its bytes
  enum Type : uint32_t { data, fin };  // fin: the sender has committed its last record
  uint64_t position = 0;       // of the first byte
  uint64_t consumed = 0, received = 0;  // by the sender, in the other direction
  uint32_t bytes = 0;
  Type kind = data;
};
static_assert(sizeof(FrameHeader) == 32);

class TcpStream {
 public:
  explicit TcpStream(size_t capacity);

  // Link's half; see link.h. n <= capacity / 4.
  std::byte* reserve(size_t n) { return writer_.reserve(n); }
  void commit(size_t n);
  const std::byte* peek(size_t n);
  void consume(size_t n);
  void finish() { finishing_ = true; }             // nothing more will be committed: send fin behind the last record
  // BulkLink's half.
  bool send_from(const std::byte* data, size_t n);
  void post(std::byte* to, size_t n);
  uint64_t lent() const { return out_head_.at; }
  size_t release_lent(uint64_t before);
  size_t release();

  // The connection's half. What is to be written next, in pieces (none: nothing), then how much of it went out.
  static constexpr size_t kPieces = 8;
  using Pieces = std::span<iovec, kPieces>;
  size_t to_send(Pieces);
  void sent(size_t bytes);
  // Where the next bytes that come in belong, then how many came; or the bytes themselves. Throws Error{internal} when
  // they are no frame of this stream.
  size_t to_receive(Pieces);
  void arrived(size_t bytes);
  void feed(std::string_view bytes);
  // What is still to come of the frame whose header has come; the other end will send that whatever happens here.
  size_t expected() const { return arrived_ < sizeof incoming_ ? 0 : sizeof incoming_ + incoming_.bytes - arrived_; }
  // A new connection: the other end had received so much when the old one broke. Throws Error{internal} if that cannot
  // be.
  void restart(uint64_t peer_received);

  uint64_t received() const { return in_head_.at; }
  bool peer_finished() const { return peer_finished_; }
  bool has_committed() const { return out_head_.at != 0; }
  bool delivered() const { return peer_received_ == out_head_.at && !owes_fin(); }  // all of it, fin included

 private:
  struct Range { uint64_t begin, end; };           // positions without a gap
  struct Lent { uint64_t begin, end; std::byte* memory; };  // the bytes of one record
  struct Posted : Lent { uint64_t in_ring; };      // up to where they lie in the ring
  struct Freed { void operator()(std::byte* p) const { std::free(p); } };
  using Ring = std::unique_ptr<std::byte[], Freed>;
  static Ring ring(size_t capacity);
  bool owes_fin() const { return finishing_ && !sent_fin_; }
  void next_frame();
  void take_header();
  void acknowledged(uint64_t peer_received);
  bool is_lent(const Posted&) const;
  void take_back_lent(uint64_t before);

  const size_t capacity_;
  const Ring out_, in_;
  Cursor out_head_, out_tail_, in_head_, in_tail_; // tail: consumed by the reader
  RingWriter writer_;
  RingReader reader_;

  std::deque<Range> unreceived_;                   // committed and not known to be received
  std::deque<Lent> lent_;                          // of it, what lies in memory of the caller's
  std::deque<Posted> posted_;                      // not consumed
  size_t staged_ = 0;                              // bytes of either that were copied all the same, since release()
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
