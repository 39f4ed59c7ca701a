#include "collective/network_probe.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr uint64_t kLookNs = 1'000'000;
constexpr size_t kPings = 17;
// An exchange grows until it takes so long, as TCP begins slowly, or has so many bytes.
constexpr double kLongEnoughS = 0.02;
constexpr size_t kFirstBytes = 256 << 10, kMostBytes = 16 << 20;
constexpr size_t kCopiedBytes = 8 << 20;
constexpr uint64_t kCopyNs = 5'000'000;

double seconds_since(uint64_t begin_ns) { return double(now_ns() - begin_ns) * 1e-9; }

}  // namespace

int probe_partner(int host, int hosts, int round) {
  if (hosts < 2 || (round == 1 && hosts == 2)) return -1;
  const bool even = hosts % 2 == 0;
  const int place = round == 0 ? host : (host + hosts - 1) % hosts;  // pairs are places 2i and 2i + 1
  const int other = place ^ 1;
  if (!even && other == hosts) return -1;
  return round == 0 ? other : (other + 1) % hosts;
}

template <class Ready> bool LinkProbe::wait_until(Ready ready) {
  while (!ready()) {
    peers_.flush_and_wake();
    if (peers_.step()) continue;
    if (deadline_.over()) return false;
    peers_.wait_for_network(kLookNs);
  }
  peers_.flush_and_wake();
  return true;
}

bool LinkProbe::send(uint64_t value) {
  std::byte* to = nullptr;
  if (!wait_until([&] { return (to = link_.reserve(sizeof value)) != nullptr; })) return false;
  std::memcpy(to, &value, sizeof value);
  link_.commit(sizeof value);
  peers_.flush_and_wake();
  return true;
}

bool LinkProbe::receive(uint64_t* value) {
  const std::byte* from = nullptr;
  if (!wait_until([&] { return (from = link_.peek(sizeof *value)) != nullptr; })) return false;
  std::memcpy(value, from, sizeof *value);
  link_.consume(sizeof *value);
  return true;
}

// The bytes themselves say nothing: those that the link's memory has.
bool LinkProbe::exchange(size_t bytes) {
  const size_t record = std::min(bytes, link_.record_bytes());
  size_t sent = 0, received = 0;
  return wait_until([&] {
    for (; sent < bytes && link_.reserve(record); sent += record) link_.commit(record);
    for (; received < bytes && link_.peek(record); received += record) link_.consume(record);
    return sent >= bytes && received >= bytes;
  });
}

std::optional<double> LinkProbe::latency_s() {
  std::array<double, kPings> times{};
  for (double& time : times) {
    const uint64_t begin = now_ns();
    uint64_t echo;
    if (leads_ ? !send(begin) || !receive(&echo) : !receive(&echo) || !send(echo)) return std::nullopt;
    time = seconds_since(begin) / 2;
  }
  std::ranges::nth_element(times, times.begin() + kPings / 2);
  return times[kPings / 2];
}

std::optional<double> LinkProbe::bytes_per_s() {
  for (size_t bytes = kFirstBytes;; bytes *= 4) {
    const uint64_t begin = now_ns();
    if (!exchange(bytes)) return std::nullopt;
    const double seconds = seconds_since(begin);
    uint64_t enough = seconds >= kLongEnoughS || bytes >= kMostBytes;
    if (leads_ ? !send(enough) : !receive(&enough)) return std::nullopt;
    if (enough) return double(bytes) / std::max(seconds, 1e-9);
  }
}

double copied_bytes_per_s() {
  std::vector<std::byte> from(kCopiedBytes), to(kCopiedBytes);
  const uint64_t begin = now_ns();
  int times = 0;
  do {
    std::memcpy((times % 2 ? from : to).data(), (times % 2 ? to : from).data(), kCopiedBytes);
    ++times;
  } while (now_ns() - begin < kCopyNs);
  return 2.0 * kCopiedBytes * times / seconds_since(begin);
}

}  // namespace lightcc
