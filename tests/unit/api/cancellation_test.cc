// Another thread cancels an init: whatever it waits for just then, it ends at once, with that thread's reason, and
// leaves nothing behind. Ranks are threads, hosts are names.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "api/lightcc.h"
#include "base/clock.h"
#include "unit/credentials.h"
#include "unit/helpers.h"
#include "labels.h"
#include "unit/loopback.h"
#include "net/bootstrap/bootstrap.h"
#include "net/bootstrap/connect.h"
#include "net/bootstrap/local_exchange_message.h"

LABEL(as_placed);

namespace lightcc {
namespace {

const Error kWhy(Code::shut_down, "init: a member is gone");
// Less than any wait that cancelling does not end, and for what takes milliseconds, on a loaded machine.
constexpr uint64_t kSoonNs = 3'900'000'000, kPatienceNs = 20'000'000'000;

void sleep_us(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }
std::string tried(const std::function<void()>& what) {
  try {
    what();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}
size_t entries(const char* directory) {
  const auto all = std::filesystem::directory_iterator(directory);
  return size_t(std::distance(begin(all), end(all)));
}
// Some are closed by threads of their own (base/close_elsewhere.h), and a thread that was joined may be listed a while.
void expect_no_more(const char* directory, size_t before) {
  const uint64_t end = now_ns() + kPatienceNs;
  while (entries(directory) > before && now_ns() < end) sleep_us(1000);
  EXPECT_LE(entries(directory), before) << directory;
}

// Cancels it while it waits, or before. What it threw is returned.
std::string cancelled(const std::function<void(const Deadline&)>& wait, int after_us = 30'000) {
  Cancellation cancellation;
  std::atomic<uint64_t> since_ns{0};
  std::thread other([&] {
    sleep_us(after_us);
    since_ns = now_ns();
    cancellation.cancel(kWhy);
  });
  if (after_us == 0) other.join();
  const std::string said = tried([&] { wait({in_ms(20'000), &cancellation}); });
  const uint64_t ended_ns = now_ns();
  if (other.joinable()) other.join();
  EXPECT_LT(ended_ns - std::min<uint64_t>(since_ns, ended_ns), kSoonNs);
  return said;
}

std::vector<Endpoint> endpoints_of(const Address& address) {
  return {{address.with_port(0).text(), address.port()}};
}

TEST(Cancellations, OfEachWaitForRanksOfSeveralHosts) {
  const Fd silent = listen_on_own_loopback();  // takes connections and says nothing
  const auto nobody = endpoints_of(own_loopback().with_port(1)), mute = endpoints_of(local_address(silent.get()));
  for (int after_us : {0, 30'000}) {
    EXPECT_EQ(cancelled([&](const Deadline& deadline) {
      open_exchange(0, 2, kCredentials, {}, listen_on_own_loopback())->exchange("", deadline);
    }, after_us), kWhy.what()) << "the others do not come";
    for (const auto& endpoints : {nobody, mute})
      EXPECT_EQ(cancelled([&](const Deadline& deadline) {
        open_exchange(1, 2, kCredentials, endpoints)->exchange("", deadline);
      }, after_us), kWhy.what()) << "rank 0 does not come or answer";
  }
}

TEST(Cancellations, OfEachWaitForRanksOfThisHost) {
  const std::string taken = random_name(), full = random_name();
  const Fd silent = listen_locally(taken);
  const Fd narrow = local_socket();
  ASSERT_EQ(bind_local(narrow.get(), full), 0);
  ASSERT_EQ(listen(narrow.get(), 0), 0);
  std::vector<Fd> waiting;
  do waiting.push_back(local_socket());
  while (connect_local(waiting.back().get(), full) == 0);
  for (int after_us : {0, 30'000}) {
    const auto exchanged = [&](const std::string& name, int rank) {
      return cancelled([&](const Deadline& deadline) {
        open_local_exchange({name}, rank, 2)->exchange({}, deadline);
      }, after_us);
    };
    EXPECT_EQ(exchanged(random_name(), 0), kWhy.what()) << "the others do not come";
    EXPECT_EQ(exchanged(random_name(), 1), kWhy.what()) << "rank 0 does not come";
    EXPECT_EQ(exchanged(taken, 0), kWhy.what()) << "the name is taken";
    EXPECT_EQ(exchanged(taken, 1), kWhy.what()) << "rank 0 does not answer";
    EXPECT_EQ(exchanged(full, 1), kWhy.what()) << "rank 0's queue is full";
    for (int rank : {0, 1})
      EXPECT_EQ(cancelled([&](const Deadline& deadline) {
        connect_local_ranks({random_name()}, rank, 2, "", "", deadline);
      }, after_us), kWhy.what());
    EXPECT_EQ(cancelled([&](const Deadline& deadline) { is_reachable_locally(full, deadline); }, after_us),
              kWhy.what());
  }
}

// A rank that cannot go on gives the others time to hear of it, unless it is cancelled.
TEST(Cancellations, OfTheNoticeOfAFailure) {
  const auto nobody = endpoints_of(own_loopback().with_port(1));
  const Error failure(Code::internal, "no memory");
  for (int rank : {0, 1})
    for (int after_us : {0, 30'000}) {
      cancelled([&](const Deadline& deadline) {
        open_exchange(rank, 2, kCredentials, nobody, rank == 0 ? listen_on_own_loopback() : Fd())
            ->fail(failure, deadline.cancellation);
      }, after_us);
      cancelled([&](const Deadline& deadline) {
        open_local_exchange({random_name()}, rank, 2)->fail(failure, deadline.cancellation);
      }, after_us);
    }
}

// One of three ranks does not come again, and one of the others is cancelled.
TEST(Cancellations, AreToldToThoseThatHaveCome) {
  for (int which : {0, 1}) {
    Fd listener = listen_on_own_loopback();
    const auto endpoints = endpoints_of(local_address(listener.get()));
    std::string said[2];
    Cancellation cancellation;
    std::atomic<int> come{0};
    std::vector<std::thread> ranks;
    for (int rank : {0, 1})
      ranks.emplace_back([&, rank] {
        auto exchange = open_exchange(rank, 3, kCredentials, endpoints, rank == 0 ? std::move(listener) : Fd());
        EXPECT_EQ(tried([&] { exchange->exchange("", in_ms(20'000)); }), "");
        ++come;
        const Deadline deadline(in_ms(20'000), rank == which ? &cancellation : nullptr);
        said[rank] = tried([&] { exchange->exchange("", deadline); });
      });
    const auto third = open_exchange(2, 3, kCredentials, endpoints);
    EXPECT_EQ(tried([&] { third->exchange("", in_ms(20'000)); }), "");
    while (come < 2) std::this_thread::yield();
    sleep_us(200'000);  // in which rank 1 has usually said that it is there
    cancellation.cancel(kWhy);
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(said[which], kWhy.what());
    EXPECT_EQ(said[1 - which], which == 0 ? kWhy.what() : std::string("rank 1: ") + kWhy.what());
  }
}

// ---- the whole bootstrap

struct Member {
  int rank;
  std::string host;
};

// One thread a member, each with a cancellation of its own. What each of them threw.
std::vector<std::string> bootstrap_members(const std::vector<Member>& members, int size, int cancelled_after_us) {
  Fd listener = listen_on_own_loopback();
  const auto endpoints = endpoints_of(local_address(listener.get()));
  std::vector<std::string> said(members.size());
  std::vector<Cancellation> cancellations(members.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < members.size(); ++i)
    threads.emplace_back([&, i] {
      const auto& [rank, host] = members[i];
      World world;
      world.rank = rank, world.size = size, world.local_size = 0, world.job = "job", world.host = host;
      Config config;
      config.host_id = host;
      Rendezvous rendezvous{"a test", "job", "secret", endpoints, rank == 0 ? std::move(listener) : Fd()};
      said[i] = tried([&] {
        bootstrap_at(world, config, std::move(rendezvous), 0, {in_ms(20'000), &cancellations[i]});
      });
    });
  uint64_t since_ns = now_ns();
  if (cancelled_after_us >= 0) {
    sleep_us(cancelled_after_us);
    since_ns = now_ns();
    for (Cancellation& cancellation : cancellations) cancellation.cancel(kWhy);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(now_ns() - since_ns, cancelled_after_us >= 0 ? kSoonNs : kPatienceNs);
  return said;
}

TEST(Cancellations, OfABootstrapLeaveNothingAndTheNextSucceeds) {
  const size_t descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (int round = 0; round < 10; ++round)
    for (const char* host : {"a", "b"}) {
      // Rank 1 of 3 does not come.
      for (const std::string& said : bootstrap_members({{0, "a"}, {2, host}}, 3, 5'000 * (round % 3)))
        EXPECT_TRUE(said.ends_with(kWhy.what())) << said;
      for (const std::string& said : bootstrap_members({{1, "a"}, {0, host}}, 2, -1)) EXPECT_EQ(said, "");
    }
  expect_no_more("/proc/self/fd", descriptors);
  expect_no_more("/proc/self/task", threads);
}

// All come, and are cancelled at any moment: each has connected or is cancelled, or hears it of another.
TEST(Cancellations, OfABootstrapAtAnyMoment) {
  const size_t descriptors = entries("/proc/self/fd");
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 60; ++round) {
    const int after_us = int(random() % 8000);
    const char* host = round % 2 ? "a" : "b";
    for (const std::string& said : bootstrap_members({{0, "a"}, {1, "a"}, {2, host}}, 3, after_us))
      EXPECT_TRUE(said.empty() || said.ends_with(kWhy.what()) || said.find(" left while the ranks met") != said.npos)
          << said;
  }
  expect_no_more("/proc/self/fd", descriptors);
}

// ---- the C API, in which one rank is this process, and the other does not come

TEST(CancelInit, EndsTheInitOfItsJobAndNoOther) {
  const size_t descriptors = entries("/proc/self/fd");
  for (int round = 0; round < 30; ++round)
    for (int rank : {0, 1}) {
      const std::string job = "job " + std::to_string(round) + " " + std::to_string(rank);
      char where[1024];
      ASSERT_EQ(lightcc_open_meeting(where, sizeof where), LIGHTCC_OK);
      if (rank == 1) std::snprintf(where, sizeof where, "127.0.0.1:1");
      std::thread other([&] {
        sleep_us(2000 * (round % 3));  // before the init, or while it is under way
        EXPECT_EQ(lightcc_cancel_init(("not " + job).c_str(), "why not"), LIGHTCC_OK);
        EXPECT_EQ(lightcc_cancel_init(job.c_str(), "a member is gone"), LIGHTCC_OK);
        EXPECT_EQ(lightcc_cancel_init(job.c_str(), "and another"), LIGHTCC_OK);
      });
      EXPECT_EQ(lightcc_init_at(rank, 2, job.c_str(), "secret", where), LIGHTCC_SHUT_DOWN);
      EXPECT_STREQ(lightcc_error(), kWhy.what());
      other.join();
    }
  char where[1024];
  ASSERT_EQ(lightcc_open_meeting(where, sizeof where), LIGHTCC_OK);
  EXPECT_EQ(lightcc_init_at(0, 1, "a job of one", "secret", where), LIGHTCC_OK);
  EXPECT_EQ(lightcc_cancel_init("a job of one", "too late"), LIGHTCC_OK);
  EXPECT_EQ(lightcc_initialized(), 1);
  EXPECT_EQ(lightcc_shutdown(), LIGHTCC_OK);
  expect_no_more("/proc/self/fd", descriptors);
}

TEST(CancelInit, RemembersMoreThanTheLast) {
  lightcc_cancel_init("first", "a member is gone");
  for (int later = 0; later < 20; ++later) lightcc_cancel_init(std::to_string(later).c_str(), "why not");
  EXPECT_EQ(lightcc_init_at(1, 2, "first", "secret", "127.0.0.1:1"), LIGHTCC_SHUT_DOWN);
  EXPECT_STREQ(lightcc_error(), kWhy.what());
}

TEST(CancelInit, TakesNoMoreOfTheCauseThanAnErrorCanHold) {
  lightcc_cancel_init("long", std::string(100'000, 'x').c_str());
  EXPECT_EQ(lightcc_init_at(1, 2, "long", "secret", "127.0.0.1:1"), LIGHTCC_SHUT_DOWN);
  EXPECT_EQ(lightcc_error(), "init: " + std::string(300, 'x'));
  EXPECT_EQ(lightcc_cancel_init(nullptr, ""), LIGHTCC_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace lightcc
