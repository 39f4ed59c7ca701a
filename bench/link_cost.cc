// What a link over HARP costs a record, beside moving its bytes: the sender's reserve and commit, the receiver's peek and
// consume. Both ranks are in one thread, over loopback; what HARP and the kernel do between is not counted.
//   ninja -C build/cmake link_cost_bench && build/cmake/link_cost_bench [port udp] [seconds 2]
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/harp/harp_transport.h"

using namespace lightcc;

namespace {

constexpr size_t kTogether = 64;

template <class Call> uint64_t timed(Call call) {
  const uint64_t start = now_ns();
  call();
  return now_ns() - start;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string port = argc > 1 ? argv[1] : "udp";
  const uint64_t end_ns = now_ns() + uint64_t((argc > 2 ? std::atof(argv[2]) : 2) * 1e9);
  std::vector<std::unique_ptr<HarpTransport>> ranks;
  std::vector<HarpPeer> peers;
  for (int rank = 0; rank < 2; ++rank) {
    const HarpOptions options{.port = port, .interface = port == "udp" ? "127.0.0.1" : ""};
    ranks.push_back(std::make_unique<HarpTransport>(options, rank, 0));
    peers.push_back({"rank " + std::to_string(rank), ranks.back()->address()});
  }
  for (auto& rank : ranks) rank->set_peers(peers);
  const auto from = ranks[0]->link(0, 0, 1), to = ranks[1]->link(0, 0, 0);
  const size_t bytes = from->record_bytes();
  const auto step = [&] {
    for (auto& rank : ranks) rank->step(), rank->flush();
  };
  const auto wait_for = [&](auto call) {
    while (!call()) step();
  };

  wait_for([&] { return to->reserve(bytes) != nullptr; });
  to->commit(bytes);
  wait_for([&] { return from->peek(bytes) != nullptr; });
  from->consume(bytes);
  uint64_t records = 0, sending_ns = 0, receiving_ns = 0;
  while (now_ns() < end_ns) {
    for (size_t sent = 0; sent < kTogether; step())
      sending_ns += timed([&] {
        for (; sent < kTogether && from->reserve(bytes); ++sent) from->commit(bytes);
      });
    for (size_t received = 0; received < kTogether; step()) {
      if (!to->peek(bytes)) continue;
      receiving_ns += timed([&] {
        for (; received < kTogether && to->peek(bytes); ++received) to->consume(bytes);
      });
    }
    records += kTogether;
  }
  std::printf("port %s, records of %zu bytes: %.1f ns to send, %.1f ns to receive\n", port.c_str(), bytes,
              double(sending_ns) / double(records), double(receiving_ns) / double(records));
}
