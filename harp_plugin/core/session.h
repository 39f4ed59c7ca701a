// The protocol of one connection, from the first OPEN to the last CLOSE. connection.h has what others see of it.
//
// Life: opening -> open -> closing -> closed. The side that connects is open when OPEN_ACK has come, the other when
// any packet has come that carries the id it chose, which only the receiver of its OPEN_ACK can know.
//
//                connect()                                  OPEN with a listener's nonce
//                   |                                                  |
//                opening -- OPEN_ACK --> open <-- first packet -- opening (half open, dies of its time-out)
//                   |                     |  \                         .
//                   |      close(), CLOSE |   \ CLOSE, RESET, silence
//                   |                  closing \                       .
//                   +-- time-out --------> closed
//
// Time is awake time: what this process slept away does not count against the peer (forgive()).
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "harp_plugin/core/congestion.h"
#include "harp_plugin/core/events.h"
#include "harp_plugin/core/incoming.h"
#include "harp_plugin/core/incoming_stream.h"
#include "harp_plugin/core/outgoing.h"
#include "harp_plugin/core/received_numbers.h"
#include "harp_plugin/core/rtt.h"
#include "harp_plugin/core/sent_packets.h"
#include "harp_plugin/core/seal.h"

namespace harp {

inline constexpr uint64_t kNever = UINT64_MAX;
inline constexpr uint64_t kSilenceNs = kSecond;  // of a peer that was asked: it, or the path, is not there
inline constexpr uint32_t kMostWindow = 4096;         // packets in flight
inline constexpr uint32_t kMostControlInFlight = 64;  // grants, probes and the like beside them

Key opening_key(const std::string& secret, const Nonce&);  // of OPEN and OPEN_ACK

struct Path {
  Address to;
  uint16_t local = 0;
  bool known = false;           // the peer has been heard on it
  uint32_t in_flight = 0, timeouts = 0;
  uint64_t sequence = 0;        // packets sent on it
  uint64_t newest_acked = 0;    // one past the highest sequence that was acknowledged
  uint64_t rest_until_ns = 0;   // not used until then: nothing came through
};

class Session {
 public:
  struct Identity {
    ConnectionId id;
    Nonce nonce;
    Mode mode;
    bool opener;
    uint64_t first_number;
  };
  Session(const Identity&, const Options&, Events&, uint64_t now_ns);

  void connect_to(const Address&);                                    // the opener's first step
  void accept(const OpenBody&, const Packet&);                        // the other side's, and for each further path
  void answered(const OpenBody&, const Packet&, uint64_t now_ns);     // OPEN_ACK has come

  bool send(const uint8_t* data, uint32_t bytes, uint64_t request, uint64_t now_ns);
  bool post(uint8_t* to, uint32_t capacity, uint64_t request, uint64_t now_ns);
  void consume(uint32_t records, uint64_t now_ns);
  void close(uint64_t now_ns);
  void fail(Status, const std::string& why);

  // Any packet but OPEN, OPEN_ACK and RESET, whose body loses its tag. true: it is kept.
  bool receive(Packet&, uint64_t now_ns);
  void reset_by_peer(uint32_t number);
  size_t transmit(std::span<TxPacket>, uint64_t now_ns);
  void advance(uint64_t now_ns);
  void forgive(uint64_t pause_ns, uint64_t now_ns);  // this process did not run for so long
  uint64_t deadline_ns() const;  // of advance()
  bool wants_to_transmit(uint64_t now_ns);
  bool idle(uint64_t now_ns);  // nothing is under way: only signs of life are due, far apart
  bool finished() const { return finished_; }

  const Identity& identity() const { return identity_; }
  State state() const { return state_; }
  uint32_t peer_id() const { return peer_id_; }
  bool knows(const Address&) const;
  bool opened_by(const OpenBody& body) const { return !identity_.opener && peer_offer_ == body; }
  uint32_t payload() const { return payload_; }
  const Incoming& incoming() const { return incoming_; }
  const Counters& counters();
  OpenBody offer() const;

  // Where the endpoint keeps it.
  bool in_idle_list = false;
  size_t place = 0;

 private:
  // Receiving.
  Arrival on_data(const Packet&, bool keep);
  void received(const Completion&);
  Arrival on_control(const Packet&, uint64_t now_ns);
  Arrival on_ack(std::span<const uint8_t> body, uint64_t now_ns);
  Arrival on_grant(const Packet&, uint64_t now_ns);
  Arrival on_close(const Packet&, uint64_t now_ns);
  void agree(const OpenBody& peer);
  void learn_path(const Packet&);
  void acknowledge_later(const Header&, bool in_order, uint64_t now_ns);
  void acknowledged(SentPacket&);
  void detect_losses(uint64_t now_ns);
  void lose(SentPacket&, SentPacket::Fate, uint64_t now_ns);
  void timed_out(uint64_t now_ns);
  // Sending.
  void begin(TxPacket*, Type, uint8_t flags, uint16_t path, Header*) const;
  void write_sealed_header(Header, TxPacket*) const;
  bool opens_due(uint64_t now_ns) const;
  void send_packet(Header*, TxPacket*, SentPacket, size_t body_bytes, uint64_t now_ns);
  size_t transmit_open(std::span<TxPacket>, uint64_t now_ns);
  size_t transmit_control(std::span<TxPacket>, uint64_t now_ns);
  void transmit_grant(TxPacket*, uint64_t now_ns);
  void transmit_ack(TxPacket*, uint64_t now_ns);
  void transmit_close(TxPacket*, uint64_t now_ns);
  size_t write_ack_body(uint8_t* to, uint64_t now_ns);
  size_t transmit_data(std::span<TxPacket>, uint64_t now_ns);
  uint16_t choose_path(uint64_t now_ns);
  uint32_t window() const { return std::min(congestion_.window(), peer_offer_.receive_packets); }
  bool grants_waiting() const;
  uint64_t timeout_ns() const;
  uint64_t silent_ns() const;  // when the peer counts as silent, having been asked
  // Ending.
  void abandon_packets();
  void fail_requests(Status);
  void complete(const Completion& completion) { events_.tell(event::Completed{identity_.id, completion}); }
  void tell_failed(Status status, std::string why) {
    why_ = std::move(why);
    events_.tell(event::Failed{identity_.id, status, why_});
  }

  const Identity identity_;
  const Options& options_;
  Events& events_;
  State state_ = State::opening;
  bool finished_ = false;
  bool told_ = false;        // the application knows that it is over
  bool peer_closed_ = false;
  Status over_ = Status::ok; // why, for requests that come later
  std::string why_;          // in words

  uint32_t peer_id_ = 0;
  OpenBody peer_offer_;
  uint32_t payload_ = 0;     // of a full packet, each way
  Key open_key_{}, key_{};
  std::array<Path, kMostPaths> paths_;
  int path_count_ = 1;
  uint16_t path_ = 0, reply_path_ = 0;  // of data now, of acknowledgements
  uint32_t path_burst_ = 0;
  uint64_t choice_;  // state of the generator that chooses paths

  SentPackets sent_;
  ReceivedNumbers received_;
  Rtt rtt_;
  Congestion congestion_;
  Outgoing outgoing_;
  Incoming incoming_;
  IncomingStream stream_;

  uint32_t in_flight_ = 0;
  uint32_t beyond_window_ = 0;   // packets that may be sent although the window is full: probes of a time-out
  uint32_t reordering_ = 3;      // later packets of its path that must have come before one counts as lost
  bool limited_ = false;         // by the window, when it last stopped sending
  uint64_t largest_acked_ = 0;   // one past it
  uint64_t newest_acked_sent_ns_ = 0;
  uint64_t loss_ns_ = kNever;    // when the oldest packet is lost for being late
  uint64_t timeout_base_ns_ = 0;
  uint64_t data_lost_ns_ = kNever;  // since when DATA is missed and none is acknowledged, though the peer is heard
  uint32_t backoff_ = 0;

  bool ack_due_ = false, grant_due_ = false, probe_due_ = false, close_due_ = false;
  uint64_t ack_ns_ = kNever, grant_ns_ = kNever;
  uint32_t unacknowledged_ = 0;
  uint64_t largest_received_ns_ = 0;
  uint64_t announced_ = 0;       // messages, or records, that the peer has been told it may send
  uint64_t closed_floor_ = UINT64_MAX;  // messages from here on were given up
  CloseBody close_body_;

  uint64_t opened_ns_, heard_ns_;
  uint64_t asked_ns_ = 0;        // when packets went out that the peer, silent since heard_ns_, has to answer
  uint64_t open_ns_ = 0;         // when OPEN goes out next
  uint32_t open_tries_ = 0;
  uint8_t open_acks_due_ = 0;    // a bit for each path
  uint64_t linger_ns_ = kNever;
  Counters counters_;
};

}  // namespace harp
