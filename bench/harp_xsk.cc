// AF_XDP with nothing around it: frames from one namespace to another as fast as they go, copied to and from the sockets'
// memory, no acknowledgements. What arrives in a second bounds what HARP's port xdp can carry. Prints JSON as harp-bench.
//   harp_xsk_bench SENDER_NETNS RECEIVER_NETNS RECEIVER_ADDRESS SECONDS SENDER_CORE RECEIVER_CORE
// Both namespaces have an interface eth0 with an address, of which SENDER_NETNS is asked for the neighbour's.
#include <arpa/inet.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "harp_plugin/port/interfaces.h"
#include "harp_plugin/port/xdp_filter.h"
#include "harp_plugin/port/xdp_frame.h"
#include "harp_plugin/port/xsk.h"

namespace {

using namespace harp;

constexpr uint16_t kPort = 40000;
constexpr size_t kWarm = 1 << 20;  // bytes that are sent again and again, and written again and again
constexpr uint64_t kSettleNs = 200'000'000;

struct Side {
  double seconds = 0, cpu_seconds = 0;
  uint64_t bytes = 0;
};

void enter(const std::string& name, int core) {
  const lightcc::Fd place(open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  if (!place || setns(place.get(), CLONE_NEWNET) != 0) throw lightcc::system_error("entering " + name);
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

double cpu_seconds() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return double(used.tv_sec) + double(used.tv_nsec) * 1e-9;
}

// Counts from kSettleNs on, for this long.
template <class Round>
Side measure(double seconds, Round round) {
  for (const uint64_t end = lightcc::now_ns() + kSettleNs; lightcc::now_ns() < end;) round();
  Side side;
  const double cpu = cpu_seconds();
  const uint64_t start = lightcc::now_ns();
  while (double(lightcc::now_ns() - start) * 1e-9 < seconds) side.bytes += round();
  side.seconds = double(lightcc::now_ns() - start) * 1e-9;
  side.cpu_seconds = cpu_seconds() - cpu;
  return side;
}

sockaddr_in address(const std::string& text) {
  sockaddr_in ip{};
  ip.sin_family = AF_INET;
  ip.sin_port = htons(kPort);
  inet_pton(AF_INET, text.c_str(), &ip.sin_addr);
  return ip;
}

Side receive(const sockaddr_in& own, double seconds, std::atomic<bool>& ready) {
  XdpFilter filter("eth0");
  Xsk xsk(open_xsk("eth0", 0, XskCopies::if_needed));
  filter.admit(own.sin_addr.s_addr, own.sin_port, 0, xsk.descriptor());
  std::vector<uint8_t> to(kWarm + (1 << 16));
  size_t at = 0;
  bool goes_on = false;
  ready = true;
  return measure(seconds, [&] {
    std::array<Xsk::Frame, 64> frames;
    uint64_t bytes = 0;
    for (const Xsk::Frame& frame : std::span(frames).first(xsk.receive(frames))) {
      const size_t before = std::exchange(goes_on, frame.more) ? 0 : kFrameHeaders;
      std::memcpy(to.data() + at, frame.data + before, frame.bytes - before);
      at = (at + frame.bytes) % kWarm;
      bytes += frame.bytes - before;
      xsk.give_back(frame.name);
    }
    return bytes;
  });
}

Side send(const sockaddr_in& peer, double seconds) {
  const Interface own = choose_interfaces("eth0").front();
  Neighbors neighbors("eth0", address(own.address).sin_addr.s_addr);
  std::optional<EthernetAddress> to;
  while (!(to = neighbors.find(peer))) usleep(1000);
  const FrameHeaders headers(neighbors.own(), *to, address(own.address).sin_addr.s_addr, peer);
  const size_t payload = own.mtu - kIpBytes - kUdpBytes;
  const auto head = headers.with(htons(kPort), payload);
  Xsk xsk(open_xsk("eth0", 0, XskCopies::if_needed));
  std::vector<uint8_t> from(kWarm + (1 << 16), 7);
  size_t at = 0;
  return measure(seconds, [&] {
    uint64_t bytes = 0;
    for (int i = 0; i < 64; ++i) {
      if (!xsk.send(std::array{std::span<const uint8_t>(head), std::span<const uint8_t>(from).subspan(at, payload)})) break;
      at = (at + payload) % kWarm;
      bytes += payload;
    }
    xsk.flush();
    return bytes;
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return std::fprintf(stderr, "usage: see the head of bench/harp_xsk.cc\n"), 2;
  const sockaddr_in peer = address(argv[3]);
  const double seconds = std::atof(argv[4]);
  std::atomic<bool> ready{false};
  Side server, client;
  std::thread receiver([&] {
    enter(argv[2], std::atoi(argv[6]));
    server = receive(peer, seconds, ready);
  });
  while (!ready) usleep(1000);
  std::thread sender([&] {
    enter(argv[1], std::atoi(argv[5]));
    client = send(peer, seconds);
  });
  receiver.join();
  sender.join();
  const double bytes = double(server.bytes) + 1;  // what has not come was sent in vain
  std::printf("{\"mode\": \"throughput\", \"client\": {\"ns_per_byte\": %.4f}, \"server\": {\"bytes_per_s\": %.0f, "
              "\"ns_per_byte\": %.4f, \"machine_ns_per_byte\": 0}}\n",
              client.cpu_seconds * 1e9 / bytes, double(server.bytes) / server.seconds, server.cpu_seconds * 1e9 / bytes);
}
