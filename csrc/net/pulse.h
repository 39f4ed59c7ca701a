// Heartbeats between hosts, which tell a lost host from a busy one: TCP alone would notice after minutes. Every host
// sends a datagram every 250 ms to those that listen to it; a host not heard for 4 s is lost. No I/O and no clock here:
// the caller passes in datagrams and CLOCK_MONOTONIC.
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

inline constexpr uint64_t kBeatNs = 250'000'000, kDeadNs = 4'000'000'000, kNeverNs = 4'000'000'000;
inline constexpr uint64_t kAgeNs = 10'000'000;      // the unit of awake_ages
inline constexpr uint16_t kUnknownAge = 0xffff;
inline constexpr size_t kBeatBytes = 1400;          // no encoded Beat is longer: one datagram, never in fragments

struct Beat {
  int32_t host = 0;
  uint64_t sequence = 0;                // grows with every beat of the host: CLOCK_MONOTONIC, which its ranks share
  std::vector<uint16_t> awake_ages;     // how long ago each local rank looked around; of the first 512
  bool over = false;                    // the epoch has ended there and why (at most 1000 bytes); then without ages
                                        // ok: all ranks of that host have left in peace
  Code code = Code::ok;
  std::string cause;
};
uint16_t age_of(uint64_t ns);           // as awake_ages tells it; never kUnknownAge

struct BeatKey { Digest name, key; };   // of one epoch of a job
BeatKey beat_key(const Terms&);         // throws Error{internal} if there is no secret

std::string encode(const Beat&, const BeatKey&);
// None: a stranger's, another job's or epoch's, or damaged.
std::optional<Beat> parse_beat(std::string_view, const BeatKey&);

// Whom a host sends its beats to: all others, or beyond nine hosts those 1, 2, 4, 8, ... further on; whose it hears.
std::vector<int> listeners_of(int host, int hosts);
std::vector<int> heard_by(int host, int hosts);

// What one rank knows of the other hosts. Owned and called by one thread.
class Pulse {
 public:
  Pulse(int hosts, int own_host, uint64_t now_ns);
  // False: nothing new, an echo or late. Beats of hosts that it need not hear are taken as well, and not missed after.
  bool heard(const Beat&, uint64_t now_ns);
  // Both are called every 250 ms or so, after all datagrams that wait have been heard; each host is reported once. A
  // host that said it is over is neither. Time in which this process did not call counts as a second at most: it was
  // stopped itself, or had no core, and cannot know. So one that wakes declares nobody lost at once, and one that is
  // always late still finds out.
  std::vector<int> lost(uint64_t now_ns);          // heard at least once, and then not for kDeadNs
  std::vector<int> never_heard(uint64_t now_ns);   // not once in kNeverNs: does a firewall keep UDP out?
  bool all_heard() const;                          // of the hosts that it need hear, each at least once
  // Whether that host has been heard after this time of CLOCK_MONOTONIC, and was not over.
  bool heard_since(int host, uint64_t then_ns) const;
  // How long ago that rank last looked around, counted as above; none if nothing is known.
  std::optional<uint64_t> awake_ns_ago(int host, int local, uint64_t now_ns) const;

 private:
  struct Peer {
    bool expected = false, heard = false, over = false, told_lost = false, told_never = false;
    uint64_t sequence = 0, heard_ns = 0;
    uint64_t heard_at = 0;                         // the same by watched()
    std::vector<uint16_t> awake_ages;
  };
  uint64_t watched(uint64_t now_ns) const;
  void look(uint64_t now_ns);
  std::vector<Peer> peers_;                        // by host
  int own_host_;
  uint64_t looked_, watched_ = 0;                  // the latest look; the time watched until then
};

// Whether it falls to this rank to send its host's beat. The ranks of a host share when its last one was sent. The
// first sends; the k-th steps in when none has gone out for k beats more (at most half the time to death), so that a
// host whose first ranks are stopped goes on beating.
bool beat_is_due(uint64_t now_ns, uint64_t last_beat_ns, int local_index);

}  // namespace lightcc
