// The ranks of a host meet, or each of them hears who did not come.
#include "net/rendezvous.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

std::string new_name() {
  static std::atomic<int> count{0};
  return "lightcc-test/" + std::to_string(getpid()) + "/" + std::to_string(count++);
}
uint64_t in_ms(uint64_t ms) { return now_ns() + ms * 1'000'000; }

struct Meeting {
  std::vector<Card> cards;
  Code code = Code::ok;
  std::string text;
};

Card card_of(int rank) {
  Card card{"note " + std::to_string(rank), {}};
  for (int i = 0; i < 2; ++i) {
    card.fds.emplace_back(memfd_create("card", MFD_CLOEXEC));
    const int content = rank * 10 + i;
    EXPECT_EQ(pwrite(card.fds.back().get(), &content, sizeof content, 0), ssize_t(sizeof content));
  }
  return card;
}

// One thread for each of the ranks given, in a world of `size`.
std::vector<Meeting> meet_all(const std::string& name, const std::vector<int>& ranks, int size, uint64_t deadline_ns) {
  std::vector<Meeting> meetings(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        meetings[i].cards = meet(name, ranks[i], size, card_of(ranks[i]), deadline_ns);
      } catch (const Error& error) {
        meetings[i].code = error.code(), meetings[i].text = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return meetings;
}

void expect_complete(const Meeting& meeting, size_t size) {
  ASSERT_EQ(meeting.text, "");
  ASSERT_EQ(meeting.cards.size(), size);
  for (size_t rank = 0; rank < size; ++rank) {
    EXPECT_EQ(meeting.cards[rank].note, "note " + std::to_string(rank));
    ASSERT_EQ(meeting.cards[rank].fds.size(), 2u);
    for (int i = 0; i < 2; ++i) {
      int content = -1;
      ASSERT_EQ(pread(meeting.cards[rank].fds[size_t(i)].get(), &content, sizeof content, 0), ssize_t(sizeof content));
      EXPECT_EQ(content, int(rank) * 10 + i);
    }
  }
}

TEST(Rendezvous, EveryRankGetsTheNotesAndDescriptorsOfAll) {
  for (int size : {1, 2, 5}) {
    std::vector<int> ranks;
    for (int rank = size - 1; rank >= 0; --rank) ranks.push_back(rank);
    for (const Meeting& meeting : meet_all(new_name(), ranks, size, in_ms(10'000)))
      expect_complete(meeting, size_t(size));
  }
}

TEST(Rendezvous, TheSameNameServesAgain) {
  const std::string name = new_name();
  for (int again = 0; again < 3; ++again)
    for (const Meeting& meeting : meet_all(name, {0, 1}, 2, in_ms(10'000))) expect_complete(meeting, 2);
}

TEST(Rendezvous, ALateHostIsWaitedFor) {
  const std::string name = new_name();
  std::vector<Meeting> guest;
  std::thread early([&] { guest = meet_all(name, {1}, 2, in_ms(10'000)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  expect_complete(meet_all(name, {0}, 2, in_ms(10'000))[0], 2);
  early.join();
  expect_complete(guest[0], 2);
}

TEST(Rendezvous, MissingRanksAreNamedOnEveryRankThatCame) {
  for (const Meeting& meeting : meet_all(new_name(), {0, 2, 4}, 5, in_ms(300))) {
    EXPECT_EQ(meeting.code, Code::timeout);
    EXPECT_EQ(meeting.text,
              "init: ranks 1, 3 did not come before HOROVOD_START_TIMEOUT; did all ranks start?");
  }
}

TEST(Rendezvous, AMissingRankZeroIsNamedToo) {
  for (const Meeting& meeting : meet_all(new_name(), {1, 2}, 3, in_ms(200))) {
    EXPECT_EQ(meeting.code, Code::timeout);
    EXPECT_NE(meeting.text.find("init: rank 0 did not come"), std::string::npos) << meeting.text;
  }
}

TEST(Rendezvous, TwoProcessesOfOneRankAreRefused) {
  const auto meetings = meet_all(new_name(), {0, 1, 1}, 3, in_ms(5'000));
  for (const Meeting& meeting : meetings) {
    EXPECT_EQ(meeting.code, Code::invalid_argument);
    EXPECT_EQ(meeting.text, "init: two processes say they are rank 1");
  }
}

TEST(Rendezvous, AStrangersGarbageIsIgnored) {
  const std::string name = new_name();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const uint64_t deadline = in_ms(10'000);

  std::vector<Meeting> host;
  std::thread rank0([&] { host = meet_all(name, {0}, 2, deadline); });
  // The last two begin as a card does: the magic, and then a rank or a note that ends early.
  for (std::string garbage : {std::string("GET / HTTP/1.1\r\n"), std::string(1, '\0'), std::string(8000, 'x'),
                              std::string("1CCL"), std::string("1CCL\1\0\0\0\xff\xff\xff\xff", 12)}) {
    Fd stranger;
    do {
      stranger = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    } while (connect(stranger.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 && now_ns() < deadline);
    EXPECT_EQ(send(stranger.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), ssize_t(garbage.size()));
  }
  for (const Meeting& meeting : meet_all(name, {1}, 2, deadline)) expect_complete(meeting, 2);
  rank0.join();
  expect_complete(host[0], 2);
}

}  // namespace
}  // namespace lightcc
