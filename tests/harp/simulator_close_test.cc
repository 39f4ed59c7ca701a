// Connections that end while messages are under way, over wires that lose, repeat and reorder: by close(), by a host
// that falls silent, by both at once. HARP_SEEDS and HARP_FIRST_SEED as in simulator_test.cc.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "harp/simulator.h"
#include "labels.h"

LABEL(alone);

namespace harp::test {
namespace {

// One host's side: requests in memory of their own, which is filled anew once it is the owner's again.
class Side {
 public:
  Side(Simulator& simulator, SimulatedHost& host) : simulator_(simulator), host_(host) {
    host_.on_completed = [this](ConnectionId, const Completion& done) { completed(done); };
    host_.on_failed = [this](ConnectionId, Status status, const std::string&) {
      if (closed_) fault = "news of a connection after its close";
      if (over_ != Status::ok) fault = "a connection failed twice";
      over_ = status;
    };
  }
  // Requests until the connection is over; how large they are is up to the dice.
  void work(ConnectionId id) {
    id_ = id;
    if (closed_ || over_ != Status::ok) return;
    for (uint64_t i = simulator_.below(4); i > 0 && requests_.size() < kMostRequests; --i) submit();
    host_.poll();
    if (requests_.size() < kMostRequests)
      simulator_.at(simulator_.now + simulator_.below(100 * kMicrosecond), [this] { work(id_); });
  }
  void close(ConnectionId id) {
    if (closed_) return;
    host_.endpoint.close(id, simulator_.now);
    closed_ = true;
    for (const Request& request : requests_)
      if (!request.done) fault = "a request outlived the close";
    host_.poll();
  }
  std::string verdict() const {
    if (!fault.empty()) return fault;
    for (const Request& request : requests_) {
      if (!request.done) return "a request was never completed";
      for (const uint8_t byte : request.memory)
        if (byte != kOwners) return "memory was written after its request was completed";
    }
    if (host_.endpoint.next_ns() != UINT64_MAX) return "connections are left";
    return "";
  }
  bool closed() const { return closed_; }
  Status over() const { return over_; }
  size_t succeeded() const { return succeeded_; }

  std::string fault;

 private:
  static constexpr size_t kMostRequests = 60;
  static constexpr uint8_t kOwners = 0x5a;
  struct Request {
    std::vector<uint8_t> memory;
    bool done = false;
  };
  void submit() {
    const uint64_t number = requests_.size();
    const bool small = simulator_.chance(0.5);
    const auto bytes = uint32_t(small ? simulator_.below(8192) : simulator_.below(1 << 20));
    const bool receiving = simulator_.chance(0.5);
    requests_.push_back({std::vector<uint8_t>(receiving ? 1 << 20 : bytes, uint8_t(number))});
    uint8_t* memory = requests_.back().memory.data();
    const bool taken = receiving ? host_.endpoint.receive(id_, memory, 1 << 20, number, simulator_.now)
                                 : host_.endpoint.send(id_, memory, bytes, number, simulator_.now);
    if (!taken) fault = "a request was refused";
  }
  void completed(const Completion& done) {
    Request& request = requests_.at(done.request);
    if (request.done) fault = "a request was completed twice";
    request.done = true;
    succeeded_ += done.status == Status::ok;
    std::fill(request.memory.begin(), request.memory.end(), kOwners);
  }

  Simulator& simulator_;
  SimulatedHost& host_;
  ConnectionId id_ = 0;
  std::deque<Request> requests_;  // stay where they are
  Status over_ = Status::ok;
  bool closed_ = false;
  size_t succeeded_ = 0;
};

struct Outcome {
  std::string fault;
  size_t succeeded = 0;
};

Outcome run(uint64_t seed) {
  Simulator simulator(seed);
  static constexpr double kShares[] = {0, 0, 0.01, 0.1};
  const auto share = [&] { return kShares[simulator.below(std::size(kShares))]; };
  simulator.faults = {.loss = share(), .duplicate = share(), .reorder = share() * 3};
  simulator.shape.delay_ns = 1000 << simulator.below(9);
  Options options;
  options.paths = 1 + int(simulator.below(2));
  options.authenticate = simulator.chance(0.2);
  options.secret = "secret";
  if (simulator.chance(0.3)) options.first_number = (uint64_t(1) << 32) - 10;
  SimulatedHost& one = simulator.add_host(options);
  SimulatedHost& two = simulator.add_host(options);
  Side a(simulator, one), b(simulator, two);
  ConnectionId b_id = 0;
  const Nonce nonce = two.endpoint.listen();
  const ConnectionId a_id = one.endpoint.connect(address_of(two.number, 0), nonce, Mode::message, simulator.now);
  two.on_opened = [&](ConnectionId id, const Nonce*) {
    b_id = id;
    simulator.at(simulator.now, [&] { b.work(b_id); });
  };
  one.poll();
  a.work(a_id);  // sends wait until it is open
  const bool silence = simulator.chance(0.3);
  simulator.run(simulator.below(5 * kMillisecond), [] { return false; });
  if (silence) simulator.faults.loss = 1;
  if (simulator.chance(0.7)) a.close(a_id);
  if (b_id != 0 && simulator.chance(0.7)) b.close(b_id);
  simulator.run(kSecond, [] { return false; });
  if (silence) simulator.faults.loss = 0;  // what is said again now may meet who does not know it any more
  simulator.run(20 * kSecond, [] { return false; });
  const auto fault = [&](const char* name, const std::string& what) { return Outcome{std::string(name) + what, 0}; };
  // Who did not close has heard of it; then each closes.
  const bool unheard = a.closed() && b_id != 0 && !b.closed() && b.over() == Status::ok;
  if (unheard) return fault("two: ", "the close was not heard");
  if (b.closed() && !a.closed() && a.over() == Status::ok) return fault("one: ", "the close was not heard");
  a.close(a_id);
  if (b_id != 0) b.close(b_id);
  simulator.run(80 * kSecond, [] { return false; });
  if (const std::string what = a.verdict(); !what.empty()) return fault("one: ", what);
  if (const std::string what = b.verdict(); !what.empty()) return fault("two: ", what);
  return {"", a.succeeded() + b.succeeded()};
}

// As where a tunnel on the way is narrower than the interfaces at both ends: acknowledgements and signs of life pass.
TEST(Simulator, AConnectionEndsWhereFullPacketsAreTooLargeForThePath) {
  for (const auto& [mode, peer_timeout_s, limit_s] : {std::tuple{Mode::message, 4u, 4u}, {Mode::stream, 4u, 4u},
                                                      {Mode::stream, 600u, 20u}}) {
    Simulator simulator(1);
    simulator.faults.most_bytes = 1000;
    SimulatedHost& one = simulator.add_host({.peer_timeout_ns = peer_timeout_s * kSecond});
    SimulatedHost& two = simulator.add_host({.peer_timeout_ns = peer_timeout_s * kSecond});
    Status sent = Status::pending;
    std::string why;
    std::vector<uint8_t> data(1400), got(1400);
    const Nonce nonce = two.endpoint.listen();
    const ConnectionId id = one.endpoint.connect(address_of(two.number, 0), nonce, mode, simulator.now);
    one.on_opened = [&](ConnectionId, const Nonce*) {
      ASSERT_TRUE(one.endpoint.send(id, data.data(), uint32_t(data.size()), 1, simulator.now));
    };
    two.on_opened = [&](ConnectionId other, const Nonce*) {
      if (mode == Mode::message)
        two.endpoint.receive(other, got.data(), uint32_t(got.size()), 2, simulator.now);
    };
    one.on_completed = [&](ConnectionId, const Completion& done) { sent = done.status; };
    one.on_failed = [&](ConnectionId, Status, const std::string& text) { why = text; };
    const uint64_t begin = simulator.now;
    one.poll();
    EXPECT_TRUE(simulator.run((limit_s + 2) * kSecond, [&] { return !why.empty(); }));
    EXPECT_GE(simulator.now - begin, limit_s * kSecond);
    EXPECT_EQ(sent, Status::peer_silent);
    EXPECT_NE(why.find("no data has got through to it for " + std::to_string(limit_s) + ".0 s"), why.npos) << why;
    EXPECT_NE(why.find("1440 bytes of payload may be too large for the path; lower HARP_MTU"), why.npos) << why;
    EXPECT_NE(why.find("Or a packet that is not the peer's has been let in, which HARP_AUTH=1"), why.npos) << why;
  }
}

// Who bears a long silence bears a long cut, under load in both directions.
TEST(Simulator, ALongCutIsNoPathThatIsTooNarrow) {
  Simulator simulator(1);
  SimulatedHost& one = simulator.add_host({.peer_timeout_ns = 600 * kSecond});
  SimulatedHost& two = simulator.add_host({.peer_timeout_ns = 600 * kSecond});
  std::vector<uint8_t> data(1 << 20), got(1 << 20), got_back(1 << 20);
  size_t done = 0;
  const Nonce nonce = two.endpoint.listen();
  const ConnectionId id = one.endpoint.connect(address_of(two.number, 0), nonce, Mode::message, simulator.now);
  ConnectionId other = 0;
  two.on_opened = [&](ConnectionId opened, const Nonce*) { other = opened; };
  for (SimulatedHost* host : {&one, &two}) {
    host->on_completed = [&](ConnectionId, const Completion& completion) { done += completion.status == Status::ok; };
    host->on_failed = [](ConnectionId, Status, const std::string& why) { FAIL() << why; };
  }
  one.poll();
  ASSERT_TRUE(simulator.run(kSecond, [&] { return other != 0; }));
  for (const auto& [host, connection, to] : {std::tuple{&one, id, got_back.data()}, {&two, other, got.data()}}) {
    ASSERT_TRUE(host->endpoint.send(connection, data.data(), 1 << 20, 1, simulator.now));
    ASSERT_TRUE(host->endpoint.receive(connection, to, 1 << 20, 2, simulator.now));
    host->poll();
  }
  simulator.run(300 * kMicrosecond, [] { return false; });
  EXPECT_LT(done, 4u) << "the cut comes while data are under way";
  simulator.faults.loss = 1;
  simulator.run(60 * kSecond, [] { return false; });
  simulator.faults.loss = 0;
  EXPECT_TRUE(simulator.run(10 * kSecond, [&] { return done == 4; }));
}

TEST(Simulator, ConnectionsThatEndInFlight) {
  const uint64_t first = number_from("HARP_FIRST_SEED", 1), count = number_from("HARP_SEEDS", 100);
  size_t succeeded = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Outcome outcome = run(seed);
    ASSERT_EQ(outcome.fault, "") << "replay: HARP_SEEDS=1 HARP_FIRST_SEED=" << seed
                                 << " harp_tests --gtest_filter=Simulator.ConnectionsThatEndInFlight";
    succeeded += outcome.succeeded;
  }
  EXPECT_TRUE(count < 50 || succeeded > count) << "the ends come after the beginnings";
}

}  // namespace
}  // namespace harp::test
