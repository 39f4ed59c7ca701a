// Datagrams of anyone: what is taken for a heartbeat is exactly what encode() writes; and whatever comes when, a host
// is reported at most once, and only if it had to be heard. An input is: a flag (kSign: the rest is the body of a
// heartbeat and gets a valid signature), then the bytes; every eight of them are also a step of a script for
// FailureDetector.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "net/health/failure_detector.h"

namespace {

using namespace lightcc;

constexpr uint8_t kSign = 1;
constexpr size_t kHeadBytes = 40;

void expect(bool holds) {
  if (!holds) std::abort();
}

void check_datagram(std::string bytes, bool sign, const HeartbeatKey& key) {
  const auto text = [](const Digest& digest) { return std::string(digest.begin(), digest.end()); };
  if (sign) {
    bytes = encode({}, key).substr(0, kHeadBytes) + bytes;
    bytes += text(hmac_sha256(text(key.key), bytes));
  }
  const auto heartbeat = parse_heartbeat(bytes, key);
  if (heartbeat) expect(encode(*heartbeat, key) == bytes);
}

void check_script(const uint8_t* data, size_t size) {
  constexpr int kHosts = 12;
  const int own = size > 0 ? data[0] % kHosts : 0;
  const auto expected = senders_to(own, kHosts);
  FailureDetector detector(kHosts, own, 0);
  uint64_t now = 0;
  int lost[kHosts] = {}, spared[kHosts] = {}, never[kHosts] = {};
  for (; size >= 8; data += 8, size -= 8) {
    uint32_t step;
    std::memcpy(&step, data + 4, sizeof step);
    now += step;
    Heartbeat heartbeat;
    heartbeat.host = int8_t(data[0]), heartbeat.sequence = data[1], heartbeat.over = data[2] & 1;
    heartbeat.awake_ages.assign(data[2] >> 4, data[3]);
    const bool news = detector.heard(heartbeat, now);
    expect(!news || (heartbeat.host >= 0 && heartbeat.host < kHosts && heartbeat.host != own));
    expect(!detector.heard(heartbeat, now));
    if (data[2] & 2) detector.answered(data[1] % kHosts, now);
    const auto age = detector.awake_ns_ago(heartbeat.host, data[3] % 16, now);
    expect(!news || age.has_value() == (data[3] % 16 < data[2] >> 4));
    const auto check = [&](const std::vector<int>& hosts, int* told) {
      for (int host : hosts) {
        expect(++told[host] == 1 && std::count(expected.begin(), expected.end(), host) == 1);
        expect(!news || host != heartbeat.host);
      }
    };
    check(detector.lost(now), lost);
    check(detector.spared(now), spared);
    check(detector.never_heard(now), never);
    for (int host : detector.doubtful(now)) expect(lost[host] == 0 && (!news || host != heartbeat.host));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const HeartbeatKey key = heartbeat_key({"job", "1.0", "secret", 2});
  if (size == 0) return 0;
  check_datagram(std::string(reinterpret_cast<const char*>(data + 1), size - 1), data[0] & kSign, key);
  check_script(data + 1, size - 1);
  return 0;
}
