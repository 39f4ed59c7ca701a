#include "net/health/failure_detector.h"

#include <algorithm>

#include "base/text.h"
#include "base/wire.h"

namespace lightcc {
namespace {

constexpr uint32_t kHeartbeatMagic = 0x6263636c;  // "lccb" on the wire
constexpr uint32_t kHeartbeatProtocol = 2;
constexpr size_t kHeadBytes = sizeof kHeartbeatMagic + sizeof kHeartbeatProtocol + sizeof(Digest);
constexpr size_t kMostAges = 512, kCauseBytes = 1000;
constexpr int kAllHosts = 9;                        // up to so many everyone hears everyone
constexpr uint64_t kLongestLookNs = 1'000'000'000;  // four heartbeats of a live host fall into it
constexpr uint64_t kLatestStepNs = kDeadNs / 2;

std::string_view view(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

Heartbeat read_body(WireReader reader) {
  Heartbeat heartbeat;
  heartbeat.host = reader.get<int32_t>();
  heartbeat.sequence = reader.get<uint64_t>();
  const auto over = reader.get<uint8_t>();
  if (heartbeat.host < 0 || over > 1) WireReader::fail();
  heartbeat.over = over;
  if (over) {
    heartbeat.code = reader.get_enum<Code>(int(Code::internal) + 1);
    heartbeat.cause = reader.text();
    if (heartbeat.code == Code::pending || heartbeat.cause.size() > kCauseBytes) WireReader::fail();
  } else {
    heartbeat.awake_ages = reader.values<uint16_t>();
    if (heartbeat.awake_ages.size() > kMostAges) WireReader::fail();
  }
  if (!reader.empty()) WireReader::fail();
  return heartbeat;
}

// The distances at which a host is heard.
std::vector<int> distances(int hosts) {
  std::vector<int> all;
  for (int distance = 1; distance < hosts; distance = hosts <= kAllHosts ? distance + 1 : distance * 2)
    all.push_back(distance);
  return all;
}

}  // namespace

uint16_t age_of(uint64_t ns) { return uint16_t(std::min<uint64_t>(ns / kAgeNs, kUnknownAge - 1)); }

HeartbeatKey heartbeat_key(const JobCredentials& credentials) {
  if (credentials.secret.empty()) throw Error(Code::internal, "heartbeats need the job's secret, and there is none");
  const std::string epoch =
      WireWriter().put("beat").put(credentials.job).put(credentials.epoch).put(credentials.nonce).take();
  return {sha256(epoch), hmac_sha256(credentials.secret, epoch)};
}

std::string heartbeat_head(const HeartbeatKey& key) {
  return WireWriter().put(kHeartbeatMagic).put(kHeartbeatProtocol).put(key.name).take();
}

std::string encode(const Heartbeat& heartbeat, const HeartbeatKey& key) {
  WireWriter body;
  body.put(heartbeat.host).put(heartbeat.sequence).put(uint8_t(heartbeat.over));
  if (heartbeat.over) {
    body.put(heartbeat.code).put(truncate_utf8(heartbeat.cause, kCauseBytes));
  } else {
    const size_t ages = std::min(heartbeat.awake_ages.size(), kMostAges);
    body.put(std::vector<uint16_t>(heartbeat.awake_ages.begin(), heartbeat.awake_ages.begin() + ptrdiff_t(ages)));
  }
  std::string bytes = heartbeat_head(key) + body.take();
  return bytes.append(view(hmac_sha256(view(key.key), bytes)));
}

std::optional<Heartbeat> parse_heartbeat(std::string_view bytes, const HeartbeatKey& key) {
  if (bytes.size() < kHeadBytes + sizeof(Digest) || bytes.size() > kHeartbeatBytes) return {};
  const std::string_view said = bytes.substr(0, bytes.size() - sizeof(Digest));
  if (!said.starts_with(heartbeat_head(key))) return {};
  const Digest proof = WireReader(bytes.substr(said.size())).bytes<sizeof(Digest)>();
  if (!equal(proof, hmac_sha256(view(key.key), said))) return {};
  try {
    return read_body(WireReader(said.substr(kHeadBytes)));
  } catch (const Error&) {
    return {};
  }
}

std::vector<int> receivers_of(int host, int hosts) {
  std::vector<int> all = distances(hosts);
  for (int& one : all) one = (host + one) % hosts;
  return all;
}

std::vector<int> senders_to(int host, int hosts) {
  std::vector<int> all = distances(hosts);
  for (int& one : all) one = (host + hosts - one) % hosts;
  return all;
}

bool heartbeat_is_due(uint64_t now_ns, uint64_t last_heartbeat_ns, int local_index) {
  const uint64_t patience = std::min((uint64_t(local_index) + 1) * kHeartbeatNs, kLatestStepNs);
  // Another rank may have read the clock later.
  return now_ns >= last_heartbeat_ns && now_ns - last_heartbeat_ns >= patience;
}

FailureDetector::FailureDetector(int hosts, int own_host, uint64_t now_ns)
    : peers_(size_t(hosts)), own_host_(own_host), looked_(now_ns) {
  for (int host : senders_to(own_host, hosts)) peers_[size_t(host)].expected = true;
}

uint64_t FailureDetector::watched(uint64_t now_ns) const {
  return watched_ + (now_ns > looked_ ? std::min(now_ns - looked_, kLongestLookNs) : 0);
}

void FailureDetector::look(uint64_t now_ns) {
  watched_ = watched(now_ns);
  looked_ = std::max(looked_, now_ns);
}

bool FailureDetector::heard(const Heartbeat& heartbeat, uint64_t now_ns) {
  if (heartbeat.host < 0 || heartbeat.host >= int(peers_.size()) || heartbeat.host == own_host_) return false;
  Peer& peer = peers_[size_t(heartbeat.host)];
  if (peer.heard && heartbeat.sequence <= peer.sequence) return false;
  peer.heard = true;
  peer.over = heartbeat.over;
  peer.sequence = heartbeat.sequence;
  peer.heard_at = peer.alive_at = watched(now_ns);
  peer.heard_ns = now_ns;
  peer.awake_ages = heartbeat.awake_ages;
  return true;
}

void FailureDetector::answered(int host, uint64_t now_ns) { peers_.at(size_t(host)).alive_at = watched(now_ns); }

std::vector<int> FailureDetector::lost(uint64_t now_ns) {
  look(now_ns);
  std::vector<int> hosts;
  for (Peer& peer : peers_) {
    if (!is_missed(peer) || watched_ < peer.alive_at + kDeadNs) continue;
    peer.told_lost = true;
    hosts.push_back(int(&peer - peers_.data()));
  }
  return hosts;
}

std::vector<int> FailureDetector::doubtful(uint64_t now_ns) {
  look(now_ns);
  std::vector<int> hosts;
  for (Peer& peer : peers_)
    if (is_missed(peer) && watched_ >= peer.alive_at + kDoubtNs) hosts.push_back(int(&peer - peers_.data()));
  return hosts;
}

std::vector<int> FailureDetector::spared(uint64_t now_ns) {
  look(now_ns);
  std::vector<int> hosts;
  for (Peer& peer : peers_) {
    if (peer.told_spared || !answers_alone(peer)) continue;
    peer.told_spared = true;
    hosts.push_back(int(&peer - peers_.data()));
  }
  return hosts;
}

std::vector<int> FailureDetector::never_heard(uint64_t now_ns) {
  look(now_ns);
  std::vector<int> hosts;
  for (Peer& peer : peers_) {
    if (!peer.expected || peer.heard || peer.told_never || watched_ < kNeverNs) continue;
    peer.told_never = true;
    hosts.push_back(int(&peer - peers_.data()));
  }
  return hosts;
}

bool FailureDetector::all_heard() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !peer.expected || (peer.heard && !answers_alone(peer));
  });
}

bool FailureDetector::heard_since(int host, uint64_t then_ns) const {
  const Peer& peer = peers_.at(size_t(host));
  return peer.heard && !peer.over && peer.heard_ns > then_ns;
}

std::optional<uint64_t> FailureDetector::awake_ns_ago(int host, int local, uint64_t now_ns) const {
  if (host < 0 || host >= int(peers_.size()) || local < 0) return {};
  const Peer& peer = peers_[size_t(host)];
  if (size_t(local) >= peer.awake_ages.size() || peer.awake_ages[size_t(local)] == kUnknownAge) return {};
  const uint64_t since = std::max(watched(now_ns), peer.heard_at) - peer.heard_at;
  return peer.awake_ages[size_t(local)] * kAgeNs + since;
}

}  // namespace lightcc
