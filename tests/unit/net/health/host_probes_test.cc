// Ranks of another host that are asked over real TCP: who answers, and who does not.
#include "net/health/host_probes.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>

#include <memory>

#include "base/clock.h"
#include "labels.h"
#include "unit/loopback.h"
#include "net/tcp/tcp_transport.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr uint64_t kPatienceNs = 20'000'000'000;
const JobCredentials kJob{"job", "1.0", "a secret", 0};

// Rank 1 asks rank 0, whose listener is here.
struct Asked {
  explicit Asked(const JobCredentials& credentials = kJob) : probes(credentials, 1, {at, Address()}, Address()) {}
  void answer_by(const std::string& secret) {
    const TcpPeer own{"rank 0", {at}}, asker{"rank 1", {at.with_port(1)}};
    rank = std::make_unique<TcpTransport>(JobCredentials{"job", "1.0", secret, 0}, 0, std::vector{own, asker},
                                          std::move(listener));
  }
  void step() {
    if (rank) rank->step(), rank->flush();
    for (int answer : probes.step(now_ns())) answers.push_back(answer);
  }
  template <class Done> bool until(Done done) {
    for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline; step())
      if (done()) return true;
    return false;
  }
  bool ended() { return until([&] { return probes.open() == 0; }); }
  Fd listener = listen_on_own_loopback();
  const Address at = local_address(listener.get());
  std::unique_ptr<TcpTransport> rank;
  TcpProbes probes;
  std::vector<int> answers;
};

bool is_readable(int descriptor) {
  pollfd one{descriptor, POLLIN, 0};
  return poll(&one, 1, int(kPatienceNs / 1'000'000)) == 1;
}

TEST(HostProbes, ARankOfTheJobAnswersAsOftenAsItIsAsked) {
  Asked asked;
  asked.answer_by("a secret");
  for (int i = 0; i < 3; ++i) asked.probes.ask(0, now_ns());
  EXPECT_EQ(asked.probes.open(), 3u);
  EXPECT_TRUE(is_readable(asked.probes.descriptor()));
  EXPECT_TRUE(asked.ended());
  EXPECT_EQ(asked.answers, (std::vector{0, 0, 0}));
  EXPECT_EQ(asked.rank->unauthenticated(), 0u);
  EXPECT_TRUE(asked.until([&] { return !asked.rank->busy(); })) << "nothing of it is left";
}

// As with a host whose processes are all stopped.
TEST(HostProbes, AKernelThatTakesTheConnectionIsNoAnswer) {
  Asked asked;
  const uint64_t now = now_ns();
  asked.probes.ask(0, now);
  EXPECT_TRUE(is_readable(asked.probes.descriptor())) << "it is connected";
  EXPECT_TRUE(asked.probes.step(now).empty());
  EXPECT_TRUE(asked.probes.step(now + TcpProbes::kLongestNs - 1).empty());
  EXPECT_EQ(asked.probes.open(), 1u);
  EXPECT_TRUE(asked.probes.step(now + TcpProbes::kLongestNs).empty());
  EXPECT_EQ(asked.probes.open(), 0u) << "given up";
}

TEST(HostProbes, NeitherIsOneOfAnotherSecretNorARefusal) {
  Asked stranger, gone, ended;
  stranger.answer_by("another secret");
  gone.listener = Fd();
  ended.answer_by("a secret");
  ended.rank->end(Error(Code::peer_lost, "rank 3 died"));
  for (Asked* asked : {&stranger, &gone, &ended}) {
    asked->probes.ask(0, now_ns());
    EXPECT_TRUE(asked->ended());
    EXPECT_TRUE(asked->answers.empty());
  }
}

// A child that a rank forks meanwhile has its connections, too, and keeps them open.
TEST(HostProbes, AForkedChildHoldsNoProbe) {
  Asked asked;
  asked.probes.ask(0, now_ns());
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    [[maybe_unused]] ssize_t n = (close(ends[1]), read(ends[0], &byte, 1));
    _exit(0);
  }
  close(ends[0]);
  asked.answer_by("a secret");
  EXPECT_TRUE(asked.ended());
  EXPECT_EQ(asked.answers, std::vector{0});
  pollfd one{asked.probes.descriptor(), POLLIN, 0};
  EXPECT_EQ(poll(&one, 1, 0), 0) << "what was closed is not heard of any more";
  close(ends[1]);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(HostProbes, WhatTheSystemRefusesIsNotAnswered) {
  TcpProbes probes(kJob, 1, {Address(), Address()}, Address());
  probes.ask(0, now_ns());
  EXPECT_EQ(probes.open(), 0u);
}

}  // namespace
}  // namespace lightcc
