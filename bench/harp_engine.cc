// The protocol alone: two endpoints on `mem` ports, one thread, messages to and fro. What an engine can do at most.
//   harp_engine_bench [payload 1440] [message KiB 1024] [buffers 1] [seconds 2]
// Prints Gbit/s of one core that does both sides, with the one copy into the posted buffer.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/clock.h"
#include "harp_plugin/core/endpoint.h"
#include "harp_plugin/port/mem.h"

namespace {

using namespace harp;

struct Side {
  Side(std::shared_ptr<MemNetwork> network, const Options& options, uint64_t seed)
      : port(open_mem(std::move(network), options.payload)), state(seed), endpoint(options, [this] { return random(); }) {}
  void carry_out(const event::Opened& opened) { connection = opened.id; }
  void carry_out(const event::Completed& completed) {
    if (completed.completion.status != Status::ok) std::abort();
    ++finished;
  }
  void carry_out(const event::Received&) {}
  void carry_out(const event::Failed& failed) {
    std::fprintf(stderr, "%s\n", std::string(failed.why).c_str());
    std::abort();
  }
  void carry_out_events() {
    while (const Event* event = endpoint.events().next())
      std::visit([this](const auto& one) { carry_out(one); }, *event);
  }
  uint64_t random() { return state = state * 6364136223846793005u + 1442695040888963407u; }

  void round(uint64_t now) {
    const size_t n = port->rx(received, endpoint.expected());
    for (size_t i = 0; i < n; ++i) {
      if (!endpoint.receive(received[i], now)) port->release({&received[i], 1});
      carry_out_events();
    }
    endpoint.advance(now);
    carry_out_events();
    if (pending == 0) {
      first = 0;
      pending = endpoint.transmit(sent, now);
    }
    const size_t taken = port->tx({sent.data() + first, pending});
    first += taken;
    pending -= taken;
  }

  std::unique_ptr<Port> port;
  uint64_t state, finished = 0;
  Endpoint endpoint;
  ConnectionId connection = 0;
  std::vector<RxPacket> received = std::vector<RxPacket>(64);
  std::vector<TxPacket> sent = std::vector<TxPacket>(64);
  size_t pending = 0, first = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, uint64_t otherwise) { return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise; };
  Options options;
  options.payload = uint32_t(argument(1, 1440));
  options.receive_packets = 256;
  const size_t bytes = argument(2, 1024) << 10, buffers = argument(3, 1);
  const uint64_t seconds = argument(4, 2);
  auto network = make_mem_network();
  Side a(network, options, 1), b(network, options, 2);
  const Nonce nonce = b.endpoint.listen();
  a.connection = a.endpoint.connect(b.port->caps().address, nonce, Mode::message, lightcc::now_ns());
  while (b.connection == 0) {
    a.round(lightcc::now_ns());
    b.round(lightcc::now_ns());
  }
  std::vector<uint8_t> from(bytes * buffers, 1), to(bytes * buffers);
  const uint64_t begin = lightcc::now_ns();
  uint64_t posted = 0, rounds = 0;
  while (lightcc::now_ns() - begin < seconds * kSecond) {
    for (int turn = 0; turn < 64; ++turn, ++rounds) {
      const uint64_t now = lightcc::now_ns();
      while (posted < b.finished + 8) {
        uint8_t* at = to.data() + posted % buffers * bytes;
        a.endpoint.send(a.connection, from.data() + posted % buffers * bytes, uint32_t(bytes), 0, now);
        b.endpoint.receive(b.connection, at, uint32_t(bytes), 0, now);
        ++posted;
      }
      a.round(now);
      b.round(now);
    }
  }
  const double ns = double(lightcc::now_ns() - begin);
  const Counters& c = *b.endpoint.counters(b.connection);
  const Counters& s = *a.endpoint.counters(a.connection);
  std::printf("payload %u: %.1f Gbit/s, %.0f ns a packet; window %lu, retransmitted %lu, acks %lu of %lu, rounds %lu, srtt %lu\n",
              options.payload, double(b.finished * bytes) * 8 / ns, ns / double(c.packets_received), s.window_packets,
              s.retransmitted, c.acks_sent, c.packets_received, rounds, s.srtt_ns);
}
