// What every exchange of bootstrap must do, between hosts (net/bootstrap/exchange.h) and on one host
// (net/bootstrap/local_exchange.h). Ranks are threads. An exchange adds a row:
//   struct Site { auto open(int rank, int size); };   // the exchange of a rank; the ranks of one site meet
//   INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, ExchangeContract, Site);
// What open() returns points to something with exchange(note, deadline), which returns the notes of all, and
// fail(error).
//
// 1. Every rank gets the notes of all, by rank, in every round, in whatever order the ranks come.
// 2. A rank that cannot go on, that leaves, that does not come in time, or that says of itself what cannot be, ends
//    the exchange on every rank that came, with an error that names it. It stays so.
// 3. A rank that is cancelled throws why, and no other waits for it.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "unit/helpers.h"

namespace lightcc {

template <class Site>
class ExchangeContract : public testing::Test {
 protected:
  using Notes = std::vector<std::string>;
  static constexpr uint64_t kPatienceMs = 60'000;  // ends a test that has failed

  struct Outcome {
    Notes notes;
    Code code = Code::ok;
    std::string text;
  };
  static Outcome outcome_of(const std::function<Notes()>& call) {
    Outcome outcome;
    try {
      outcome.notes = call();
    } catch (const Error& error) {
      outcome.code = error.code(), outcome.text = error.what();
    }
    return outcome;
  }
  template <class Exchange>
  static Outcome exchanged(Exchange& exchange, const std::string& note, uint64_t patience_ms = kPatienceMs) {
    return outcome_of([&] { return exchange->exchange(note, Deadline(in_ms(patience_ms))); });
  }
  // A thread for each of these ranks, which start in this order. body(rank, exchange) runs on each.
  template <class Body>
  static void on_ranks(Site& site, const std::vector<int>& ranks, int size, Body body) {
    std::vector<std::thread> threads;
    for (const int rank : ranks) {
      std::atomic<bool> started{false};
      threads.emplace_back([&site, &started, &body, rank, size] {
        auto exchange = site.open(rank, size);
        started = true;
        body(rank, exchange);
      });
      while (!started) std::this_thread::yield();
    }
    for (std::thread& thread : threads) thread.join();
  }
  static std::vector<int> up_to(int size) {
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  static Notes notes_of(int size, const std::function<std::string(int)>& note_of) {
    Notes notes;
    for (int rank = 0; rank < size; ++rank) notes.push_back(note_of(rank));
    return notes;
  }
};
TYPED_TEST_SUITE_P(ExchangeContract);

TYPED_TEST_P(ExchangeContract, EveryRankGetsTheNotesOfAllInWhateverOrderTheyCome) {
  const auto note_of = [](int rank) { return "note " + std::to_string(rank); };
  for (const std::vector<int>& order : {std::vector{0}, {0, 1}, {1, 0}, {0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2, 0, 1}}) {
    const int size = int(order.size());
    TypeParam site;
    this->on_ranks(site, order, size, [&](int rank, auto& exchange) {
      const auto outcome = this->exchanged(exchange, note_of(rank));
      EXPECT_EQ(outcome.text, "");
      EXPECT_EQ(outcome.notes, this->notes_of(size, note_of)) << "on rank " << rank;
    });
  }
}

TYPED_TEST_P(ExchangeContract, RoundsFollowEachOtherWithNotesOfAnyBytesAndLengths) {
  constexpr int kSize = 3, kRounds = 6;
  TypeParam site;
  this->on_ranks(site, this->up_to(kSize), kSize, [&](int rank, auto& exchange) {
    for (int round = 0; round < kRounds; ++round) {
      const auto note_of = [&](int of) {
        return std::string(size_t(of * round * round) * 1000, char(of * 100 + round));
      };
      const auto outcome = this->exchanged(exchange, note_of(rank));
      EXPECT_EQ(outcome.text, "");
      EXPECT_TRUE(outcome.notes == this->notes_of(kSize, note_of)) << "round " << round << " on rank " << rank;
    }
  });
}

TYPED_TEST_P(ExchangeContract, TwoJobsThatMeetAtTheSameTimeDoNotMix) {
  TypeParam sites[2];
  std::vector<std::thread> jobs;
  for (int job = 0; job < 2; ++job)
    jobs.emplace_back([&, job] {
      const auto note_of = [&](int rank) { return std::to_string(rank) + " of " + std::to_string(job); };
      this->on_ranks(sites[job], {2, 1, 0}, 3, [&](int rank, auto& exchange) {
        EXPECT_EQ(this->exchanged(exchange, note_of(rank)).notes, this->notes_of(3, note_of));
      });
    });
  for (std::thread& job : jobs) job.join();
}

// On a loaded machine a rank that comes may be late, too; then there is more time.
TYPED_TEST_P(ExchangeContract, MissingRanksAreNamedOnEveryRankThatCame) {
  for (const uint64_t patience_ms : {300, 3'000, 30'000}) {
    TypeParam site;
    std::atomic<int> right{0};
    std::string other;
    std::mutex mutex;
    this->on_ranks(site, {0, 2, 4}, 5, [&](int, auto& exchange) {
      const auto outcome = this->exchanged(exchange, "", patience_ms);
      EXPECT_EQ(outcome.code, Code::timeout) << outcome.text;
      if (contains(outcome.text, "init: ranks 1, 3 did not come before HOROVOD_START_TIMEOUT")) {
        ++right;
      } else {
        const std::lock_guard lock(mutex);
        other = outcome.text;
      }
    });
    if (right == 3) return;
    if (patience_ms == 30'000) ADD_FAILURE() << other;
  }
}

TYPED_TEST_P(ExchangeContract, WhyARankCannotGoOnIsSaidOnAllOthersAndStaysSo) {
  constexpr int kSize = 3;
  for (const int failing : {0, 1, 2})
    for (const int rounds : {0, 1}) {  // before it
      SCOPED_TRACE("rank " + std::to_string(failing) + " after rounds: " + std::to_string(rounds));
      TypeParam site;
      std::atomic<int> others{0};
      this->on_ranks(site, this->up_to(kSize), kSize, [&](int rank, auto& exchange) {
        for (int round = 0; round < rounds; ++round) EXPECT_EQ(this->exchanged(exchange, "").text, "");
        if (rank == failing) {
          while (others < kSize - 1) std::this_thread::yield();  // who comes much later finds nobody to tell it
          exchange->fail(Error(Code::internal, "no memory on host h"));
          EXPECT_TRUE(contains(this->exchanged(exchange, "").text, "no memory on host h"));
          return;
        }
        ++others;
        for (int time = 0; time < 2; ++time) {
          const auto outcome = this->exchanged(exchange, "");
          EXPECT_EQ(outcome.code, Code::internal);
          EXPECT_EQ(outcome.text, "rank " + std::to_string(failing) + ": no memory on host h");
        }
      });
    }
}

TYPED_TEST_P(ExchangeContract, ARankThatLeavesIsNamedOnAllOthers) {
  constexpr int kSize = 3;
  for (const int leaving : {0, 2}) {
    TypeParam site;
    this->on_ranks(site, this->up_to(kSize), kSize, [&](int rank, auto& exchange) {
      EXPECT_EQ(this->exchanged(exchange, "").text, "");
      if (rank == leaving) return exchange.reset();
      const auto outcome = this->exchanged(exchange, "");
      EXPECT_EQ(outcome.code, Code::peer_lost);
      EXPECT_TRUE(contains(outcome.text, "init: rank " + std::to_string(leaving))) << outcome.text;
      EXPECT_TRUE(contains(outcome.text, "left while the ranks met")) << outcome.text;
    });
  }
}

TYPED_TEST_P(ExchangeContract, WorldsOfDifferentSizesAreRefusedOnAll) {
  TypeParam site;
  const auto expect_refused = [&](int, auto& exchange) {
    const auto outcome = this->exchanged(exchange, "");
    EXPECT_EQ(outcome.code, Code::invalid_argument);
    EXPECT_EQ(outcome.text, "init: rank 1 was started in a world of 3, rank 0 in one of 2");
  };
  std::thread large([&] { this->on_ranks(site, {1}, 3, expect_refused); });
  this->on_ranks(site, {0}, 2, expect_refused);
  large.join();
}

TYPED_TEST_P(ExchangeContract, TwoProcessesOfOneRankAreRefusedOnAll) {
  TypeParam site;
  this->on_ranks(site, {0, 1, 1}, 3, [&](int, auto& exchange) {
    const auto outcome = this->exchanged(exchange, "");
    EXPECT_EQ(outcome.code, Code::invalid_argument);
    EXPECT_TRUE(contains(outcome.text, "init: two processes say they are rank 1")) << outcome.text;
  });
}

// Rank 2 does not come to the second round before the others have ended.
TYPED_TEST_P(ExchangeContract, ACancelledRankThrowsWhyAndNoOtherWaitsForIt) {
  for (const int cancelled : {0, 1}) {
    TypeParam site;
    Cancellation cancellation;
    std::atomic<int> ended{0};
    this->on_ranks(site, {0, 1, 2}, 3, [&](int rank, auto& exchange) {
      EXPECT_EQ(this->exchanged(exchange, "").text, "");
      while (rank == 2 && ended < 2) std::this_thread::yield();
      std::thread user([&] {
        if (rank == cancelled) cancellation.cancel(Error(Code::shut_down, "the user ends it"));
      });
      const Deadline deadline(in_ms(this->kPatienceMs), rank == cancelled ? &cancellation : nullptr);
      const auto outcome = this->outcome_of([&] { return exchange->exchange("", deadline); });
      user.join();
      if (rank == cancelled) {
        EXPECT_EQ(outcome.code, Code::shut_down);
        EXPECT_EQ(outcome.text, "the user ends it");
      } else {
        EXPECT_NE(outcome.code, Code::ok);
        EXPECT_NE(outcome.code, Code::timeout) << outcome.text;
      }
      ++ended;
    });
  }
}

REGISTER_TYPED_TEST_SUITE_P(ExchangeContract, EveryRankGetsTheNotesOfAllInWhateverOrderTheyCome,
                            RoundsFollowEachOtherWithNotesOfAnyBytesAndLengths, TwoJobsThatMeetAtTheSameTimeDoNotMix,
                            MissingRanksAreNamedOnEveryRankThatCame, WhyARankCannotGoOnIsSaidOnAllOthersAndStaysSo,
                            ARankThatLeavesIsNamedOnAllOthers, WorldsOfDifferentSizesAreRefusedOnAll,
                            TwoProcessesOfOneRankAreRefusedOnAll, ACancelledRankThrowsWhyAndNoOtherWaitsForIt);

}  // namespace lightcc
