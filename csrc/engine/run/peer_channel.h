// The sends and receives between this rank and one member of a group, over a link of their own.
//
// Each side tells the other of every send and every receive when it is submitted, and pairs them by itself
// (tag_matching.h). A small send takes its data along, also before there is a receive; the data of all others follow
// once the receive is known. So a send ends without an answer to wait for, and nothing waits behind one that nobody
// receives. Invariants:
// 1. Frames and their data go out in one order, one after the other. What a rank announces goes before data.
// 2. A request ends when both sides are known, its own has been announced, and its data have gone or come; or, if the
//    tensors differ, with the first two. So both sides end as many, and the next ones match.
// 3. Of data that no receive has taken there are at most kMostAheadBytes, whatever the peer does.
// Only whoever holds the progress lock calls it.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/request/effects.h"
#include "engine/request/request.h"
#include "engine/run/peer_frame.h"
#include "engine/run/tag_matching.h"
#include "engine/run/tracing.h"
#include "net/link.h"

namespace lightcc {

class PeerChannel {
 public:
  static constexpr size_t kAlongBytes = 32 << 10;     // a send of more waits for its receive
  static constexpr size_t kMostAheadBytes = 1 << 20;

  // Names: of this rank and the peer, for errors. All but the link outlives it.
  PeerChannel(std::unique_ptr<Link>, const std::string& own_name, const std::string& peer_name, Effects&, Tracing&);

  void submit(const RequestPtr&);          // of Kind::send or Kind::receive
  bool step();                             // a bounded piece of work; true if anything moved
  bool active() const { return !sends_.empty() || !receives_.empty(); }
  void leave();                            // nothing is in flight, and nothing follows: tells the peer
  bool has_peer_left() const { return has_peer_left_; }  // it has said so, behind all that it has sent
  void fail_all(Code, const std::string& text);
  // In the order of submission; what: the peer is waited for to do, in words.
  template <class Visit> void for_each(Visit visit) const {  // visit(Request&, const char* what)
    for (const auto& [number, one] : sends_) visit(*one.request, awaited(one));
    for (const auto& [number, one] : receives_) visit(*one.request, awaited(one));
  }

 private:
  struct Transfer {                        // a send or a receive of this rank
    RequestPtr request;
    uint64_t number = 0;                   // among those of its kind
    PeerTensor tensor;
    std::byte* memory = nullptr;           // of a send: is only read
    size_t moved = 0;                      // bytes
    bool announced = false;                // to the peer, along with data if there are any
    bool matched = false;                  // the peer's side is known
    bool along = false;                    // a send whose data go with its announcement
    uint64_t theirs = 0;                   // of a receive that expects data: the peer's number
    std::string fault;                     // the tensors differ
    bool all_moved() const { return along || moved == tensor.bytes(); }
  };
  struct ComingSend {                      // of the peer, and no receive belongs to it yet
    uint64_t number = 0;
    PeerTensor tensor;
    bool along = false;
    std::vector<std::byte> data;           // if they came along
  };
  struct Announcing { PeerFrame frame; Transfer* transfer; };
  struct Outgoing { Transfer* transfer = nullptr; size_t at = 0, left = 0; bool announces = false; };
  struct Incoming {                        // data that come along with a frame
    std::byte* to = nullptr;               // nullptr: to be dropped
    size_t left = 0, bytes = 0;
    Transfer* transfer = nullptr;          // that they are for; nullptr: none, or `early`
    bool is_early = false;
  };

  const char* awaited(const Transfer&) const;
  void send(Transfer&);
  void receive(Transfer&);
  void match(Transfer& send, const PeerTensor& theirs);
  void match(Transfer& receive, const ComingSend&);
  void announce(PeerFrame::Type, Transfer&, size_t bytes);
  bool push_record();
  bool push_announcement();
  bool push_run();
  bool push_piece();
  bool pull_record();
  bool pull_piece();
  void take(const PeerFrame&);
  void take_send(const PeerFrame&);
  void take_data(const PeerFrame&);
  void expect_data(const Incoming&, const std::byte* inlined);
  void end_incoming();
  void settle(Transfer&);
  void damaged(const char* how) const;

  const std::unique_ptr<Link> link_;
  BulkLink* const bulk_;
  const size_t record_bytes_;
  const std::string &own_name_, &peer_name_;
  Effects& effects_;
  Tracing& tracing_;

  uint64_t sent_ = 0, received_ = 0;       // how many were submitted
  std::map<uint64_t, Transfer> sends_, receives_;  // that have not ended, by number
  TagMatching<Transfer*, PeerTensor> own_sends_;
  TagMatching<Transfer*, ComingSend> own_receives_;
  std::map<uint64_t, Transfer*> expected_; // receives whose data follow, by the number of the peer's send
  size_t ahead_bytes_ = 0;                 // that have gone along with sends without a receive
  size_t early_bytes_ = 0;                 // of the peer's, that have come so
  std::deque<Announcing> announcing_;
  std::deque<Transfer*> sending_;          // sends whose data are to follow, by turns
  Outgoing out_;
  Incoming in_;
  ComingSend early_;                       // in_ is for it
  MessageTag early_tag_;
  bool has_peer_left_ = false;
};

}  // namespace lightcc
