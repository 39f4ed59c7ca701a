// Ranks on several hosts meet at rank 0's Store, or each of them hears why not. Ranks are threads, hosts are addresses.
#include "net/store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

uint64_t in_ms(uint64_t ms) { return now_ns() + ms * 1'000'000; }
Terms terms_of(const std::string& job) { return {job, "1.0", "secret of " + job, 0}; }
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Where rank 0 of a test listens.
struct Site {
  explicit Site(const std::string& host = "127.0.0.1") : places{{host, 0}} {
    listener = listen_on(Address::parse(host), {0, 0});
    places[0].port = local_address(listener.get()).port();
  }
  Fd take() { return std::move(listener); }
  int port() const { return places[0].port; }
  Fd listener;
  std::vector<Endpoint> places;
};

struct Met {
  std::vector<std::string> notes;
  Code code = Code::ok;
  std::string text;
};
Met tried(const std::function<std::vector<std::string>()>& what) {
  Met met;
  try {
    met.notes = what();
  } catch (const Error& error) {
    met.code = error.code(), met.text = error.what();
  }
  return met;
}
Met exchange(Store& store, const std::string& note, uint64_t deadline_ns) {
  return tried([&] { return store.exchange(note, deadline_ns); });
}

// One thread for each of the ranks given, in a world of `size`; each makes one exchange.
std::vector<Met> meet_all(Site& site, const std::vector<int>& ranks, int size, uint64_t deadline_ns,
                          const Terms& terms = terms_of("j")) {
  std::vector<Met> met(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      auto store = open_store(ranks[i], size, terms, site.places, ranks[i] == 0 ? site.take() : Fd());
      met[i] = exchange(*store, "note " + std::to_string(ranks[i]), deadline_ns);
    });
  for (std::thread& thread : threads) thread.join();
  return met;
}
void expect_complete(const Met& met, int size) {
  ASSERT_EQ(met.text, "");
  ASSERT_EQ(met.notes.size(), size_t(size));
  for (int rank = 0; rank < size; ++rank) EXPECT_EQ(met.notes[size_t(rank)], "note " + std::to_string(rank));
}

TEST(Store, EveryRankGetsTheNotesOfAll) {
  for (const char* host : {"127.0.0.1", "::1"})
    for (int size : {1, 2, 5, 17}) {
      Site site(host);
      std::vector<int> ranks;
      for (int rank = size - 1; rank >= 0; --rank) ranks.push_back(rank);
      for (const Met& met : meet_all(site, ranks, size, in_ms(20'000))) expect_complete(met, size);
    }
}

TEST(Store, ManyRoundsWithNotesOfAllLengths) {
  constexpr int kSize = 4, kRounds = 20;
  Site site;
  auto note_of = [](int rank, int round) {
    return std::string(size_t(round == 7 ? kMostNoteBytes : size_t(rank * round) * 97), char('a' + rank));
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank)
    threads.emplace_back([&, rank] {
      auto store = open_store(rank, kSize, terms_of("j"), site.places, rank == 0 ? site.take() : Fd());
      for (int round = 0; round < kRounds; ++round) {
        const Met met = exchange(*store, note_of(rank, round), in_ms(20'000));
        ASSERT_EQ(met.text, "");
        for (int other = 0; other < kSize; ++other) ASSERT_EQ(met.notes[size_t(other)], note_of(other, round));
      }
      EXPECT_THROW(store->exchange(std::string(kMostNoteBytes + 1, 'x'), in_ms(1000)), Error);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Store, ALateRankZeroIsWaitedFor) {
  Site site;
  const Address at = Address::parse("127.0.0.1").with_port(site.port());
  site.listener = Fd();  // nobody listens yet
  std::vector<Met> early;
  std::thread first([&] { early = meet_all(site, {1, 2}, 3, in_ms(20'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  auto store = open_store(0, 3, terms_of("j"), {}, listen_on(at, {at.port(), at.port()}));
  expect_complete(exchange(*store, "note 0", in_ms(20'000)), 3);
  first.join();
  for (const Met& met : early) expect_complete(met, 3);
}

TEST(Store, AddressesTellWhoIsElsewhere) {
  // Rank 1 comes from rank 0's host, rank 2 from another: all of 127.0.0.0/8 is here, so ::1 plays rank 0's host.
  Site site("::1");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      auto store = open_store(rank, 2, terms_of("j"), site.places, rank == 0 ? site.take() : Fd());
      ASSERT_EQ(exchange(*store, "", in_ms(20'000)).text, "");
      EXPECT_EQ(store->way_to_root().text(), rank == 0 ? "" : "[::1]:" + std::to_string(site.port()));
      EXPECT_FALSE(store->own_address());  // nobody came from elsewhere
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Store, MissingRanksAreNamedOnEveryRankThatCame) {
  Site site;
  for (const Met& met : meet_all(site, {0, 2, 4}, 5, in_ms(300))) {
    EXPECT_EQ(met.code, Code::timeout);
    EXPECT_EQ(met.text, "init: ranks 1, 3 did not come before HOROVOD_START_TIMEOUT (0.3 s); did all ranks start?");
  }
}

TEST(Store, ARankThatWaitsLessThanRankZeroHearsItsVerdict) {
  Site site;
  Met guest;
  std::thread one([&] {
    auto store = open_store(1, 3, terms_of("j"), site.places);
    guest = exchange(*store, "", in_ms(200));
  });
  auto store = open_store(0, 3, terms_of("j"), {}, site.take());
  const Met root = exchange(*store, "", in_ms(1000));
  one.join();
  EXPECT_TRUE(contains(root.text, "rank 2 did not come")) << root.text;
  EXPECT_EQ(guest.text, root.text);
}

TEST(Store, AMissingRankZeroIsNamedWithWhereItWasLookedFor) {
  Site site;
  const std::string at = "127.0.0.1:" + std::to_string(site.port());
  site.listener = Fd();
  for (const Met& met : meet_all(site, {1, 2}, 3, in_ms(200))) {
    EXPECT_EQ(met.code, Code::timeout);
    EXPECT_EQ(met.text,
              "init: rank 0 did not come before HOROVOD_START_TIMEOUT (0.2 s); tried " + at + " (Connection refused)");
  }
  site.places = {{"no-such-host.invalid", 1}};
  const Met met = meet_all(site, {1}, 2, in_ms(200))[0];
  EXPECT_TRUE(contains(met.text, "no address is known for no-such-host.invalid")) << met.text;
}

TEST(Store, WorldsOfDifferentSizesAreRefused) {
  Site site;
  Met small, large;
  std::thread one([&] {
    auto store = open_store(1, 2, terms_of("j"), site.places);
    small = exchange(*store, "", in_ms(20'000));
  });
  auto store = open_store(0, 3, terms_of("j"), {}, site.take());
  large = exchange(*store, "", in_ms(20'000));
  one.join();
  for (const Met& met : {small, large}) {
    EXPECT_EQ(met.code, Code::invalid_argument);
    EXPECT_EQ(met.text, "init: rank 1 was started in a world of 2, rank 0 in one of 3");
  }
}

TEST(Store, TwoProcessesOfOneRankAreRefused) {
  Site site;
  for (const Met& met : meet_all(site, {0, 1, 1}, 3, in_ms(20'000))) {
    EXPECT_EQ(met.code, Code::invalid_argument);
    EXPECT_TRUE(contains(met.text, "init: two processes say they are rank 1 (at 127.0.0.1:")) << met.text;
  }
}

TEST(Store, StrangersAreDroppedAndCounted) {
  Site site;
  const Address at = Address::parse("127.0.0.1").with_port(site.port());
  std::vector<Fd> strangers;
  for (std::string garbage :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100'000, '\xff'), std::string(1, '\0'), std::string()}) {
    Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), at.get(), at.length()), 0);
    ASSERT_EQ(send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), ssize_t(garbage.size()));
    strangers.push_back(std::move(fd));
  }
  Terms other = terms_of("j");
  other.secret = "guessed";
  std::thread thief([&] {
    auto store = open_store(1, 3, other, site.places);
    const Met met = exchange(*store, "", in_ms(1500));
    EXPECT_EQ(met.code, Code::internal);
    EXPECT_TRUE(contains(met.text, "secret")) << met.text;
  });
  const std::vector<Met> met = meet_all(site, {0, 1}, 3, in_ms(1000));
  thief.join();
  EXPECT_TRUE(contains(met[0].text, "rank 2 did not come")) << met[0].text;
  EXPECT_TRUE(contains(met[0].text, "Connections of strangers")) << met[0].text;
  EXPECT_EQ(met[1].text, met[0].text);
}

TEST(Store, ServesItsRanksWhileStrangersKeepSilent) {
  Site site;
  const Address at = Address::parse("127.0.0.1").with_port(site.port());
  std::vector<Fd> strangers;
  for (int i = 0; i < 50; ++i) {
    strangers.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(strangers.back().get(), at.get(), at.length()), 0);
  }
  const uint64_t began = now_ns();
  for (const Met& met : meet_all(site, {0, 1, 2}, 3, in_ms(20'000))) expect_complete(met, 3);
  EXPECT_LT(now_ns() - began, 2'000'000'000u);
}

TEST(Store, WhoIsRefusedHearsWhy) {
  Site site;
  Terms other = terms_of("j");
  other.version = "0.9";
  std::thread old([&] {
    auto store = open_store(1, 2, other, site.places);
    const Met met = exchange(*store, "", in_ms(300));
    EXPECT_EQ(met.code, Code::invalid_argument);
    EXPECT_TRUE(contains(met.text, "rank 1 runs lightcc 0.9, rank 0 1.0")) << met.text;
    EXPECT_TRUE(contains(met.text, "at 127.0.0.1:")) << met.text;
  });
  auto store = open_store(0, 2, terms_of("j"), {}, site.take());
  const Met met = exchange(*store, "", in_ms(600));
  old.join();
  EXPECT_EQ(met.code, Code::timeout);
  EXPECT_TRUE(contains(met.text, "rank 1 did not come")) << met.text;
  EXPECT_TRUE(contains(met.text, "A process was refused: rank 1 runs lightcc 0.9")) << met.text;
}

TEST(Store, AnotherJobsPlaceIsPassedBy) {
  Site taken, silent, ours;
  const std::vector<Endpoint> places{taken.places[0], silent.places[0], ours.places[0]};
  Met neighbour;
  std::thread other([&] {
    auto store = open_store(0, 2, terms_of("other"), {}, taken.take());
    neighbour = exchange(*store, "", in_ms(700));
  });
  ours.places = places;
  for (const Met& met : meet_all(ours, {0, 1, 2}, 3, in_ms(20'000))) expect_complete(met, 3);
  other.join();
  EXPECT_TRUE(contains(neighbour.text, "rank 1 did not come")) << neighbour.text;
  EXPECT_FALSE(contains(neighbour.text, "refused")) << neighbour.text;
}

TEST(Store, ARankThatLeavesBetweenRoundsIsNamedOnAll) {
  Site site;
  constexpr int kSize = 4;
  std::vector<Met> second(kSize);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank)
    threads.emplace_back([&, rank] {
      auto store = open_store(rank, kSize, terms_of("j"), site.places, rank == 0 ? site.take() : Fd());
      EXPECT_EQ(exchange(*store, "", in_ms(20'000)).text, "");
      if (rank == 2) return;
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      second[size_t(rank)] = exchange(*store, "", in_ms(20'000));
      EXPECT_EQ(exchange(*store, "", in_ms(20'000)).text, second[size_t(rank)].text);  // and it stays so
    });
  for (std::thread& thread : threads) thread.join();
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(second[size_t(rank)].code, Code::peer_lost);
    EXPECT_TRUE(contains(second[size_t(rank)].text, "init: rank 2")) << second[size_t(rank)].text;
    EXPECT_TRUE(contains(second[size_t(rank)].text, "left while the ranks met")) << second[size_t(rank)].text;
  }
}

TEST(Store, ARankZeroThatLeavesIsNamedOnAll) {
  Site site;
  auto root = open_store(0, 3, terms_of("j"), {}, site.take());
  std::atomic<int> first{0};
  std::vector<std::thread> threads;
  for (int rank : {1, 2})
    threads.emplace_back([&, rank] {
      auto store = open_store(rank, 3, terms_of("j"), site.places);
      EXPECT_EQ(exchange(*store, "", in_ms(20'000)).text, "");
      ++first;
      const Met met = exchange(*store, "", in_ms(20'000));
      EXPECT_EQ(met.code, Code::peer_lost);
      EXPECT_TRUE(contains(met.text, "rank 0 at 127.0.0.1:")) << met.text;
    });
  EXPECT_EQ(exchange(*root, "", in_ms(20'000)).text, "");
  while (first < 2) std::this_thread::yield();
  root.reset();
  for (std::thread& thread : threads) thread.join();
}

TEST(Store, AFailureIsBroughtToAll) {
  for (int failing : {0, 1, 3})
    for (int rounds : {0, 1}) {  // before it
      SCOPED_TRACE("rank " + std::to_string(failing) + " after rounds: " + std::to_string(rounds));
      Site site;
      constexpr int kSize = 4;
      std::vector<std::thread> threads;
      for (int rank = 0; rank < kSize; ++rank)
        threads.emplace_back([&, rank] {
          auto store = open_store(rank, kSize, terms_of("j"), site.places, rank == 0 ? site.take() : Fd());
          for (int round = 0; round < rounds; ++round) EXPECT_EQ(exchange(*store, "", in_ms(20'000)).text, "");
          if (rank == failing) return store->fail(Error(Code::internal, "no memory on host h"));
          const Met met = exchange(*store, "", in_ms(20'000));
          EXPECT_EQ(met.code, Code::internal);
          EXPECT_EQ(met.text, "rank " + std::to_string(failing) + ": no memory on host h");
        });
      for (std::thread& thread : threads) thread.join();
    }
}

TEST(Store, ManyRanks) {
  constexpr int kSize = 200;
  Site site;
  std::vector<int> ranks;
  for (int rank = 0; rank < kSize; ++rank) ranks.push_back(rank);
  for (const Met& met : meet_all(site, ranks, kSize, in_ms(60'000))) expect_complete(met, kSize);
}

}  // namespace
}  // namespace lightcc
