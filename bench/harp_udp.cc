// The port udp alone, TCP, and the kernel's UDP with nothing around it (raw): 1 MiB messages from one process to
// another, each in a network namespace, the three ways in turn. Prints the CPU time a byte of the sending and of the
// receiving process. Over veth the kernel handles incoming packets on the sender's CPU: they are in the sender's time.
//   harp_udp_bench SENDER_NETNS RECEIVER_NETNS RECEIVER_ADDRESS [MiB a round 512] [rounds 5] [gso 1] [gro 1] [tags 0]
// A namespace is a name of `ip netns`, or "-" for this one. For example, with offloads off:
//   ip netns add a; ip netns add b; ip link add va netns a mtu 1500 type veth peer name vb netns b mtu 1500
//   ip -n a addr add 10.9.0.1/24 dev va; ip -n a link set va up
//   ip -n b addr add 10.9.0.2/24 dev vb; ip -n b link set vb up
//   for i in a b; do ip netns exec $i ethtool -K v$i tso off gso off gro off tx off rx off; done
//   harp_udp_bench a b 10.9.0.2
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"
#include "harp_plugin/port/udp.h"

namespace {

using namespace harp;

constexpr uint32_t kMessage = 1 << 20;
constexpr uint32_t kAckEvery = 32;
constexpr uint32_t kConn = 7;
constexpr int kStallMs = 20;  // after which what is under way counts as lost

struct Round {
  double seconds = 0, cpu_seconds = 0;
  uint64_t lost = 0;
  UdpCounters counters;
};

enum class Way { tcp, raw, port };
constexpr const char* kWays[] = {"tcp", "raw", "udp"};

struct Shape {
  uint64_t bytes;
  bool gso, gro, tags;
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::_Exit(1);
}

double cpu_seconds() {
  rusage used;
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void enter(const std::string& name) {
  if (name == "-") return;
  const int fd = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) fail(name.c_str());
  close(fd);
}

void exchange(int fd, void* data, size_t bytes, bool sends) {
  for (size_t done = 0; done < bytes;) {
    char* at = static_cast<char*>(data) + done;
    const ssize_t n = sends ? write(fd, at, bytes - done) : read(fd, at, bytes - done);
    if (n <= 0) fail("the other process");
    done += size_t(n);
  }
}

template <class Work>
Round measure(Work work) {
  Round round;
  const double cpu = cpu_seconds();
  const uint64_t start = lightcc::now_ns();
  work(round);
  round.seconds = double(lightcc::now_ns() - start) * 1e-9;
  round.cpu_seconds = cpu_seconds() - cpu;
  return round;
}

void sleep_until_packets(Port& port, int timeout_ms) {
  if (port.arm()) {
    pollfd one{port.descriptor(), POLLIN, 0};
    poll(&one, 1, timeout_ms);
  }
  port.disarm();
}

// Packets 0, 1, 2... of messages of kMessage bytes; a packet's number and its message's are in its header.
struct Cut {
  uint32_t payload, segments = (kMessage + payload - 1) / payload;
  uint32_t offset(uint32_t number) const { return number % segments * payload; }
  uint32_t bytes(uint32_t number) const { return std::min(payload, kMessage - offset(number)); }
  uint16_t message(uint32_t number) const { return uint16_t(number / segments); }
};

Round send_packets(UdpPort& port, const Address& to, const Shape& shape, std::vector<uint8_t>& data) {
  const Cut cut{port.caps().payload};
  const uint32_t packets = uint32_t(shape.bytes / kMessage * cut.segments);
  const uint32_t window = std::max(kAckEvery * 2, port.caps().receive_packets);
  std::vector<TxPacket> batch(64);
  std::vector<RxPacket> acks(64);
  const UdpCounters before = port.counters();
  Round round = measure([&](Round& result) {
    uint32_t sent = 0, acknowledged = 0;
    while (acknowledged < packets) {
      const uint32_t most = std::min({64u, packets - sent, window - (sent - acknowledged)});
      for (uint32_t i = 0; i < most; ++i) {
        const uint32_t number = sent + i;
        TxPacket& packet = batch[i];
        packet.payload = data.data() + cut.offset(number);
        packet.payload_bytes = cut.bytes(number);
        packet.head_bytes = kHeaderBytes;
        packet.tagged = shape.tags;
        packet.to = &to;
        write_header({.type = Type::data,
                      .conn = kConn,
                      .number = number,
                      .message = cut.message(number),
                      .offset = cut.offset(number) / kOffsetUnit,
                      .total = kMessage},
                     packet.head.data());
      }
      const size_t taken = most > 0 ? port.tx(std::span(batch).first(most)) : 0;
      sent += uint32_t(taken);
      const size_t count = port.rx(acks, {});
      for (size_t i = 0; i < count; ++i)
        if (const auto header = read_header({acks[i].head, acks[i].head_bytes}))
          acknowledged = std::max(acknowledged, std::min(header->number, packets));
      port.release(std::span(acks).first(count));
      if (taken > 0 || count > 0) continue;
      const uint64_t slept = lightcc::now_ns();
      sleep_until_packets(port, kStallMs);
      if (lightcc::now_ns() - slept < uint64_t(kStallMs) * kMillisecond) continue;
      result.lost += sent - acknowledged;  // at most: acknowledgements may be lost as well
      acknowledged = sent;
    }
  });
  round.counters = port.counters();
  round.counters.sent_calls -= before.sent_calls;
  round.counters.refused -= before.refused;
  return round;
}

Round receive_packets(UdpPort& port, const Shape& shape, std::vector<uint8_t>& data) {
  const Cut cut{port.caps().payload};
  const uint32_t packets = uint32_t(shape.bytes / kMessage * cut.segments);
  std::vector<RxPacket> batch(64);
  std::vector<Expected> expected(64);
  const UdpCounters before = port.counters();
  Round round = measure([&](Round& result) {
    uint32_t next = 0, received = 0, answered = 0;
    const uint64_t patience_ns = uint64_t(kStallMs) * kMillisecond * 5;
    uint64_t last_ns = lightcc::now_ns();
    while (next < packets) {
      size_t guesses = 0;
      for (; guesses < expected.size() && next + guesses < packets; ++guesses) {
        const uint32_t number = next + uint32_t(guesses);
        expected[guesses] = {kConn,
                             cut.message(number),
                             cut.offset(number) / kOffsetUnit,
                             kMessage,
                             data.data() + cut.offset(number),
                             cut.bytes(number)};
      }
      const size_t count = port.rx(batch, std::span(expected).first(shape.tags ? 0 : guesses));
      for (size_t i = 0; i < count; ++i) {
        const auto header = read_header({batch[i].head, batch[i].head_bytes});
        if (!header || header->number >= packets ||
            header->offset * kOffsetUnit + batch[i].payload_bytes > kMessage + kTagBytes)
          continue;
        uint8_t* place = data.data() + cut.offset(header->number);
        if (batch[i].payload != place) std::memcpy(place, batch[i].payload, cut.bytes(header->number));
        next = header->number + 1;
        ++received;
      }
      port.release(std::span(batch).first(count));
      if (next - answered >= kAckEvery || (next == packets && count > 0)) {
        TxPacket ack;
        ack.to = &batch[0].from;
        ack.head_bytes = kHeaderBytes;
        write_header({.type = Type::ack, .conn = kConn, .number = next}, ack.head.data());
        port.tx(std::span(&ack, 1));
        answered = next;
      }
      if (count > 0) continue;
      sleep_until_packets(port, kStallMs);
      const uint64_t now = lightcc::now_ns();
      if (received != 0 && next > answered) answered = 0;  // the sender waits: tell it what there is
      if (next == 0 || answered != 0) last_ns = now;
      if (now - last_ns > patience_ns) break;
    }
    result.lost = packets - received;
  });
  round.counters = port.counters();
  round.counters.received_calls -= before.received_calls;
  round.counters.placed -= before.placed;
  round.counters.misplaced -= before.misplaced;
  round.counters.aggregates -= before.aggregates;
  return round;
}

// The least that the kernel's UDP costs: groups out of one buffer, many receives a call, nothing looked at.
void send_raw(int fd, const Shape& shape, size_t packet, uint32_t window, Round& result) {
  const size_t group = std::min<size_t>(64, 65507 / packet);
  std::vector<uint8_t> data(group * packet, 1);
  const uint32_t packets = uint32_t(shape.bytes / (packet - kHeaderBytes));
  alignas(cmsghdr) uint8_t control[CMSG_SPACE(sizeof(uint16_t))] = {};
  iovec piece{data.data(), data.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (group > 1) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* cut = CMSG_FIRSTHDR(&message);
    cut->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    cut->cmsg_level = IPPROTO_UDP;
    cut->cmsg_type = 103;  // UDP_SEGMENT
    const auto size = uint16_t(packet);
    std::memcpy(CMSG_DATA(cut), &size, sizeof size);
  }
  for (uint32_t sent = 0, acknowledged = 0, ack; acknowledged < packets;) {
    if (sent < packets && sent - acknowledged + group <= window && sendmsg(fd, &message, 0) > 0)
      sent += uint32_t(group);
    const bool must_wait = sent >= packets || sent - acknowledged + group > window;
    if (recv(fd, &ack, sizeof ack, must_wait ? 0 : MSG_DONTWAIT) == sizeof ack) {
      acknowledged = ack;
    } else if (must_wait) {  // the socket's time-out
      result.lost += sent - acknowledged;
      acknowledged = sent;
    }
  }
  const uint32_t end = 0;
  send(fd, &end, sizeof end, 0);
}

void receive_raw(int fd, size_t packet) {
  std::vector<uint8_t> data(64 * packet);
  std::array<iovec, 64> pieces;
  std::array<mmsghdr, 64> messages{};
  for (size_t i = 0; i < 64; ++i) {
    pieces[i] = {data.data() + i * packet, packet};
    messages[i].msg_hdr.msg_iov = &pieces[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  for (uint32_t received = 0, answered = 0;;) {
    const int count = recvmmsg(fd, messages.data(), 64, MSG_WAITFORONE, nullptr);
    if (count > 0 && messages[size_t(count) - 1].msg_len == sizeof(uint32_t)) return;
    received += uint32_t(std::max(count, 0));
    if (received - answered < kAckEvery && count > 0) continue;
    answered = received;
    send(fd, &received, sizeof received, 0);
  }
}

// A socket connected to the other side's.
int connect_raw(int other, const char* own, bool sends) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const int size = 4 << 20;
  const timeval patience{0, kStallMs * (sends ? 5000 : 1000)};  // what is left is acknowledged first
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  sockaddr_in place{}, peer{};
  place.sin_family = AF_INET;
  inet_pton(AF_INET, own, &place.sin_addr);
  socklen_t length = sizeof place;
  if (bind(fd, reinterpret_cast<sockaddr*>(&place), length) != 0) fail("bind");
  getsockname(fd, reinterpret_cast<sockaddr*>(&place), &length);
  exchange(other, &place, sizeof place, true);
  exchange(other, &peer, sizeof peer, false);
  if (connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof peer) != 0) fail("connect");
  return fd;
}

void run_side(bool sends, int other, const std::string& address, const Shape& shape, int rounds, FILE* results) {
  std::vector<uint8_t> data(kMessage, 1);
  // TCP: one connection for all rounds.
  sockaddr_in place{};
  place.sin_family = AF_INET;
  inet_pton(AF_INET, address.c_str(), &place.sin_addr);
  int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (sends) {
    exchange(other, &place, sizeof place, false);
    if (connect(tcp, reinterpret_cast<sockaddr*>(&place), sizeof place) != 0) fail("connect");
  } else {
    socklen_t length = sizeof place;
    if (bind(tcp, reinterpret_cast<sockaddr*>(&place), length) != 0 || listen(tcp, 1) != 0) fail("bind");
    getsockname(tcp, reinterpret_cast<sockaddr*>(&place), &length);
    exchange(other, &place, sizeof place, true);
    tcp = accept(tcp, nullptr, nullptr);
  }
  char own[INET_ADDRSTRLEN];
  socklen_t length = sizeof place;
  getsockname(tcp, reinterpret_cast<sockaddr*>(&place), &length);
  inet_ntop(AF_INET, &place.sin_addr, own, sizeof own);
  const auto port = open_udp({.address = own, .tags = shape.tags, .gso = shape.gso, .gro = shape.gro});
  Address to = port->caps().address;
  exchange(other, &to, sizeof to, !sends);
  const int raw = connect_raw(other, own, sends);
  const size_t packet = port->caps().payload + kHeaderBytes;
  for (int i = 0; i < rounds; ++i) {
    for (const Way way : {Way::tcp, Way::raw, Way::port}) {
      char ready = 0;
      exchange(other, &ready, 1, true);
      exchange(other, &ready, 1, false);
      Round round;
      if (way == Way::port) {
        round = sends ? send_packets(*port, to, shape, data) : receive_packets(*port, shape, data);
      } else if (way == Way::raw) {
        round = measure([&](Round& result) {
          sends ? send_raw(raw, shape, packet, port->caps().receive_packets, result) : receive_raw(raw, packet);
        });
      } else {
        round = measure([&](Round&) {
          for (uint64_t at = 0; at < shape.bytes; at += kMessage) exchange(tcp, data.data(), kMessage, sends);
        });
      }
      std::fwrite(&round, sizeof round, 1, results);
      std::fflush(results);
    }
  }
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s SENDER_NETNS RECEIVER_NETNS RECEIVER_ADDRESS [MiB] [rounds] [gso] [gro] [tags]\n",
                 argv[0]);
    return 2;
  }
  const auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const Shape shape{uint64_t(argument(4, 512)) << 20, argument(6, 1) != 0, argument(7, 1) != 0, argument(8, 0) != 0};
  const int rounds = argument(5, 5);
  int between[2], pipes[2][2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, between) != 0 || pipe(pipes[0]) != 0 || pipe(pipes[1]) != 0) fail("pipes");
  pid_t children[2];
  for (const int side : {0, 1}) {
    children[side] = fork();
    if (children[side] != 0) continue;
    close(between[1 - side]);
    enter(argv[1 + side]);
    run_side(side == 0, between[side], argv[3], shape, rounds, fdopen(pipes[side][1], "w"));
    std::_Exit(0);
  }
  std::vector<double> per_byte[3][2], gbit[3], total[3];
  Round last[2];
  for (const int side : {0, 1}) close(between[side]), close(pipes[side][1]);
  for (int i = 0; i < rounds; ++i) {
    for (size_t way = 0; way < 3; ++way) {
      for (const int side : {0, 1}) {
        exchange(pipes[side][0], &last[side], sizeof last[side], false);
        per_byte[way][side].push_back(last[side].cpu_seconds * 1e9 / double(shape.bytes));
      }
      gbit[way].push_back(double(shape.bytes) * 8e-9 / last[0].seconds);
      total[way].push_back(per_byte[way][0].back() + per_byte[way][1].back());
      if (last[0].lost + last[1].lost > 0)
        std::printf("%s lost %llu packets in round %d\n", kWays[way], (unsigned long long)(last[0].lost + last[1].lost),
                    i);
    }
  }
  for (const pid_t child : children) waitpid(child, nullptr, 0);
  for (size_t way = 0; way < 3; ++way)
    std::printf("%s  sender %.3f  receiver %.3f  both %.3f ns/B  %.1f Gbit/s\n", kWays[way], median(per_byte[way][0]),
                median(per_byte[way][1]), median(total[way]), median(gbit[way]));
  std::vector<double> ratios, faster;
  for (size_t i = 0; i < size_t(rounds); ++i) {
    ratios.push_back(total[2][i] / total[0][i]);
    faster.push_back(gbit[2][i] / gbit[0][i]);
  }
  const UdpCounters& sent = last[0].counters;
  const UdpCounters& got = last[1].counters;
  std::printf(
      "udp / tcp: CPU %.2f, throughput %.2f; last round: send calls %llu (refused %llu), receive calls %llu, "
      "placed %llu, misplaced %llu, aggregates %llu\n",
      median(ratios), median(faster), (unsigned long long)sent.sent_calls, (unsigned long long)sent.refused,
      (unsigned long long)got.received_calls, (unsigned long long)got.placed, (unsigned long long)got.misplaced,
      (unsigned long long)got.aggregates);
}
