// Heartbeats between hosts, which tell a lost host from a busy one: TCP alone would notice after minutes. Every host
// sends a datagram every 250 ms to those that listen to it. A host not heard for 1 s is in doubt and asked over TCP
// (host_probes.h); one that is not heard for 4 s and does not answer either is lost. No I/O and no clock here: the
// caller passes in datagrams, answers and CLOCK_MONOTONIC.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/hmac.h"
#include "net/handshake.h"

namespace lightcc {

inline constexpr uint64_t kHeartbeatNs = 250'000'000, kDoubtNs = 1'000'000'000, kDeadNs = 4'000'000'000;
inline constexpr uint64_t kNeverNs = 4'000'000'000;
inline constexpr uint64_t kAgeNs = 10'000'000;      // the unit of awake_ages
inline constexpr uint16_t kUnknownAge = 0xffff;
inline constexpr size_t kHeartbeatBytes = 1400;     // no encoded Heartbeat is longer: one datagram, never in fragments

struct Heartbeat {
  int32_t host = 0;
  uint64_t sequence = 0;                // counts the host's heartbeats of this epoch, over all its ranks: no clock,
                                        // which a reboot would set back
  std::vector<uint16_t> awake_ages;     // how long ago each local rank looked around; of the first 512
  bool over = false;                    // the epoch has ended there and why (at most 1000 bytes); then without ages
                                        // ok: all ranks of that host have shut down
  Code code = Code::ok;
  std::string cause;
};
uint16_t age_of(uint64_t ns);           // as awake_ages tells it; never kUnknownAge

struct HeartbeatKey { Digest name, key; };  // of one epoch of a job, by its nonce
HeartbeatKey heartbeat_key(const JobCredentials&);  // throws Error{internal} if there is no secret

// How each heartbeat of an epoch begins: a multiple of four bytes, which a stranger cannot know.
std::string heartbeat_head(const HeartbeatKey&);
std::string encode(const Heartbeat&, const HeartbeatKey&);
// None: unauthenticated, another job's or epoch's, or damaged.
std::optional<Heartbeat> parse_heartbeat(std::string_view, const HeartbeatKey&);

// Whom a host sends its heartbeats to: all others, or beyond nine hosts those 1, 2, 4, 8, ... further on; and whose it
// receives.
std::vector<int> receivers_of(int host, int hosts);
std::vector<int> senders_to(int host, int hosts);

// What one rank knows of the other hosts. Owned and called by one thread.
class FailureDetector {
 public:
  FailureDetector(int hosts, int own_host, uint64_t now_ns);
  // False: nothing new, an echo or late. Those of hosts that it need not hear are taken as well, and not
  // missed after.
  bool heard(const Heartbeat&, uint64_t now_ns);
  void answered(int host, uint64_t now_ns);        // over TCP: it is alive, though no heartbeat has come
  // These are called every 250 ms or so, after all datagrams and answers that wait have been taken; all but doubtful()
  // report each host once. A host that said it is over is none of them. Time in which this process did not call counts
  // as a second at most: it was stopped itself, or had no core, and cannot know. So one that wakes declares nobody lost
  // at once, and one that is always late still finds out.
  std::vector<int> lost(uint64_t now_ns);          // heard at least once, and then there was no sign of it for kDeadNs
  std::vector<int> doubtful(uint64_t now_ns);      // the same for kDoubtNs, and not lost: each is to be asked now
  std::vector<int> spared(uint64_t now_ns);        // it has answered kDeadNs after its last heartbeat; told once
  std::vector<int> never_heard(uint64_t now_ns);   // not once in kNeverNs: does a firewall keep UDP out?
  // Whether datagrams get through: each host that it must hear was heard, and none lives by answers alone.
  bool all_heard() const;
  // Whether that host has been heard after this time of CLOCK_MONOTONIC, and was not over.
  bool heard_since(int host, uint64_t then_ns) const;
  // How long ago that rank last looked around, counted as above; none if nothing is known.
  std::optional<uint64_t> awake_ns_ago(int host, int local, uint64_t now_ns) const;

 private:
  struct Peer {
    bool expected = false, heard = false, over = false, told_lost = false, told_spared = false, told_never = false;
    uint64_t sequence = 0, heard_ns = 0;
    uint64_t heard_at = 0;                         // the same by watched()
    uint64_t alive_at = 0;                         // the same of the last heartbeat or answer
    std::vector<uint16_t> awake_ages;
  };
  static bool is_missed(const Peer& one) { return one.expected && one.heard && !one.over && !one.told_lost; }
  // Connections get through and datagrams do not. After a cut that heals, a few answers come before heartbeats do.
  static bool answers_alone(const Peer& one) { return is_missed(one) && one.alive_at >= one.heard_at + kDeadNs; }
  uint64_t watched(uint64_t now_ns) const;
  void look(uint64_t now_ns);
  std::vector<Peer> peers_;                        // by host
  int own_host_;
  uint64_t looked_, watched_ = 0;                  // the latest look; the time watched until then
};

// Whether it falls to this rank to send its host's heartbeat. The ranks of a host share when its last one was sent. The
// first sends; the k-th steps in when none has gone out for k periods more (at most half of kDeadNs), so that a host
// whose first ranks are stopped goes on sending.
bool heartbeat_is_due(uint64_t now_ns, uint64_t last_heartbeat_ns, int local_index);

}  // namespace lightcc
