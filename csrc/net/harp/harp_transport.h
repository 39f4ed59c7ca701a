// Links to ranks of other hosts over HARP (docs/harp.md): a stream for each (peer, group, lane), made when it is first
// used. The higher rank connects, with the handle that the peer's contact holds: contacts travel in the ranks' own
// authenticated exchange (bootstrap/), and a process that does not know the nonce in a handle opens nothing. What was
// lost on the way is sent again by HARP; a peer of which nothing is heard for so long is lost.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/harp/harp_link.h"
#include "net/link_table.h"
#include "net/transport.h"

namespace lightcc {

struct HarpPeer {
  std::string name;     // "rank 1 (pid 17) on host h"
  std::string address;  // as its HarpTransport says; empty: it is of this host
};

struct HarpOptions {
  std::string port = "udp", interface = "", port_range = "";  // as HARP_PORT and so on; empty: what these say
  uint32_t peer_timeout_ms = 4'000, connect_timeout_ms = 30'000;
  int inline_mode = 3;                  // as harp_options.inline_mode: step() and flush() poll, and nothing else does
};

class HarpTransport : public Transport {
 public:
  // Opens a context and listens. Throws Error{internal} where HARP cannot.
  HarpTransport(const HarpOptions&, int rank, uint64_t epoch);
  ~HarpTransport() override;
  std::string address() const;                    // for the contacts of this rank, as text
  void set_peers(std::vector<HarpPeer>);          // by world rank, before anything else below
  // Called when the first stream to or from a peer comes about.
  void set_watch(std::function<void(int peer)> watch) { watch_ = std::move(watch); }

  std::unique_ptr<Link> link(int group, int lane, int peer) override;
  bool step() override;
  void flush() override;
  uint64_t sent_bytes() const override { return sent_bytes_.load(std::memory_order_relaxed); }
  NetworkFaults faults() override;
  void mark_left(int peer) override { links_.mark_left(peer); }
  void probe(int peer) override;

  int descriptor() const override { return descriptor_; }
  uint64_t arm() override;
  bool busy() const override;

  bool finish() override;
  void retire(int group) override;
  void end(const Error& cause) override;
  void close() override;  // waits some milliseconds at most, for peers to receive the cause
  void close_in_child() override;

 private:
  struct OpenLink {
    const LinkKey key;
    HarpStream stream;
    const bool connects;                          // this rank connects
    bool retired = false, is_closed = false;
    bool sent_notice = false;
    bool is_active = false;                       // among active_
  };
  struct Incoming {                               // it has not said yet which link it is for
    harp_connection* connection;
    uint64_t since_ns;
  };
  class HarpLink;

  OpenLink& link_state(const LinkKey&);
  void open(OpenLink&);
  void accept();
  void attach(OpenLink&, harp_connection*);
  bool admit(const Incoming&);                    // false: it may still say it
  bool step(OpenLink&);
  void close(OpenLink&);
  bool has_more_to_say();
  void poll();

  const int rank_;
  const uint64_t epoch_;
  harp_context* context_ = nullptr;
  harp_listener* listener_ = nullptr;
  harp_handle handle_{};
  int descriptor_ = -1;
  std::vector<HarpPeer> peers_;
  std::vector<char> watched_;
  std::function<void(int peer)> watch_;
  LinkTable<OpenLink> links_;
  std::vector<OpenLink*> active_;                 // those that have or had a connection, and were not closed for long
  std::vector<Incoming> incoming_;
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<int> waiting_{0};                   // links that have something to hand over
  bool has_news_ = true;                          // of the context's, that no step has looked at yet
  bool has_work_ = false;                         // for the context: links were used since the last poll
  uint64_t looked_ns_ = 0;
  uint64_t retransmits_ = 0, retransmits_seen_ = 0;  // all; and of the connections that were open at the last look
};

}  // namespace lightcc
