// A rank that cannot go on by itself, before it has met the others: all of them hear why, long before they would give
// up.
#include <gtest/gtest.h>

#include <thread>

#include "base/clock.h"
#include "net/bootstrap/bootstrap.h"
#include "net/bootstrap/local_exchange.h"

namespace lightcc {
namespace {

constexpr uint64_t kPatienceNs = 600'000'000'000;  // nobody waits for so long
const Error kFailure(Code::invalid_argument, "HOROVOD_TIMELINE: cannot write");

std::string tried(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "no error";
}

// What the ranks hear if one of them fails. one_host: no port is opened.
std::vector<std::string> heard(int failing, int size, bool one_host) {
  std::vector<std::string> texts(static_cast<size_t>(size));
  std::vector<std::thread> ranks;
  const std::string job = random_name();
  Fd listener = listen_on(Address::parse("127.0.0.1"), {});
  const Endpoint at{"127.0.0.1", local_address(listener.get()).port()};
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      World world;
      world.rank = world.local_rank = rank, world.size = size, world.local_size = one_host ? size : 0, world.job = job;
      const Deadline deadline(now_ns() + kPatienceNs);
      const auto failure = rank == failing ? std::optional(kFailure) : std::nullopt;
      Rendezvous rendezvous{"a test", job, "secret", {at}, rank == 0 ? std::move(listener) : Fd()};
      texts[size_t(rank)] = tried([&] {
        if (one_host)
          bootstrap(world, {}, [](const char*) -> const char* { return nullptr; }, {}, deadline, failure);
        else
          bootstrap_at(world, {}, std::move(rendezvous), 0, deadline, failure);
      });
    });
  for (std::thread& rank : ranks) rank.join();
  return texts;
}

TEST(OwnFailure, IsToldToAllBeforeTheyGiveUp) {
  for (bool one_host : {true, false})
    for (int failing : {0, 2}) {
      const std::vector<std::string> texts = heard(failing, 3, one_host);
      for (int rank = 0; rank < 3; ++rank) {
        const std::string from = rank == failing ? "" : "rank " + std::to_string(failing) + ": ";
        EXPECT_EQ(texts[size_t(rank)], from + kFailure.what()) << (one_host ? "one host" : "several");
      }
    }
}

TEST(OwnFailure, OfARankAloneIsItsOwn) { EXPECT_EQ(heard(0, 1, true)[0], kFailure.what()); }

}  // namespace
}  // namespace lightcc
