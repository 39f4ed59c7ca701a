// Asks ranks of other hosts over TCP whether they are alive, where no heartbeat of theirs has come for a while: their
// datagrams may be dropped where connections get through. The answer is a handshake that ends, for which it takes a
// process of the job and the secret. That the peer's kernel takes the connection is none: so does that of a host whose
// processes are all stopped.
#pragma once
#include <list>
#include <vector>

#include "net/address.h"
#include "net/handshake_connection.h"

namespace lightcc {

class HostProbes {                                 // used by one thread
 public:
  virtual ~HostProbes() = default;
  virtual void ask(int rank, uint64_t now_ns) = 0;
  virtual std::vector<int> step(uint64_t now_ns) = 0;  // takes what has come: the ranks that have answered
  virtual int descriptor() const = 0;              // readable while step() has something to do
};

class TcpProbes : public HostProbes {
 public:
  static constexpr uint64_t kLongestNs = 3'000'000'000;  // a probe that is not answered by then is given up

  // listens_at: where the ranks take connections, by world rank. from: where this rank's start; none: wherever.
  // Throws Error{internal} if the system has no descriptor for it.
  TcpProbes(JobCredentials, int rank, std::vector<Address> listens_at, const Address& from);
  void ask(int rank, uint64_t now_ns) override;    // what the system refuses is a probe that is not answered
  std::vector<int> step(uint64_t now_ns) override;
  int descriptor() const override { return epoll_.get(); }
  size_t open() const { return probes_.size(); }

 private:
  struct Probe : HandshakeConnection {
    Probe(Fd fd, Handshake handshake, int asked, uint64_t now_ns)
        : HandshakeConnection(std::move(fd), std::move(handshake)), rank(asked), since_ns(now_ns) {}
    const int rank;
    const uint64_t since_ns;
    bool is_connected = false;
  };
  enum class Progress { going, failed, answered };
  Progress go_on(Probe&);
  std::list<Probe>::iterator give_up(std::list<Probe>::iterator);
  bool watch(Probe&, uint32_t events, int operation);

  const JobCredentials credentials_;
  const int rank_;
  const std::vector<Address> listens_at_;
  const Address from_;
  const Fd epoll_;
  std::list<Probe> probes_;
};

}  // namespace lightcc
