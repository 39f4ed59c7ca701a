// Messages, streams and ends of connections through the C API: every port, inline and with threads.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "harp/api_world.h"
#include "labels.h"

LABEL(alone, "*AChildOfFork*");

namespace harp {
namespace {

class Api : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static Opening opening() { return {.port = std::get<0>(GetParam()), .inline_mode = std::get<1>(GetParam())}; }
};

std::string name_of_case(const testing::TestParamInfo<std::tuple<std::string, int>>& info) {
  return std::get<0>(info.param) + (std::get<1>(info.param) == 1 ? "_inline" : "_threads");
}
INSTANTIATE_TEST_SUITE_P(Ports, Api, testing::Combine(testing::Values("mem", "shm", "udp"), testing::Values(1, 2)),
                         name_of_case);

TEST_P(Api, MessagesOfAllSizesArriveWhicheverSideComesFirst) {
  World world(opening());
  const Link link = world.connect();
  const size_t full = harp_record_bytes(link.a);
  ASSERT_GT(full, 1000u);
  uint32_t seed = 0;
  for (size_t bytes : {size_t(0), size_t(1), size_t(17), full - 1, full, full + 1, 8 * full, size_t(1) << 20}) {
    for (bool send_first : {true, false}) {
      const auto data = pattern(bytes, ++seed);
      std::vector<uint8_t> got(bytes + 100, 0xee);
      harp_request *sent = nullptr, *received = nullptr;
      if (send_first) sent = send_to(link.a, data);
      received = receive_from(link.b, got);
      if (!send_first) sent = send_to(link.a, data);
      size_t sent_bytes = 99, received_bytes = 99;
      ASSERT_EQ(world.finish(received, &received_bytes), HARP_OK) << harp_error();
      ASSERT_EQ(world.finish(sent, &sent_bytes), HARP_OK) << harp_error();
      EXPECT_EQ(sent_bytes, bytes);
      EXPECT_EQ(received_bytes, bytes);
      EXPECT_TRUE(std::equal(data.begin(), data.end(), got.begin())) << bytes;
      EXPECT_EQ(std::count(got.begin() + long(bytes), got.end(), 0xee), 100) << "written beyond the message";
    }
  }
}

TEST_P(Api, RequestsMayBeTestedInAnyOrder) {
  World world(opening());
  const Link link = world.connect();
  std::mt19937 dice(7);
  constexpr size_t kMessages = 32;
  for (int round = 0; round < 5; ++round) {
    std::vector<std::vector<uint8_t>> data, got;
    std::vector<harp_request*> requests;
    for (size_t i = 0; i < kMessages; ++i) {
      data.push_back(pattern(dice() % 40'000, dice()));
      got.emplace_back(data.back().size());
    }
    for (size_t i = 0; i < kMessages; ++i) requests.push_back(receive_from(link.a, got[i]));
    for (size_t i = 0; i < kMessages; ++i) requests.push_back(send_to(link.b, data[i]));
    std::shuffle(requests.begin(), requests.end(), dice);
    for (harp_request* request : requests) ASSERT_EQ(world.finish(request), HARP_OK) << harp_error();
    EXPECT_EQ(data, got);
  }
}

// As NCCL posts them: buffers longer than what comes, with flags of its own behind it.
TEST_P(Api, BytesBehindAMessageKeepWhatTheyHeld) {
  World world(opening());
  const Link link = world.connect();
  constexpr size_t kRoom = 200'000;
  std::mt19937 dice(11);
  for (int round = 0; round < 10; ++round) {
    std::vector<std::vector<uint8_t>> data, got(16, std::vector<uint8_t>(kRoom, 0xee));
    std::vector<harp_request*> requests;
    for (size_t i = 0; i < got.size(); ++i)  // some as long as the one before, which makes the next look so too
      data.push_back(pattern(i % 4 == 1 ? data.back().size() : dice() % (i % 4 == 3 ? 3000 : kRoom), dice()));
    for (auto& buffer : got) requests.push_back(receive_from(link.b, buffer));
    for (const auto& one : data) requests.push_back(send_to(link.a, one));
    for (harp_request* request : requests) ASSERT_EQ(world.finish(request), HARP_OK) << harp_error();
    for (size_t i = 0; i < got.size(); ++i) {
      const size_t bytes = data[i].size();
      EXPECT_TRUE(std::equal(data[i].begin(), data[i].end(), got[i].begin())) << bytes;
      EXPECT_EQ(std::count(got[i].begin() + long(bytes), got[i].end(), 0xee), long(kRoom - bytes)) << bytes;
    }
  }
}

TEST_P(Api, TooManyRequestsArePendingAndGoOnLater) {
  World world(opening());
  const Link link = world.connect();
  std::vector<std::vector<uint8_t>> got(1000, std::vector<uint8_t>(8));
  std::vector<harp_request*> receives;
  int status = HARP_OK;
  while (status == HARP_OK && receives.size() < got.size()) {
    harp_request* request = nullptr;
    status = harp_recv(link.b, got[receives.size()].data(), 8, &request);
    if (status == HARP_OK) receives.push_back(request);
    else EXPECT_EQ(request, nullptr);
  }
  EXPECT_EQ(status, HARP_PENDING);
  EXPECT_GE(receives.size(), 32u);
  const auto data = pattern(8, 1);
  for (harp_request* received : receives) {
    ASSERT_EQ(world.finish(send_to(link.a, data)), HARP_OK);
    ASSERT_EQ(world.finish(received), HARP_OK);
  }
  harp_request* received = receive_from(link.b, got[0]);
  EXPECT_EQ(world.finish(send_to(link.a, data)), HARP_OK);
  EXPECT_EQ(world.finish(received), HARP_OK);
}

TEST_P(Api, AMessageThatIsTooLongFailsAloneAndInWords) {
  World world(opening());
  const Link link = world.connect();
  const auto data = pattern(50'000, 1);
  std::vector<uint8_t> small(40'000), large(50'000);
  harp_request* received = receive_from(link.b, small);
  world.finish(send_to(link.a, data));
  EXPECT_EQ(world.finish(received), HARP_TOO_LONG);
  EXPECT_NE(std::string(harp_error()).find("longer than the buffer"), std::string::npos) << harp_error();
  received = receive_from(link.b, large);
  EXPECT_EQ(world.finish(send_to(link.a, data)), HARP_OK);
  EXPECT_EQ(world.finish(received), HARP_OK);
  EXPECT_EQ(large, data);
}

TEST_P(Api, RecordsOfAStreamAreLentInOrderUntilTheyAreConsumed) {
  World world(opening());
  const Link link = world.connect(HARP_STREAM);
  constexpr uint32_t kRecords = 3000;
  constexpr size_t kLent = 5;
  const size_t most = harp_record_bytes(link.a);
  uint32_t sent = 0, received = 0;
  std::vector<std::vector<uint8_t>> data;
  std::vector<harp_request*> requests;
  std::vector<std::pair<const uint8_t*, size_t>> lent;
  const auto size_of = [&](uint32_t i) { return 1 + size_t(i) * 37 % most; };
  const auto end = std::chrono::steady_clock::now() + kApiPatience;
  while (received < kRecords && std::chrono::steady_clock::now() < end) {
    if (sent < kRecords) {
      data.push_back(pattern(size_of(sent), sent));
      harp_request* request = nullptr;
      const int status = harp_send(link.a, data.back().data(), data.back().size(), &request);
      if (status == HARP_OK) {
        ++sent;
        requests.push_back(request);
      } else {
        ASSERT_EQ(status, HARP_PENDING) << harp_error();
        data.pop_back();
      }
    }
    while (!requests.empty() && harp_test(requests.front(), nullptr) != HARP_PENDING) requests.erase(requests.begin());
    const void* record = nullptr;
    size_t bytes = 0;
    if (harp_recv_zc(link.b, &record, &bytes) == HARP_OK) {
      lent.emplace_back(static_cast<const uint8_t*>(record), bytes);
      ++received;
    }
    if (lent.size() < kLent && received < kRecords) {
      sched_yield();
      continue;
    }
    for (size_t i = 0; i < lent.size(); ++i) {  // all of them are still there
      const uint32_t number = received - uint32_t(lent.size() - i);
      ASSERT_EQ(lent[i].second, size_of(number));
      ASSERT_EQ(std::memcmp(lent[i].first, data[number].data(), lent[i].second), 0) << number;
    }
    ASSERT_EQ(harp_consume(link.b, lent.size()), HARP_OK);
    lent.clear();
  }
  EXPECT_EQ(received, kRecords);
  for (harp_request* request : requests) EXPECT_EQ(world.finish(request), HARP_OK) << harp_error();
  EXPECT_EQ(harp_consume(link.b, 1), HARP_INVALID_ARGUMENT);
}

TEST_P(Api, ALentRecordDoesNotChangeWhenItsSenderReusesTheBuffer) {
  World world(opening());
  const Link link = world.connect(HARP_STREAM);
  auto* memory = static_cast<uint8_t*>(harp_alloc(world.a, 4096));
  ASSERT_NE(memory, nullptr);
  std::memset(memory, 1, 1000);
  harp_request* request = nullptr;
  ASSERT_EQ(harp_send(link.a, memory, 1000, &request), HARP_OK);
  const void* record = nullptr;
  size_t bytes = 0;
  ASSERT_EQ(until_done([&] { return harp_poll(world.a), harp_recv_zc(link.b, &record, &bytes); }), HARP_OK);
  ASSERT_EQ(world.finish(request), HARP_OK);
  std::memset(memory, 2, 1000);
  EXPECT_EQ(static_cast<const uint8_t*>(record)[999], 1);
  harp_close(link.a);  // does not wait for the receiver to consume it
  EXPECT_EQ(static_cast<const uint8_t*>(record)[0], 1);
  harp_free(world.a, memory);
}

TEST_P(Api, AfterCloseTheMemoryOfRequestsInFlightIsTheCallersAgain) {
  World world(opening());
  for (int round = 0; round < 20; ++round) {
    const Link link = world.connect();
    auto data = std::make_unique<std::vector<uint8_t>>(pattern(1 << 20, 1));
    auto got = std::make_unique<std::vector<uint8_t>>(1 << 20);
    for (int i = 0; i < 4; ++i) {
      receive_from(link.b, *got);
      send_to(link.a, *data);
    }
    for (int i = 0; i < round * 3; ++i) {
      harp_poll(world.a);
      harp_poll(world.b);
    }
    // The peer may be the same thread: closing needs nobody to poll on the other side.
    if (round % 2) {
      harp_close(link.a);
      data.reset();
      harp_close(link.b);
    } else {
      harp_close(link.b);
      got.reset();
      harp_close(link.a);
    }
  }
}

TEST_P(Api, AfterCancelRequestsFail) {
  World world(opening());
  const Link link = world.connect();
  std::vector<uint8_t> got(100);
  harp_request* received = receive_from(link.b, got);
  std::thread([&] { harp_cancel(link.b); }).join();  // another thread than the connection's
  EXPECT_EQ(world.finish(received), HARP_CANCELLED);
  EXPECT_NE(std::string(harp_error()).find("closed on this side"), std::string::npos) << harp_error();
  EXPECT_EQ(world.finish(receive_from(link.b, got)), HARP_CANCELLED);
  EXPECT_NE(world.finish(send_to(link.a, got)), HARP_OK);
}

TEST_P(Api, AfterCancelTheMemoryOfRequestsInFlightIsTheCallersAgain) {
  for (uint32_t round = 0; round < 5; ++round) {
    std::vector<uint8_t> got(1 << 20);
    const auto data = pattern(got.size(), round);
    World world(opening());
    const Link link = world.connect();
    receive_from(link.b, got);
    send_to(link.a, data);
    for (uint32_t i = 0; i < round; ++i) harp_poll(world.b), harp_poll(world.a);
    harp_cancel(link.b);
    std::fill(got.begin(), got.end(), uint8_t(round));
    for (int i = 0; i < 100; ++i) harp_poll(world.a), harp_poll(world.b);
    EXPECT_EQ(std::count(got.begin(), got.end(), round), long(got.size())) << "written after harp_cancel";
  }
}

TEST_P(Api, AConnectionIsDescribedInWords) {
  World world(opening());
  const Link link = world.connect();
  char text[300], start[5];
  EXPECT_EQ(harp_describe(link.a, start, sizeof start), harp_describe(link.a, text, sizeof text));
  EXPECT_EQ(std::string(start), "peer");
  EXPECT_NE(std::string(text).find("port " + opening().port), std::string::npos) << text;
}

TEST_P(Api, ThePeersCloseEndsReceivesInWords) {
  World world(opening());
  const Link link = world.connect();
  std::vector<uint8_t> got(100);
  harp_request* received = receive_from(link.b, got);
  harp_close(link.a);
  EXPECT_EQ(world.finish(received), HARP_PEER_CLOSED);
  const std::string why = harp_error();
  EXPECT_NE(why.find("receiving from peer "), std::string::npos) << why;
  EXPECT_NE(why.find("port " + opening().port), std::string::npos) << why;
  received = receive_from(link.b, got);
  EXPECT_EQ(world.finish(received), HARP_PEER_CLOSED) << "a request after the end";
}

TEST_P(Api, SixtyFourConnectionsShareAnEngine) {
  World world(opening());
  std::vector<Link> links;
  for (int i = 0; i < 64; ++i) links.push_back(world.connect());
  std::vector<std::vector<uint8_t>> data, got(64, std::vector<uint8_t>(20'000));
  std::vector<harp_request*> requests;
  for (uint32_t i = 0; i < 64; ++i) data.push_back(pattern(20'000, i));
  for (size_t i = 0; i < 64; ++i) {
    requests.push_back(receive_from(links[i].b, got[i]));
    requests.push_back(send_to(links[i].a, data[i]));
  }
  for (harp_request* request : requests) ASSERT_EQ(world.finish(request), HARP_OK) << harp_error();
  // Connections are accepted in the order in which they were opened: each was waited for.
  EXPECT_EQ(got, data);
}

TEST_P(Api, FourEnginesServeFourThreads) {
  Opening four = opening();
  four.engines = 4;
  World world(four);
  std::vector<Link> links;
  for (int i = 0; i < 4; ++i) links.push_back(world.connect());
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = 0; i < 50; ++i) {
        const auto data = pattern(1 + i * 997 % 60'000, i * 4 + t);
        std::vector<uint8_t> got(data.size());
        harp_request* received = receive_from(links[t].a, got);
        harp_request* sent = send_to(links[t].b, data);
        ASSERT_EQ(world.finish(received), HARP_OK) << harp_error();
        ASSERT_EQ(world.finish(sent), HARP_OK) << harp_error();
        ASSERT_EQ(got, data);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

int open_sockets_of_udp() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    int domain = 0, type = 0;
    socklen_t bytes = sizeof domain;
    count += getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_INET &&
             getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_DGRAM;
  }
  return count;
}

TEST_P(Api, AChildOfForkIsRefusedAndDoesNotHang) {
  World world(opening());
  const Link link = world.connect();
  std::vector<uint8_t> data(100), got(100);
  harp_request* received = receive_from(link.b, got);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    harp_request* request = nullptr;
    bool refused = harp_send(link.a, data.data(), data.size(), &request) == HARP_LOCAL_FAULT;
    refused &= std::strstr(harp_error(), "forked: open a new context") != nullptr;
    refused &= harp_test(received, nullptr) == HARP_LOCAL_FAULT;
    refused &= harp_poll(world.a) == HARP_LOCAL_FAULT;
    refused &= open_sockets_of_udp() == 0;  // the ports are the parent's
    harp_close(link.a);
    harp_close_context(world.a);
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(world.finish(send_to(link.a, data)), HARP_OK) << "the parent goes on: " << harp_error();
  EXPECT_EQ(world.finish(received), HARP_OK);
}

TEST_P(Api, WrongHandlesAreNamed) {
  World world(opening());
  harp_connection* connection = nullptr;
  harp_handle wrong = world.handle;
  wrong.bytes[0] ^= 1;
  EXPECT_EQ(harp_connect(world.a, &wrong, HARP_MESSAGE, &connection), HARP_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(harp_error(), "wrong magic"), nullptr) << harp_error();
  EXPECT_EQ(connection, nullptr);
  wrong = world.handle;
  wrong.bytes[4] = 77;
  EXPECT_EQ(harp_connect(world.a, &wrong, HARP_MESSAGE, &connection), HARP_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(harp_error(), "version 77"), nullptr) << harp_error();
  wrong = world.handle;
  wrong.bytes[8] = 'x';
  EXPECT_EQ(harp_connect(world.a, &wrong, HARP_MESSAGE, &connection), HARP_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(harp_error(), opening().port.c_str()), nullptr) << harp_error();
  wrong = world.handle;
  wrong.bytes[5] = 200;
  EXPECT_EQ(harp_connect(world.a, &wrong, HARP_MESSAGE, &connection), HARP_INVALID_ARGUMENT);
}

TEST_P(Api, ConnectingToNobodyEndsInItsTimeOut) {
  Opening short_time = opening();
  short_time.connect_timeout_ms = 300;
  World world(short_time);
  harp_connection* connection = nullptr;
  harp_stop_listening(world.listener);
  ASSERT_EQ(harp_connect(world.a, &world.handle, HARP_MESSAGE, &connection), HARP_OK);
  const std::vector<uint8_t> data(10);
  harp_request* sent = send_to(connection, data);
  EXPECT_EQ(world.finish(sent), HARP_CONNECT_TIMEOUT);
  EXPECT_NE(std::strstr(harp_error(), "nobody answered within 0.3 s"), nullptr) << harp_error();
  EXPECT_EQ(harp_connected(connection), HARP_CONNECT_TIMEOUT);
}

TEST_P(Api, EveryPacketMayCarryATag) {
  Opening safe = opening();
  safe.authenticate = 1;
  World world(safe);
  const Link link = world.connect();
  const auto data = pattern(100'000, 3);
  std::vector<uint8_t> got(100'000);
  harp_request* received = receive_from(link.b, got);
  EXPECT_EQ(world.finish(send_to(link.a, data)), HARP_OK);
  EXPECT_EQ(world.finish(received), HARP_OK);
  EXPECT_EQ(got, data);
}

TEST_P(Api, MemoryOfHarpAllocCarriesMessages) {
  World world(opening());
  const Link link = world.connect();
  constexpr size_t kBytes = size_t(3) << 20;
  auto* from = static_cast<uint8_t*>(harp_alloc(world.a, kBytes));
  auto* to = static_cast<uint8_t*>(harp_alloc(world.b, kBytes));
  ASSERT_TRUE(from && to);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(from) % 4096, 0u);
  const auto data = pattern(kBytes, 5);
  std::memcpy(from, data.data(), kBytes);
  harp_request *sent = nullptr, *received = nullptr;
  ASSERT_EQ(harp_send(link.a, from, kBytes, &sent), HARP_OK);
  ASSERT_EQ(harp_recv(link.b, to, kBytes, &received), HARP_OK);
  ASSERT_EQ(world.finish(received), HARP_OK) << harp_error();
  ASSERT_EQ(world.finish(sent), HARP_OK) << harp_error();
  EXPECT_EQ(std::memcmp(to, data.data(), kBytes), 0);
  harp_free(world.a, from);
  harp_free(world.b, to);
  EXPECT_EQ(harp_alloc(world.a, 0), nullptr);
}

// What is not closed when its context is: connections, listeners, connections that nobody accepted, memory.
// Calls `look` until it says something else than HARP_PENDING, and sleeps between: a wake-up that is lost is a failure.
template <class F>
int sleep_until(harp_context* context, F&& look) {
  while (true) {
    harp_poll(context);
    if (const int status = look(); status != HARP_PENDING) return status;
    uint64_t most_ns = 0;
    if (harp_arm(context, &most_ns) != HARP_OK) continue;
    pollfd one{.fd = harp_descriptor(context), .events = POLLIN, .revents = 0};
    const int most_ms = most_ns == UINT64_MAX ? 30'000 : static_cast<int>(most_ns / 1'000'000) + 1;
    if (poll(&one, 1, most_ms) == 0 && most_ms >= 10'000) {
      ADD_FAILURE() << "slept for " << most_ms << " ms";
      return HARP_PENDING;
    }
  }
}

TEST_P(Api, WhoSleepsIsWokenByRecordsRequestsConnectionsAndEnds) {
  World world(opening());
  constexpr int kRecords = 50;
  std::thread other([&] {
    harp_connection* connection = nullptr;
    EXPECT_EQ(sleep_until(world.b, [&] { return harp_accept(world.listener, &connection); }), HARP_OK) << harp_error();
    for (int i = 0; i < kRecords; ++i) {
      const void* record = nullptr;
      size_t bytes = 0;
      ASSERT_EQ(sleep_until(world.b, [&] { return harp_recv_zc(connection, &record, &bytes); }), HARP_OK);
      ASSERT_EQ(bytes, sizeof i);
      EXPECT_EQ(std::memcmp(record, &i, sizeof i), 0);
      std::this_thread::sleep_for(std::chrono::microseconds(i * 40));  // the sender sleeps, and more than it spins
      harp_request* request = nullptr;
      ASSERT_EQ(harp_send(connection, record, bytes, &request), HARP_OK) << harp_error();
      ASSERT_EQ(sleep_until(world.b, [&] { return harp_test(request, nullptr); }), HARP_OK) << harp_error();
      ASSERT_EQ(harp_consume(connection, 1), HARP_OK);
    }
    harp_close(connection);
  });
  harp_connection* connection = nullptr;
  ASSERT_EQ(harp_connect(world.a, &world.handle, HARP_STREAM, &connection), HARP_OK) << harp_error();
  EXPECT_EQ(sleep_until(world.a, [&] { return harp_connected(connection); }), HARP_OK) << harp_error();
  const void* record = nullptr;
  size_t bytes = 0;
  for (int i = 0; i < kRecords; ++i) {
    harp_request* request = nullptr;
    EXPECT_EQ(harp_send(connection, &i, sizeof i, &request), HARP_OK) << harp_error();
    EXPECT_EQ(sleep_until(world.a, [&] { return harp_test(request, nullptr); }), HARP_OK) << harp_error();
    EXPECT_EQ(sleep_until(world.a, [&] { return harp_recv_zc(connection, &record, &bytes); }), HARP_OK);
    EXPECT_EQ(harp_consume(connection, 1), HARP_OK);
  }
  EXPECT_EQ(sleep_until(world.a, [&] { return harp_recv_zc(connection, &record, &bytes); }), HARP_PEER_CLOSED);
  other.join();
}

TEST_P(Api, WhatCameBeforeTheSleepIsNotSleptThrough) {
  World world(opening());
  const Link link = world.connect(HARP_STREAM);
  uint64_t most_ns = 0;
  ASSERT_EQ(until_done([&] { return harp_arm(world.b, &most_ns); }), HARP_OK);
  const uint64_t word = 7;
  harp_request* request = nullptr;
  ASSERT_EQ(harp_send(link.a, &word, sizeof word, &request), HARP_OK) << harp_error();
  ASSERT_EQ(world.finish(request), HARP_OK) << harp_error();  // polls for the other side too
  pollfd one{.fd = harp_descriptor(world.b), .events = POLLIN, .revents = 0};
  // A thread of the engine's may be between the record and saying so.
  EXPECT_TRUE(harp_arm(world.b, &most_ns) == HARP_PENDING || poll(&one, 1, 10'000) == 1);
}

TEST_P(Api, ADescriptorIsTheSameUntilTheContextIsClosed) {
  World world(opening());
  const int descriptor = harp_descriptor(world.b);
  EXPECT_GE(descriptor, 0) << harp_error();
  EXPECT_EQ(harp_descriptor(world.b), descriptor);
  EXPECT_NE(harp_descriptor(world.a), descriptor);
  EXPECT_EQ(harp_descriptor(nullptr), -1);
  EXPECT_EQ(harp_arm(world.b, nullptr), HARP_INVALID_ARGUMENT);
}

TEST_P(Api, WhatIsUnderWayIsSaid) {
  World world(opening());
  const Link link = world.connect(HARP_STREAM);
  const uint64_t word = 7;
  harp_request* request = nullptr;
  ASSERT_EQ(harp_send(link.a, &word, sizeof word, &request), HARP_OK) << harp_error();
  ASSERT_EQ(world.finish(request), HARP_OK) << harp_error();
  const auto settled = [&](harp_context* context) {
    harp_poll(world.a);
    harp_poll(world.b);
    return harp_under_way(context) == HARP_PENDING ? HARP_OK : HARP_PENDING;
  };
  EXPECT_EQ(until_done([&] { return settled(world.a); }), HARP_OK) << "all is acknowledged";
  EXPECT_EQ(until_done([&] { return settled(world.b); }), HARP_OK);
  harp_stop_listening(std::exchange(world.listener, nullptr));
  harp_connection* nobody = nullptr;
  ASSERT_EQ(harp_connect(world.a, &world.handle, HARP_STREAM, &nobody), HARP_OK);
  EXPECT_EQ(until_done([&] { return harp_poll(world.a), harp_under_way(world.a); }), HARP_OK) << "it goes on asking";
}

TEST_P(Api, AContextClosesWhatIsStillOpen) {
  World world(opening());
  world.connect();
  harp_connection* connection = nullptr;
  ASSERT_EQ(harp_connect(world.a, &world.handle, HARP_MESSAGE, &connection), HARP_OK);
  EXPECT_EQ(until_done([&] { return harp_poll(world.b), harp_connected(connection); }), HARP_OK);
  EXPECT_NE(harp_alloc(world.a, 10'000), nullptr);
}

}  // namespace
}  // namespace harp
