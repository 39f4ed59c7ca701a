// Ranks on several hosts exchange notes at rank 0's BootstrapExchange, or each of them hears why not. Ranks are
// threads, hosts are addresses. Beyond what every exchange does (contracts/exchange_contract.h).
#include "net/bootstrap/exchange.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "unit/helpers.h"
#include "labels.h"
#include "unit/loopback.h"

LABEL(no_descriptors, "ExchangeShortage.*");

namespace lightcc {
namespace {

JobCredentials credentials_of(const std::string& job) { return {job, "1.0", "secret of " + job, 0}; }

// Where rank 0 of a test listens.
struct Site {
  explicit Site(Fd fd = listen_on_own_loopback()) : listener(std::move(fd)) {
    const Address at = local_address(listener.get());
    endpoints = {{at.with_port(0).text(), at.port()}};
  }
  Fd take() { return std::move(listener); }
  int port() const { return endpoints[0].port; }
  Fd listener;
  std::vector<Endpoint> endpoints;
};

struct Outcome {
  std::vector<std::string> notes;
  Code code = Code::ok;
  std::string text;
};
Outcome tried(const std::function<std::vector<std::string>()>& what) {
  Outcome outcome;
  try {
    outcome.notes = what();
  } catch (const Error& error) {
    outcome.code = error.code(), outcome.text = error.what();
  }
  return outcome;
}
Outcome exchange_note(BootstrapExchange& exchange, const std::string& note, uint64_t deadline_ns) {
  return tried([&] { return exchange.exchange(note, deadline_ns); });
}

// One thread for each of the ranks given, in a world of `size`; each makes one exchange.
std::vector<Outcome> exchange_all(Site& site, const std::vector<int>& ranks, int size, uint64_t deadline_ns,
                                  const JobCredentials& credentials = credentials_of("j")) {
  std::vector<Outcome> outcome(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      auto exchange = open_exchange(ranks[i], size, credentials, site.endpoints, ranks[i] == 0 ? site.take() : Fd());
      outcome[i] = exchange_note(*exchange, "note " + std::to_string(ranks[i]), deadline_ns);
    });
  for (std::thread& thread : threads) thread.join();
  return outcome;
}
void expect_complete(const Outcome& outcome, int size) {
  ASSERT_EQ(outcome.text, "");
  ASSERT_EQ(outcome.notes.size(), size_t(size));
  for (int rank = 0; rank < size; ++rank) EXPECT_EQ(outcome.notes[size_t(rank)], "note " + std::to_string(rank));
}

TEST(BootstrapExchange, EveryRankGetsTheNotesOfAll) {
  for (const char* host : {"127.0.0.1", "::1"})
    for (int size : {1, 2, 5, 17}) {
      Site site(listen_on(Address::parse(host), {}));
      std::vector<int> ranks;
      for (int rank = size - 1; rank >= 0; --rank) ranks.push_back(rank);
      for (const Outcome& outcome : exchange_all(site, ranks, size, in_ms(20'000))) expect_complete(outcome, size);
    }
}

TEST(BootstrapExchange, ManyRoundsWithNotesOfAllLengths) {
  constexpr int kSize = 4, kRounds = 20;
  Site site;
  auto note_of = [](int rank, int round) {
    return std::string(size_t(round == 7 ? kMostNoteBytes : size_t(rank * round) * 97), char('a' + rank));
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank)
    threads.emplace_back([&, rank] {
      auto exchange = open_exchange(rank, kSize, credentials_of("j"), site.endpoints, rank == 0 ? site.take() : Fd());
      for (int round = 0; round < kRounds; ++round) {
        const Outcome outcome = exchange_note(*exchange, note_of(rank, round), in_ms(20'000));
        ASSERT_EQ(outcome.text, "");
        for (int other = 0; other < kSize; ++other) ASSERT_EQ(outcome.notes[size_t(other)], note_of(other, round));
      }
      EXPECT_THROW(exchange->exchange(std::string(kMostNoteBytes + 1, 'x'), in_ms(1000)), Error);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(BootstrapExchange, ALateRankZeroIsWaitedFor) {
  Site site;
  const Address at = own_loopback().with_port(site.port());
  site.listener = Fd();  // nobody listens yet
  std::vector<Outcome> early;
  std::thread first([&] { early = exchange_all(site, {1, 2}, 3, in_ms(20'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  auto exchange = open_exchange(0, 3, credentials_of("j"), {}, listen_on(at, {at.port(), at.port()}));
  expect_complete(exchange_note(*exchange, "note 0", in_ms(20'000)), 3);
  first.join();
  for (const Outcome& outcome : early) expect_complete(outcome, 3);
}

TEST(BootstrapExchange, AddressesTellWhoIsElsewhere) {
  // Rank 1 comes from rank 0's host, rank 2 from another: all of 127.0.0.0/8 is here, so ::1 plays rank 0's host.
  Site site(listen_on(Address::parse("::1"), {}));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      auto exchange = open_exchange(rank, 2, credentials_of("j"), site.endpoints, rank == 0 ? site.take() : Fd());
      ASSERT_EQ(exchange_note(*exchange, "", in_ms(20'000)).text, "");
      EXPECT_EQ(exchange->root_address().text(), rank == 0 ? "" : "[::1]:" + std::to_string(site.port()));
      EXPECT_FALSE(exchange->own_address());  // nobody came from elsewhere
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(BootstrapExchange, MissingRanksAreNamedOnEveryRankThatCame) {
  Site site;
  for (const Outcome& outcome : exchange_all(site, {0, 2, 4}, 5, in_ms(3'000))) {
    EXPECT_EQ(outcome.code, Code::timeout);
    EXPECT_EQ(without_seconds(outcome.text),
              "init: ranks 1, 3 did not come before HOROVOD_START_TIMEOUT (n s); did all ranks start? "
              "If they need longer, raise HOROVOD_START_TIMEOUT");
  }
}

TEST(BootstrapExchange, ARankThatWaitsLessThanRankZeroHearsItsVerdict) {
  Site site;
  Outcome client;
  std::thread one([&] {
    auto exchange = open_exchange(1, 3, credentials_of("j"), site.endpoints);
    client = exchange_note(*exchange, "", in_ms(2'000));
  });
  auto exchange = open_exchange(0, 3, credentials_of("j"), {}, site.take());
  const Outcome root = exchange_note(*exchange, "", in_ms(4'000));
  one.join();
  EXPECT_TRUE(contains(root.text, "rank 2 did not come")) << root.text;
  EXPECT_EQ(client.text, root.text);
}

TEST(BootstrapExchange, AMissingRankZeroIsNamedWithWhereItWasLookedFor) {
  Site site;
  const std::string at = own_loopback().with_port(site.port()).text();
  site.listener = Fd();
  for (const Outcome& outcome : exchange_all(site, {1, 2}, 3, in_ms(2'000))) {
    EXPECT_EQ(outcome.code, Code::timeout);
    EXPECT_EQ(without_seconds(outcome.text),
              "init: rank 0 did not come before HOROVOD_START_TIMEOUT (n s); tried " + at + " (Connection refused)");
  }
  site.endpoints = {{"no-such-host.invalid", 1}};
  const Outcome outcome = exchange_all(site, {1}, 2, in_ms(2'000))[0];
  EXPECT_TRUE(contains(outcome.text, "no address is known for no-such-host.invalid")) << outcome.text;
}

TEST(BootstrapExchange, TwoProcessesOfOneRankAreRefused) {
  Site site;
  for (const Outcome& outcome : exchange_all(site, {0, 1, 1}, 3, in_ms(20'000))) {
    EXPECT_EQ(outcome.code, Code::invalid_argument);
    EXPECT_TRUE(contains(outcome.text, "init: two processes say they are rank 1 (at 127.0.0.1:")) << outcome.text;
  }
}

TEST(BootstrapExchange, UnauthenticatedConnectionsAreDroppedAndCounted) {
  Site site;
  const Address at = own_loopback().with_port(site.port());
  std::vector<Fd> silent;
  for (std::string garbage :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, '\xff'), std::string(1, '\0'), std::string()}) {
    Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), at.get(), at.length()), 0);
    ASSERT_EQ(send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), ssize_t(garbage.size()));
    silent.push_back(std::move(fd));
  }
  JobCredentials other = credentials_of("j");
  other.secret = "guessed";
  std::thread thief([&] {
    auto exchange = open_exchange(1, 3, other, site.endpoints);
    const Outcome outcome = exchange_note(*exchange, "", in_ms(5'000));
    EXPECT_EQ(outcome.code, Code::internal);
    EXPECT_TRUE(contains(outcome.text, "secret")) << outcome.text;
  });
  const std::vector<Outcome> outcome = exchange_all(site, {0, 1}, 3, in_ms(4'000));
  thief.join();
  EXPECT_TRUE(contains(outcome[0].text, "rank 2 did not come")) << outcome[0].text;
  EXPECT_TRUE(contains(outcome[0].text, "Unauthenticated connections")) << outcome[0].text;
  EXPECT_EQ(outcome[1].text, outcome[0].text);
}

TEST(BootstrapExchange, ServesItsRanksWhileUnauthenticatedConnectionsAreSilent) {
  Site site;
  const Address at = own_loopback().with_port(site.port());
  std::vector<Fd> silent;
  for (int i = 0; i < 50; ++i) {
    silent.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(silent.back().get(), at.get(), at.length()), 0);
  }
  const uint64_t began = now_ns();
  for (const Outcome& outcome : exchange_all(site, {0, 1, 2}, 3, in_ms(20'000))) expect_complete(outcome, 3);
  EXPECT_LT(now_ns() - began, 4'500'000'000u);  // silent ones are dropped after 5 s
}

TEST(BootstrapExchange, WhoIsRefusedHearsWhy) {
  Site site;
  JobCredentials other = credentials_of("j");
  other.version = "0.9";
  std::thread old([&] {
    auto exchange = open_exchange(1, 2, other, site.endpoints);
    const Outcome outcome = exchange_note(*exchange, "", in_ms(3'000));
    EXPECT_EQ(outcome.code, Code::invalid_argument);
    EXPECT_TRUE(contains(outcome.text, "rank 1 runs lightcc 0.9, rank 0 1.0")) << outcome.text;
    EXPECT_TRUE(contains(outcome.text, "at " + own_loopback().text() + ":")) << outcome.text;
  });
  auto exchange = open_exchange(0, 2, credentials_of("j"), {}, site.take());
  const Outcome outcome = exchange_note(*exchange, "", in_ms(4'000));
  old.join();
  EXPECT_EQ(outcome.code, Code::timeout);
  EXPECT_TRUE(contains(outcome.text, "rank 1 did not come")) << outcome.text;
  EXPECT_TRUE(contains(outcome.text, "A process was refused: rank 1 runs lightcc 0.9")) << outcome.text;
}

TEST(BootstrapExchange, AnotherJobsEndpointIsSkipped) {
  Site taken, silent, ours;
  const std::vector<Endpoint> endpoints{taken.endpoints[0], silent.endpoints[0], ours.endpoints[0]};
  Outcome neighbour;
  std::thread other([&] {
    auto exchange = open_exchange(0, 2, credentials_of("other"), {}, taken.take());
    neighbour = exchange_note(*exchange, "", in_ms(700));
  });
  ours.endpoints = endpoints;
  for (const Outcome& outcome : exchange_all(ours, {0, 1, 2}, 3, in_ms(20'000))) expect_complete(outcome, 3);
  other.join();
  EXPECT_TRUE(contains(neighbour.text, "rank 1 did not come")) << neighbour.text;
  EXPECT_FALSE(contains(neighbour.text, "refused")) << neighbour.text;
}

TEST(BootstrapExchange, WhatAnotherJobAnsweredIsSaidAlsoWhenThatJobHasEnded) {
  Site nobody, other;
  std::vector<Endpoint> endpoints(5, nobody.endpoints[0]);  // more than an error names
  for (Endpoint& endpoint : endpoints) endpoint.port += int(&endpoint - endpoints.data());
  nobody.listener = Fd();
  endpoints.push_back(other.endpoints[0]);
  std::thread ends([&] {
    auto exchange = open_exchange(0, 2, credentials_of("other"), {}, other.take());
    exchange_note(*exchange, "", in_ms(3'000));
  });
  auto exchange = open_exchange(1, 2, credentials_of("j"), endpoints);
  const Outcome outcome = exchange_note(*exchange, "", in_ms(4'000));
  ends.join();
  EXPECT_TRUE(contains(outcome.text, "rank 1 belongs to another job than rank 0")) << outcome.text;
}

TEST(BootstrapExchange, ARankZeroThatLeavesIsNamedOnAll) {
  Site site;
  auto root = open_exchange(0, 3, credentials_of("j"), {}, site.take());
  std::atomic<int> first{0};
  std::vector<std::thread> threads;
  for (int rank : {1, 2})
    threads.emplace_back([&, rank] {
      auto exchange = open_exchange(rank, 3, credentials_of("j"), site.endpoints);
      EXPECT_EQ(exchange_note(*exchange, "", in_ms(20'000)).text, "");
      ++first;
      const Outcome outcome = exchange_note(*exchange, "", in_ms(20'000));
      EXPECT_EQ(outcome.code, Code::peer_lost);
      EXPECT_TRUE(contains(outcome.text, "rank 0 at " + own_loopback().text() + ":")) << outcome.text;
    });
  EXPECT_EQ(exchange_note(*root, "", in_ms(20'000)).text, "");
  while (first < 2) std::this_thread::yield();
  root.reset();
  for (std::thread& thread : threads) thread.join();
}

TEST(BootstrapExchange, AFailureIsBroughtToAllOnce) {
  Site site;
  std::thread client([&] {
    open_exchange(1, 3, credentials_of("j"), site.endpoints)->fail(Error(Code::internal, "no memory on host h"));
  });
  auto root = open_exchange(0, 3, credentials_of("j"), {}, site.take());
  const Outcome outcome = exchange_note(*root, "", in_ms(20'000));  // gives rank 2 time to hear of it
  EXPECT_EQ(outcome.text, "rank 1: no memory on host h");
  const uint64_t before_ns = now_ns();
  root->fail(Error(outcome.code, outcome.text));
  EXPECT_LT(now_ns() - before_ns, 4'500'000'000u);
  client.join();
}

TEST(BootstrapExchange, ManyRanksMeet) {
  constexpr int kSize = 200;
  Site site;
  std::vector<int> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(rank);
  for (const Outcome& outcome : exchange_all(site, ranks, kSize, in_ms(60'000))) expect_complete(outcome, kSize);
}

}  // namespace
}  // namespace lightcc
