// The ranks of a host exchange their infos, or each of them hears who did not come. Beyond what every exchange
// does (contracts/exchange_contract.h).
#include "net/bootstrap/local_exchange.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "unit/helpers.h"

namespace lightcc {
namespace {

std::string new_name() {
  static std::atomic<int> count{0};
  return "lightcc-test/" + std::to_string(getpid()) + "/" + std::to_string(count++);
}

std::vector<RankInfo> exchange(const std::string& name, int rank, int size, RankInfo mine, uint64_t deadline_ns) {
  return open_local_exchange({name}, rank, size)->exchange(std::move(mine), deadline_ns);
}

struct Exchanged {
  std::vector<RankInfo> infos;
  Code code = Code::ok;
  std::string text;
};

RankInfo info_of(int rank) {
  RankInfo info{"note " + std::to_string(rank), {}};
  for (int i = 0; i < 2; ++i) {
    info.fds.emplace_back(memfd_create("info", MFD_CLOEXEC));
    const int content = rank * 10 + i;
    EXPECT_EQ(pwrite(info.fds.back().get(), &content, sizeof content, 0), ssize_t(sizeof content));
  }
  return info;
}

// One thread for each of the ranks given, in a world of `size`.
std::vector<Exchanged> exchange_all(const std::string& name, const std::vector<int>& ranks, int size,
                                  uint64_t deadline_ns) {
  std::vector<Exchanged> outcomes(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        outcomes[i].infos = exchange(name, ranks[i], size, info_of(ranks[i]), deadline_ns);
      } catch (const Error& error) {
        outcomes[i].code = error.code(), outcomes[i].text = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

void expect_complete(const Exchanged& outcome, size_t size) {
  ASSERT_EQ(outcome.text, "");
  ASSERT_EQ(outcome.infos.size(), size);
  for (size_t rank = 0; rank < size; ++rank) {
    EXPECT_EQ(outcome.infos[rank].note, "note " + std::to_string(rank));
    ASSERT_EQ(outcome.infos[rank].fds.size(), 2u);
    for (int i = 0; i < 2; ++i) {
      int content = -1;
      ASSERT_EQ(pread(outcome.infos[rank].fds[size_t(i)].get(), &content, sizeof content, 0), ssize_t(sizeof content));
      EXPECT_EQ(content, int(rank) * 10 + i);
    }
  }
}

TEST(LocalExchange, EveryRankGetsTheNotesAndDescriptorsOfAll) {
  for (int size : {1, 2, 5}) {
    std::vector<int> ranks;
    for (int rank = size - 1; rank >= 0; --rank) ranks.push_back(rank);
    for (const Exchanged& outcome : exchange_all(new_name(), ranks, size, in_ms(10'000)))
      expect_complete(outcome, size_t(size));
  }
}

TEST(LocalExchange, TheSameNameServesAgain) {
  const std::string name = new_name();
  for (int again = 0; again < 3; ++again)
    for (const Exchanged& outcome : exchange_all(name, {0, 1}, 2, in_ms(10'000))) expect_complete(outcome, 2);
}

TEST(LocalExchange, ALateHostIsWaitedFor) {
  const std::string name = new_name();
  std::vector<Exchanged> client;
  std::thread early([&] { client = exchange_all(name, {1}, 2, in_ms(10'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  expect_complete(exchange_all(name, {0}, 2, in_ms(10'000))[0], 2);
  early.join();
  expect_complete(client[0], 2);
}

TEST(LocalExchange, MissingRanksAreNamedOnEveryRankThatCame) {
  for (const Exchanged& outcome : exchange_all(new_name(), {0, 2, 4}, 5, in_ms(3'000))) {
    EXPECT_EQ(outcome.code, Code::timeout);
    EXPECT_EQ(without_seconds(outcome.text),
              "init: ranks 1, 3 did not come before HOROVOD_START_TIMEOUT (n s); did all ranks start? "
              "If they need longer, raise HOROVOD_START_TIMEOUT");
  }
}

TEST(LocalExchange, AMissingRankZeroIsNamedToo) {
  for (const Exchanged& outcome : exchange_all(new_name(), {1, 2}, 3, in_ms(200))) {
    EXPECT_EQ(outcome.code, Code::timeout);
    EXPECT_NE(outcome.text.find("init: rank 0 did not come"), std::string::npos) << outcome.text;
  }
}

TEST(LocalExchange, GarbageOfAnotherProcessIsIgnored) {
  const std::string name = new_name();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const uint64_t deadline = in_ms(10'000);

  std::vector<Exchanged> host;
  std::thread rank0([&] { host = exchange_all(name, {0}, 2, deadline); });
  // The last two begin as a info does: the magic, and then a rank or a note that ends early.
  for (std::string garbage : {std::string("GET / HTTP/1.1\r\n"), std::string(1, '\0'), std::string(8000, 'x'),
                              std::string("2CCL"), std::string("2CCL\1\0\0\0\xff\xff\xff\xff", 12)}) {
    Fd other;
    do {
      other = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    } while (connect(other.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 && now_ns() < deadline);
    EXPECT_EQ(send(other.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), ssize_t(garbage.size()));
  }
  for (const Exchanged& outcome : exchange_all(name, {1}, 2, deadline)) expect_complete(outcome, 2);
  rank0.join();
  expect_complete(host[0], 2);
}

}  // namespace
}  // namespace lightcc
