// How the ranks of one host exchange their infos where notes are long, descriptors are short, and other users of the
// host are in the way.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <fstream>
#include <thread>

#include "unit/child.h"
#include "harp/lingering.h"
#include "unit/helpers.h"
#include "labels.h"
#include "net/bootstrap/bootstrap.h"
#include "net/bootstrap/connect.h"
#include "net/bootstrap/local_exchange_message.h"
#include "net/shm/local_ranks.h"

LABEL(no_descriptors, "LocalExchangeShortage.*");

namespace lightcc {
namespace {

constexpr uid_t kOtherUser = 65534;

std::string tried(const std::function<void()>& what) {  // "" or the error
  try {
    what();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
std::string exchange_info(const std::vector<std::string>& names, int rank, int size, uint64_t deadline_ns) {
  return tried([&] { open_local_exchange(names, rank, size)->exchange({}, deadline_ns); });
}
std::string connect_ranks(const std::string& name, int rank, int size, uint64_t deadline_ns) {
  return tried([&] { connect_local_ranks({name}, rank, size, "rank " + std::to_string(rank), "", deadline_ns); });
}

Fd listening_at(const std::string& name, int queue) {
  Fd fd = local_socket();
  EXPECT_EQ(bind_local(fd.get(), name), 0);
  EXPECT_EQ(listen(fd.get(), queue), 0);
  return fd;
}
Fd accepted(const Fd& listener, uint64_t deadline_ns) {
  for (;;) {
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd || !sleep_until(deadline_ns)) return fd;
  }
}

// ---- notes

TEST(LocalExchangeFaults, NotesOfAnyLengthArriveWhole) {
  for (size_t bytes : {size_t(0), size_t(5'000), size_t(100'000)}) {
    const std::string name = random_name();
    std::vector<std::vector<RankInfo>> got(3);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.emplace_back([&, rank] {
        auto exchange = open_local_exchange({name}, rank, 3);
        for (int round = 0; round < 2; ++round) {
          RankInfo info{std::string(bytes + size_t(round), char('a' + rank)), {}};
          info.fds.emplace_back(memfd_create("info", MFD_CLOEXEC));
          got[size_t(rank)] = exchange->exchange(std::move(info), in_ms(20'000));
        }
      });
    for (std::thread& rank : ranks) rank.join();
    for (const auto& infos : got) {
      ASSERT_EQ(infos.size(), 3u);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(infos[size_t(rank)].note, std::string(bytes + 1, char('a' + rank)));
        EXPECT_EQ(infos[size_t(rank)].fds.size(), 1u);
      }
    }
  }
}

TEST(LocalExchangeFaults, WhatTheSystemDoesNotTakeIsSaid) {
  const std::string name = random_name();
  std::string said[2];
  std::thread client([&] {
    said[1] = tried([&] {
      open_local_exchange({name}, 1, 2)->exchange({std::string(8 << 20, 'x'), {}}, in_ms(20'000));
    });
  });
  said[0] = exchange_info({name}, 0, 2, in_ms(20'000));
  client.join();
  EXPECT_TRUE(contains(said[1], "more than a local socket takes")) << said[1];
  EXPECT_EQ(said[0], "rank 1: " + said[1]);
}

TEST(LocalExchangeFaults, OneThatCannotGoOnTellsAllWhy) {
  for (int failing : {0, 1, 2, 0, 0, 0, 0, 0, 0}) {  // rank 0 may close before it has read what others say
    const std::string name = random_name();
    std::string said[3];
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.emplace_back([&, rank] {
        auto exchange = open_local_exchange({name}, rank, 3);
        said[rank] = tried([&] {
          exchange->exchange({}, in_ms(20'000));
          if (rank == failing) return exchange->fail(Error(Code::internal, "no memory"));
          exchange->exchange({}, in_ms(20'000));
        });
      });
    for (std::thread& rank : ranks) rank.join();
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(said[rank], rank == failing ? "" : "rank " + std::to_string(failing) + ": no memory");
  }
}

// ---- others on this host

TEST(LocalExchangeFaults, AQueueThatOthersHaveFilledKeepsNobodyBeyondItsDeadline) {
  const std::string name = random_name();
  const Fd squatter = listening_at(name, 0);
  std::vector<Fd> waiting;
  int error = 0;
  while (!error && waiting.size() < 100) {
    waiting.push_back(local_socket());
    error = connect_local(waiting.back().get(), name);
  }
  ASSERT_EQ(error, EAGAIN);
  const std::string client = exchange_info({name}, 1, 2, in_ms(200));
  EXPECT_TRUE(contains(client, "rank 0 did not come before HOROVOD_START_TIMEOUT (")) << client;
  EXPECT_TRUE(contains(client, "the queue of this job's socket on this host is full")) << client;
  EXPECT_TRUE(contains(tried([&] { is_reachable_locally(name, in_ms(50)); }), "has filled the queue"));
}

TEST(LocalExchangeFaults, ARankThatIsTurnedAwayBeforeItWasHeardComesAgain) {
  const std::string name = random_name();
  const Fd root = listening_at(name, 10);
  std::string said = "nothing";
  std::thread client([&] { said = exchange_info({name}, 1, 2, in_ms(10'000)); });
  accepted(root, in_ms(10'000));  // and closed
  const Fd again = accepted(root, in_ms(10'000));
  LocalMessage message;
  while (receive_message(again.get(), message) == LocalReceived::later) std::this_thread::yield();
  EXPECT_EQ(message.rank, 1);
  for (int rank : {0, 1}) {
    LocalMessage info;
    info.rank = rank, info.size = 2;
    EXPECT_EQ(send_message(again.get(), info), LocalSent::yes);
  }
  client.join();
  EXPECT_EQ(said, "");
}

TEST(LocalExchangeFaults, WhoIsTurnedAwayAgainAndAgainStopsAtItsDeadline) {
  const std::string name = random_name();
  const Fd root = listening_at(name, 10);
  std::atomic<bool> done{false};
  std::thread client([&] {
    EXPECT_TRUE(
        contains(exchange_info({name}, 1, 2, in_ms(200)), "rank 0 did not come before HOROVOD_START_TIMEOUT ("));
    done = true;
  });
  while (!done) accepted(root, now_ns());  // and closed
  client.join();
}

TEST(LocalExchangeFaults, SilentConnectionsOfThisUserKeepNoRankOut) {
  const std::string name = random_name();
  std::string said[2];
  std::thread root([&] { said[0] = exchange_info({name}, 0, 2, in_ms(20'000)); });
  std::vector<Fd> silent;
  while (silent.size() < 300) {
    Fd fd = local_socket();
    if (connect_local(fd.get(), name) == 0) silent.push_back(std::move(fd));
  }
  said[1] = exchange_info({name}, 1, 2, in_ms(20'000));
  root.join();
  EXPECT_EQ(said[0] + said[1], "");
}

// A process of another user that listens at a name, or keeps many connections to it.
struct OtherUser {
  OtherUser(const std::string& name, bool listens) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    pid = fork();
    if (pid != 0) {
      char ready;
      close(ends[1]);
      if (listens && read(ends[0], &ready, 1) != 1) ADD_FAILURE() << "the other user did not come";
      close(ends[0]);
      return;
    }
    if (setuid(kOtherUser) != 0) _exit(1);
    std::vector<Fd> all;
    if (listens) {
      all.push_back(local_socket());
      if (bind_local(all[0].get(), name) != 0 || ::listen(all[0].get(), 100) != 0) _exit(1);
      if (write(ends[1], "r", 1) != 1) _exit(1);
      for (;;) pause();
    }
    for (;;) {
      Fd fd = local_socket();
      if (connect_local(fd.get(), name) == 0) all.push_back(std::move(fd));
      if (all.size() > 500) all.clear();
      usleep(100);
    }
  }
  ~OtherUser() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  pid_t pid;
};
#define NEEDS_ROOT() \
  if (geteuid() != 0) GTEST_SKIP() << "only root can play another user"

TEST(LocalExchangeFaults, AnotherUsersConnectionsAreClosedAtOnceAndNamed) {
  NEEDS_ROOT();
  const std::string name = random_name();
  OtherUser flood(name, false);
  const std::string alone = exchange_info({name}, 0, 2, in_ms(3'000));
  EXPECT_TRUE(contains(alone, "rank 1 did not come before HOROVOD_START_TIMEOUT (")) << alone;
  EXPECT_TRUE(contains(alone, "Connections of other users of this host")) << alone;
  std::string said[2];
  std::thread client([&] { said[1] = exchange_info({name}, 1, 2, in_ms(20'000)); });
  said[0] = exchange_info({name}, 0, 2, in_ms(20'000));
  client.join();
  EXPECT_EQ(said[0] + said[1], "") << "the ranks bootstrap all the same";
}

// A socket that lingers waits in close(), also where nobody has received it.
TEST(LocalExchangeFaults, AnotherUserWhoPassesADescriptorThatLingersHoldsNobodyUp) {
  NEEDS_ROOT();
  const std::string name = random_name();
  const auto since = std::chrono::steady_clock::now();
  std::string said[2];
  std::thread root([&] { said[0] = exchange_info({name}, 0, 2, in_ms(120'000)); });
  std::deque<harp::Lingering> passed(3);
  std::thread other([&] {
    if (syscall(SYS_setresuid, -1, kOtherUser, -1) != 0) return;  // of this thread only
    for (harp::Lingering& one : passed)
      for (bool is_passed = false; !is_passed;) {
        const Fd fd = local_socket();
        is_passed = connect_local(fd.get(), name) == 0 && one.try_to_pass(fd.get(), "x", 1);
      }
  });
  other.join();
  said[1] = exchange_info({name}, 1, 2, in_ms(120'000));
  root.join();
  EXPECT_EQ(said[0] + said[1], "");
  EXPECT_LT(std::chrono::steady_clock::now() - since, harp::Lingering::kNotWaited);
}

TEST(LocalExchangeFaults, ANameThatAnotherUserHoldsIsSaidInTime) {
  NEEDS_ROOT();
  const std::string name = random_name();
  OtherUser squatter(name, true);
  const std::string root = exchange_info({name}, 0, 2, in_ms(200)), client = exchange_info({name}, 1, 2, in_ms(200));
  EXPECT_TRUE(contains(root, "cannot listen for the others: a process of user 65534 holds this job's name")) << root;
  EXPECT_TRUE(contains(client, "a process of user 65534 holds this job's name")) << client;
}

TEST(LocalExchangeFaults, ANameThatNobodyKnowsIsNotHeldUpByOneThatAnotherUserHolds) {
  NEEDS_ROOT();
  const std::string known = random_name(), fresh = random_name();
  OtherUser squatter(known, true);
  std::string said[3];
  std::thread early([&] { said[1] = exchange_info({fresh, known}, 1, 2, in_ms(20'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  said[0] = exchange_info({fresh, known}, 0, 2, in_ms(20'000));
  early.join();
  EXPECT_EQ(said[0] + said[1], "");
}

// ---- the next epoch

struct Outcome {
  Bootstrapped bootstrapped;
  std::string text;
};
std::vector<Outcome> bootstrap_epoch(const std::string& job, const std::vector<Epoch>& epochs) {  // by rank
  std::vector<Outcome> outcomes(epochs.size());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < int(epochs.size()); ++rank)
    ranks.emplace_back([&, rank] {
      World world;
      world.rank = world.local_rank = rank, world.size = world.local_size = int(epochs.size()), world.job = job;
      const Environment nothing = [](const char*) -> const char* { return nullptr; };
      outcomes[size_t(rank)].text = tried([&] {
        outcomes[size_t(rank)].bootstrapped = bootstrap(world, {}, nothing, epochs[size_t(rank)], in_ms(20'000));
      });
    });
  for (std::thread& rank : ranks) rank.join();
  return outcomes;
}
bool is_listened_at(const std::string& name) {
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);)
    if (line.ends_with(" @" + name)) return true;
  return false;
}

TEST(NextEpoch, UsesANameThatWasDistributedInTheOneBefore) {
  const std::string job = random_name();
  const auto first = bootstrap_epoch(job, {{0, ""}, {0, ""}, {0, ""}});
  for (const Outcome& outcome : first) {
    ASSERT_EQ(outcome.text, "");
    EXPECT_EQ(outcome.bootstrapped.next_socket_name, first[0].bootstrapped.next_socket_name);
  }
  const std::string socket_name = first[0].bootstrapped.next_socket_name;
  ASSERT_NE(socket_name, "");
  std::atomic<bool> done{false}, seen{false};
  std::thread looker([&] {
    while (!done && !seen) seen = is_listened_at(socket_name);
  });
  std::thread late([&] {
    const uint64_t deadline = in_ms(5'000);
    while (!seen && now_ns() < deadline) std::this_thread::yield();
    EXPECT_EQ(exchange_info({socket_name}, 1, 3, in_ms(5'000)),
              "init: rank 1 was started in a world of 3, rank 0 in one of 2");
  });
  EXPECT_NE(exchange_info({socket_name}, 0, 2, in_ms(5'000)), "");
  late.join(), done = true, looker.join();
  EXPECT_TRUE(seen);

  // The last has missed the first epoch.
  const auto second = bootstrap_epoch(job, {{1, socket_name}, {1, socket_name}, {1, ""}});
  for (const Outcome& outcome : second) EXPECT_EQ(outcome.text, "");
  EXPECT_NE(second[0].bootstrapped.next_socket_name, socket_name);
}

TEST(NextEpoch, RanksOfSeveralHostsShareANonceThatNoOtherEpochHas) {
  std::vector<Outcome> outcomes(3);
  std::vector<std::thread> ranks;
  Fd listener = listen_on(Address::parse("127.0.0.1"), {});
  const Endpoint at{"127.0.0.1", local_address(listener.get()).port()};
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      World world;
      world.rank = rank, world.size = 3, world.local_size = 0, world.job = "job", world.host = "h";
      Config config;
      config.host_id = rank == 2 ? "b" : "a";
      Rendezvous rendezvous{"a test", "job", "secret", {at}, rank == 0 ? std::move(listener) : Fd()};
      outcomes[size_t(rank)].text = tried([&] {
        outcomes[size_t(rank)].bootstrapped = bootstrap_at(world, config, std::move(rendezvous), 0, in_ms(20'000));
      });
    });
  for (std::thread& rank : ranks) rank.join();
  for (const Outcome& one : outcomes) ASSERT_EQ(one.text, "");
  EXPECT_EQ(outcomes[0].bootstrapped.peers->topology().text(), "2 hosts: ranks 0, 1 | 2");
  for (int tick = 0; tick < 2; ++tick)
    for (int rank : {0, 1, 2})
      outcomes[size_t(rank)].bootstrapped.peers->heartbeats()->tick(now_ns() + uint64_t(tick) * kHeartbeatNs);
  for (int rank : {0, 2}) {
    EXPECT_TRUE(outcomes[size_t(rank)].bootstrapped.peers->heartbeats()->all_heard());
    EXPECT_EQ(outcomes[size_t(rank)].bootstrapped.peers->heartbeats()->unauthenticated(), 0u);
  }
}

// ---- descriptors

// A child that has so many left.
std::function<std::string()> with_descriptors(int left, const std::function<std::string()>& body) {
  return [=] {
    const std::vector<int> used = use_up_descriptors();
    for (int i = 0; i < left; ++i) close(used[used.size() - 1 - size_t(i)]);
    return body();
  };
}
const std::string kTooMany = "Too many open files; this process may have 60, raise the limit (ulimit -n)";

TEST(LocalExchangeShortage, OfWhoeverReceivesIsSaidOnAll) {
  const std::string name = random_name();
  Child rank1(60, with_descriptors(5, [&] { return connect_ranks(name, 1, 2, in_ms(20'000)); }));
  const std::string root = connect_ranks(name, 0, 2, in_ms(20'000)), client = rank1.said();
  EXPECT_EQ(client, "init: the descriptors of rank 0 did not arrive at rank 1: " + kTooMany);
  EXPECT_EQ(root, "rank 1: " + client);
}

TEST(LocalExchangeShortage, OfWhoeverCannotEvenBeginIsSaidOnAll) {
  const std::string name = random_name();
  Child rank1(60, with_descriptors(1, [&] { return connect_ranks(name, 1, 2, in_ms(20'000)); }));
  const std::string root = connect_ranks(name, 0, 2, in_ms(20'000)), client = rank1.said();
  EXPECT_EQ(client, "creating shared memory (memfd_create): " + kTooMany);
  EXPECT_EQ(root, "rank 1: " + client);
}

TEST(LocalExchangeShortage, OfRankZeroIsNotRankOnesFault) {
  const std::string name = random_name();
  Child rank0(60, with_descriptors(4, [&] { return connect_ranks(name, 0, 2, in_ms(3'000)); }));
  const std::string client = connect_ranks(name, 1, 2, in_ms(20'000)), root = rank0.said();
  EXPECT_EQ(without_seconds(root), "init: rank 0 could not take the connections of rank 1 before "
                                   "HOROVOD_START_TIMEOUT (n s): " + kTooMany);
  EXPECT_TRUE(contains(client, "rank 0 left while the ranks met") || contains(client, "init: rank 0 could not"))
      << client;
}

}  // namespace
}  // namespace lightcc
