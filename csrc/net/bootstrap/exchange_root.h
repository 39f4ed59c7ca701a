// Rank 0's side of the BootstrapExchange: serves all ranks from within exchange(), in one epoll loop.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "net/bootstrap/exchange.h"
#include "net/bootstrap/exchange_frames.h"
#include "net/handshake_connection.h"
#include "net/unauthenticated.h"

namespace lightcc {

class ExchangeRoot : public BootstrapExchange {
 public:
  ExchangeRoot(int size, const JobCredentials&, Fd listener);
  std::vector<std::string> exchange(const std::string& mine, const Deadline&) override;
  void fail(const Error&, const Cancellation*) override;
  Address root_address() const override { return {}; }
  Address own_address() const override { return own_; }

 private:
  struct Client {  // a connection
    Client(Fd socket, const JobCredentials& credentials)
        : connection(std::move(socket), Handshake::acceptor(credentials, 0)) {}
    HandshakeConnection connection;
    Address seen, at;       // its end and ours
    uint64_t since_ns = 0;  // accepted
    FrameReader frames{kMostNoteBytes + 64};
    bool come = false;                // it has brought a note, so it is the rank's connection
    std::optional<std::string> note;  // of the round that is not complete yet
    std::deque<std::shared_ptr<const std::string>> out;
    size_t sent = 0;       // of the first in `out`
    bool leaving = false;  // nothing more will be said to it; it shall close
    int fd() const { return connection.fd(); }
    Handshake::State handshake_state() const { return connection.handshake().state(); }
    int rank() const { return connection.handshake().hello().from; }
  };
  static constexpr uint64_t kSweepNs = 250'000'000;  // between two looks for clients that are overdue
  static constexpr uint64_t kPauseNs = 50'000'000;   // between two looks whether there is a descriptor again
  void watch(int how, int fd, uint32_t events);      // as epoll_ctl
  void serve(const Deadline&);  // waits for something to happen and does what it asks for
  void accept_some();
  void pause_accepting(int error);
  void on_readable(Client&);
  bool read_some(Client&);
  void on_frames(Client&, std::string_view);
  void on_handshake(Client&);
  void on_frame(Client&, const Frame&);
  void enqueue(Client&, std::shared_ptr<const std::string>);
  void flush(Client&);
  void drop(Client&);  // it is gone, or shall be
  void evict(int fd);  // an unauthenticated client, whose descriptor is needed now
  bool is_dropped(const Client&) const;
  void drop_overdue();
  void tell_failure(const Cancellation*, uint64_t notice_ns);
  [[noreturn]] void end(const Cancellation*);  // tells and throws it
  std::vector<int> absent() const;  // ranks that have brought no note to this round
  Error missing(const std::vector<int>&, uint64_t deadline_ns) const;

  const int size_;
  const JobCredentials credentials_;
  const Fd listener_, epoll_;
  const uint64_t opened_ns_;
  uint64_t deadline_ns_ = 0, swept_ns_ = 0;
  uint64_t paused_until_ns_ = 0;  // no descriptor is left for another connection; 0: there is
  std::string shortage_;          // of what, while there is
  std::map<int, Client> clients_;  // by descriptor
  std::vector<Client*> by_rank_;  // once they have come
  std::vector<int> gone_;        // ranks that left after they had got all notes
  std::set<int> told_;           // ranks that know of the failure
  std::vector<int> dropped_;     // descriptors to close when the events at hand are done with
  int round_ = 0, noted_ = 0, unsent_ = 0;
  bool complete_ = false;  // the round's notes are on their way to all
  PendingConnections pending_;  // by descriptor
  UnauthenticatedConnections unauthenticated_;
  std::string refused_;  // why a process of this job was refused last
  Address own_;
  std::optional<Error> failure_;
  bool failure_told_ = false;
};

}  // namespace lightcc
