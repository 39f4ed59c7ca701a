// Heartbeats by script: what a heartbeat says arrives or is refused, and given who was heard when, exactly these are
// lost.
#include "unit/credentials.h"
#include "net/health/failure_detector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr uint64_t kMs = 1'000'000, kSecond = 1000 * kMs;
const HeartbeatKey kKey = heartbeat_key(kCredentials);
using HostNumbers = std::vector<int>;

Heartbeat heartbeat_of(int host, uint64_t sequence) { return {host, sequence, {}, false, Code::ok, ""}; }
Heartbeat last_heartbeat_of(int host, uint64_t sequence) {
  return {host, sequence, {}, true, Code::peer_lost, "rank 3 died"};
}

TEST(Heartbeat, WhatIsSaidArrives) {
  const Heartbeat sent{7, uint64_t(1) << 60, {0, 25, kUnknownAge}, false, Code::ok, ""};
  const auto got = parse_heartbeat(encode(sent, kKey), kKey);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->host, 7);
  EXPECT_EQ(got->sequence, uint64_t(1) << 60);
  EXPECT_EQ(got->awake_ages, sent.awake_ages);
  EXPECT_FALSE(got->over);

  const auto last = parse_heartbeat(encode(last_heartbeat_of(2, 5), kKey), kKey);
  ASSERT_TRUE(last);
  EXPECT_TRUE(last->over);
  EXPECT_EQ(last->code, Code::peer_lost);
  EXPECT_EQ(last->cause, "rank 3 died");
}

TEST(Heartbeat, AnyFitsIntoOneDatagram) {
  Heartbeat many = heartbeat_of(1, 2), talkative = last_heartbeat_of(1, 2);
  many.awake_ages.assign(5000, 3);
  talkative.cause.assign(999, 'x').append("\u20ac and more");
  talkative.awake_ages.assign(5000, 3);
  EXPECT_LE(encode(many, kKey).size(), kHeartbeatBytes);
  EXPECT_LE(encode(talkative, kKey).size(), kHeartbeatBytes);
  EXPECT_EQ(parse_heartbeat(encode(many, kKey), kKey).value().awake_ages, std::vector<uint16_t>(512, 3));
  EXPECT_EQ(parse_heartbeat(encode(talkative, kKey), kKey).value().cause, std::string(999, 'x'));
}

TEST(Heartbeat, AgesAreInHundredthsOfASecond) {
  EXPECT_EQ(age_of(0), 0);
  EXPECT_EQ(age_of(10 * kMs - 1), 0);
  EXPECT_EQ(age_of(2500 * kMs), 250);
  EXPECT_EQ(age_of(10 * kMs * 0xfffe), 0xfffe);
  EXPECT_EQ(age_of(UINT64_MAX), 0xfffe);  // and not unknown
}

TEST(Heartbeat, OfAnotherSecretJobOrEpochIsUnauthenticated) {
  const std::string bytes = encode(heartbeat_of(1, 2), kKey);
  JobCredentials secret = kCredentials, job = kCredentials, epoch = kCredentials, version = kCredentials;
  secret.secret += "x", job.job += "x", ++epoch.epoch, version.version += "x";
  EXPECT_TRUE(parse_heartbeat(bytes, heartbeat_key(version)));  // versions differ nowhere once the ranks are connected
  JobCredentials earlier = kCredentials;  // a job of the same name and secret
  earlier.nonce = {1};
  for (const JobCredentials& other : {secret, job, epoch, earlier})
    EXPECT_FALSE(parse_heartbeat(bytes, heartbeat_key(other)));
  // The name alone may be known to all.
  HeartbeatKey forged = heartbeat_key(secret);
  forged.name = kKey.name;
  EXPECT_FALSE(parse_heartbeat(encode(heartbeat_of(1, 2), forged), kKey));
  JobCredentials none = kCredentials;
  none.secret = "";
  EXPECT_THROW(heartbeat_key(none), Error);
}

TEST(Heartbeat, EveryBitCountsAndSoDoesTheLength) {
  for (const Heartbeat& heartbeat : {Heartbeat{1, 2, {3, 4}, false, Code::ok, ""}, last_heartbeat_of(1, 2)}) {
    const std::string bytes = encode(heartbeat, kKey);
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      std::string changed = bytes;
      changed[bit / 8] ^= char(1 << bit % 8);
      EXPECT_FALSE(parse_heartbeat(changed, kKey)) << bit;
    }
    for (size_t n = 0; n < bytes.size(); ++n) EXPECT_FALSE(parse_heartbeat(bytes.substr(0, n), kKey)) << n;
    EXPECT_FALSE(parse_heartbeat(bytes + '\0', kKey));
  }
}

TEST(Heartbeat, ValuesOutOfRangeAreRefusedWhoeverSignedThem) {
  Heartbeat good = last_heartbeat_of(0, 1);
  EXPECT_TRUE(parse_heartbeat(encode(good, kKey), kKey));
  for (Code code : {Code::pending, Code(8), Code(-1)}) {
    Heartbeat heartbeat = good;
    heartbeat.code = code;
    EXPECT_FALSE(parse_heartbeat(encode(heartbeat, kKey), kKey)) << int(code);
  }
  EXPECT_FALSE(parse_heartbeat(encode(heartbeat_of(-1, 1), kKey), kKey));
}

TEST(HeartbeatRoutes, UpToNineHostsEveryoneHearsEveryone) {
  EXPECT_EQ(receivers_of(0, 1), HostNumbers());
  EXPECT_EQ(receivers_of(1, 2), HostNumbers{0});
  EXPECT_EQ(receivers_of(2, 4), (HostNumbers{3, 0, 1}));
  EXPECT_EQ(receivers_of(8, 9).size(), 8u);
}

TEST(HeartbeatRoutes, BeyondThatAHostIsHeardAtPowersOfTwo) {
  EXPECT_EQ(receivers_of(0, 10), (HostNumbers{1, 2, 4, 8}));
  EXPECT_EQ(receivers_of(9, 10), (HostNumbers{0, 1, 3, 7}));
  EXPECT_EQ(senders_to(0, 10), (HostNumbers{9, 8, 6, 2}));
  EXPECT_EQ(receivers_of(5, 1000).size(), 10u);
}

TEST(HeartbeatRoutes, HearingIsTheInverseOfBeingHeard) {
  for (int hosts = 1; hosts <= 40; ++hosts)
    for (int host = 0; host < hosts; ++host) {
      const HostNumbers to = receivers_of(host, hosts);
      EXPECT_EQ(std::set<int>(to.begin(), to.end()).size(), to.size());
      EXPECT_EQ(std::count(to.begin(), to.end(), host), 0);
      for (int other = 0; other < hosts; ++other) {
        const HostNumbers from = senders_to(other, hosts);
        EXPECT_EQ(std::count(to.begin(), to.end(), other), std::count(from.begin(), from.end(), host));
      }
    }
}

// Calls as an engine does: every 250 ms, from one time to another; both ends included. What is lost on the way.
HostNumbers lost_between(FailureDetector& detector, uint64_t from_ms, uint64_t to_ms) {
  HostNumbers all;
  for (uint64_t ms = from_ms; ms <= to_ms; ms += 250)
    for (int host : detector.lost(ms * kMs)) all.push_back(host);
  return all;
}

TEST(FailureDetector, AHostThatFallsSilentIsLostAfterFourSecondsAndOnce) {
  FailureDetector detector(3, 0, 0);
  EXPECT_TRUE(detector.heard(heartbeat_of(1, 1), 100 * kMs));
  EXPECT_TRUE(detector.heard(heartbeat_of(2, 1), 100 * kMs));
  EXPECT_EQ(lost_between(detector, 250, 3000), HostNumbers());
  EXPECT_TRUE(detector.heard(heartbeat_of(2, 2), 3100 * kMs));
  EXPECT_EQ(lost_between(detector, 3250, 4000), HostNumbers());
  EXPECT_EQ(detector.lost(4100 * kMs - 1), HostNumbers());
  EXPECT_EQ(detector.lost(4100 * kMs), HostNumbers{1});
  EXPECT_EQ(lost_between(detector, 4250, 7000), HostNumbers());
  EXPECT_EQ(lost_between(detector, 7100, 7100), HostNumbers{2});
  EXPECT_EQ(lost_between(detector, 7250, 20000), HostNumbers());
}

TEST(FailureDetector, AHostThatGoesOnSendingIsNotLost) {
  FailureDetector detector(2, 0, 0);
  for (uint64_t ms = 0; ms < 60'000; ms += 3750) {  // as with fourteen of fifteen heartbeats lost
    EXPECT_TRUE(detector.heard(heartbeat_of(1, ms + 1), ms * kMs));
    EXPECT_EQ(lost_between(detector, ms, ms + 3750), HostNumbers());
  }
}

TEST(FailureDetector, EchoesAndLateOnesKeepNobodyAlive) {
  FailureDetector detector(2, 0, 0);
  EXPECT_TRUE(detector.heard(heartbeat_of(1, 5), 0));
  EXPECT_EQ(lost_between(detector, 250, 3750), HostNumbers());
  EXPECT_FALSE(detector.heard(heartbeat_of(1, 5), 3800 * kMs));
  EXPECT_FALSE(detector.heard(heartbeat_of(1, 4), 3800 * kMs));
  EXPECT_EQ(lost_between(detector, 4000, 4000), HostNumbers{1});
}

TEST(FailureDetector, OwnHeartbeatsAndThoseOfNoHostAreNoNews) {
  FailureDetector detector(2, 0, 0);
  EXPECT_FALSE(detector.heard(heartbeat_of(0, 5), 0));
  EXPECT_FALSE(detector.heard(heartbeat_of(2, 5), 0));
  EXPECT_FALSE(detector.heard(heartbeat_of(-1, 5), 0));
}

TEST(FailureDetector, WhoWasNeverHeardIsToldApartFromWhoWasLost) {
  const uint64_t start = 77 * kSecond;
  FailureDetector detector(3, 2, start);
  detector.heard(heartbeat_of(1, 1), start + 3 * kSecond);
  HostNumbers never;
  for (uint64_t ms = 250; ms < 4000; ms += 250)
    for (int host : detector.never_heard(start + ms * kMs)) never.push_back(host);
  EXPECT_EQ(never, HostNumbers());
  EXPECT_EQ(detector.never_heard(start + 4 * kSecond), HostNumbers{0});
  EXPECT_EQ(detector.lost(start + 4 * kSecond), HostNumbers());
  EXPECT_EQ(detector.never_heard(start + 5 * kSecond), HostNumbers());
  // It comes after all, and then falls silent.
  EXPECT_TRUE(detector.heard(heartbeat_of(0, 1), start + 5 * kSecond));
  detector.heard(heartbeat_of(1, 2), start + 5 * kSecond);
  EXPECT_EQ(lost_between(detector, 82'250, 85'750), HostNumbers());
  detector.heard(heartbeat_of(1, 3), start + 8750 * kMs);
  EXPECT_EQ(lost_between(detector, 86'000, 86'000), HostNumbers{0});
  EXPECT_EQ(detector.never_heard(start + 10 * kSecond), HostNumbers());
}

TEST(FailureDetector, AHostThatSaidItIsOverIsNotMissed) {
  FailureDetector detector(3, 0, 0);
  detector.heard(heartbeat_of(1, 1), 0);
  EXPECT_TRUE(detector.heard(last_heartbeat_of(1, 2), 0));
  EXPECT_TRUE(detector.heard(last_heartbeat_of(2, 1), 0));
  EXPECT_EQ(lost_between(detector, 250, 20'000), HostNumbers());
  EXPECT_EQ(detector.never_heard(20 * kSecond), HostNumbers());
  // One of its ranks goes on, and is missed when it ceases.
  EXPECT_TRUE(detector.heard(heartbeat_of(1, 3), 20 * kSecond));
  EXPECT_EQ(lost_between(detector, 20'250, 24'000), HostNumbers{1});
}

TEST(FailureDetector, OfManyHostsOnlyThoseItHearsAreMissed) {
  FailureDetector detector(16, 0, 0);
  EXPECT_TRUE(detector.heard(heartbeat_of(3, 1), 0));  // tells something in passing, and heartbeats for others
  EXPECT_TRUE(detector.heard(heartbeat_of(15, 1), 0));
  EXPECT_EQ(lost_between(detector, 250, 10'000), HostNumbers{15});
  EXPECT_EQ(detector.never_heard(10 * kSecond), (HostNumbers{8, 12, 14}));
}

TEST(FailureDetector, WhoWasStoppedItselfDeclaresNobodyLostAtOnce) {
  FailureDetector detector(3, 0, 0);
  detector.heard(heartbeat_of(1, 1), 0);
  EXPECT_EQ(lost_between(detector, 250, 1000), HostNumbers());
  // Stopped for ten minutes. One second of them counts: host 1 has two more to be heard, host 2 likewise.
  const uint64_t woke = 601'000;
  EXPECT_EQ(detector.lost(woke * kMs), HostNumbers());
  EXPECT_EQ(detector.never_heard(woke * kMs), HostNumbers());
  EXPECT_EQ(lost_between(detector, woke + 250, woke + 1750), HostNumbers());
  EXPECT_EQ(detector.never_heard((woke + 1750) * kMs), HostNumbers());
  EXPECT_EQ(detector.lost((woke + 2000) * kMs), HostNumbers{1});
  EXPECT_EQ(detector.never_heard((woke + 2000) * kMs), HostNumbers{2});
}

TEST(FailureDetector, WhatWaitedWhileItWasStoppedCountsAsHeardNow) {
  FailureDetector detector(2, 0, 0);
  detector.heard(heartbeat_of(1, 1), 0);
  EXPECT_EQ(detector.lost(250 * kMs), HostNumbers());
  for (uint64_t sequence = 2; sequence < 20; ++sequence)
    EXPECT_TRUE(detector.heard(heartbeat_of(1, sequence), 600 * kSecond));
  EXPECT_EQ(lost_between(detector, 600'000, 603'750), HostNumbers());
  EXPECT_EQ(lost_between(detector, 604'000, 604'000), HostNumbers{1});
}

TEST(FailureDetector, OneThatIsAlwaysLateStillFindsOut) {
  FailureDetector detector(2, 0, 0);
  detector.heard(heartbeat_of(1, 1), 0);
  for (uint64_t s = 10; s < 40; s += 10) EXPECT_EQ(detector.lost(s * kSecond), HostNumbers()) << s;
  EXPECT_EQ(detector.lost(40 * kSecond), HostNumbers{1});
}

TEST(FailureDetector, ATimeBeforeTheLastOneDoesNoHarm) {
  FailureDetector detector(2, 0, 10 * kSecond);
  EXPECT_EQ(detector.lost(11 * kSecond), HostNumbers());
  EXPECT_TRUE(detector.heard({1, 1, {7}, false, Code::ok, ""}, 11'500 * kMs));
  EXPECT_EQ(detector.lost(9 * kSecond), HostNumbers());
  EXPECT_EQ(detector.awake_ns_ago(1, 0, 9 * kSecond), 70 * kMs);
  for (int i = 0; i < 10; ++i) {  // the same second does not count again
    EXPECT_EQ(detector.lost(11 * kSecond), HostNumbers());
    EXPECT_EQ(detector.lost(12 * kSecond), HostNumbers());
  }
}

TEST(FailureDetector, WhetherAllWereHeard) {
  FailureDetector detector(3, 0, 0);
  detector.heard(heartbeat_of(1, 1), 0);
  EXPECT_FALSE(detector.all_heard());
  detector.heard(last_heartbeat_of(2, 1), 0);
  EXPECT_TRUE(detector.all_heard());
  EXPECT_EQ(lost_between(detector, 250, 4000), HostNumbers{1});
  EXPECT_TRUE(detector.all_heard()) << "one that is lost says nothing of how datagrams get through";
}

TEST(FailureDetector, OnlyHostsNotHeardForASecondAreAskedUntilTheyAreLost) {
  FailureDetector detector(3, 0, 0);
  EXPECT_EQ(detector.doubtful(250 * kMs), HostNumbers()) << "one that was never heard is not doubted";
  detector.heard(heartbeat_of(1, 1), 250 * kMs);
  detector.heard(last_heartbeat_of(2, 1), 250 * kMs);
  int asked = 0;
  for (uint64_t ms = 500; ms < 8000; ms += 250) {
    const HostNumbers lost = detector.lost(ms * kMs), doubtful = detector.doubtful(ms * kMs);
    EXPECT_EQ(doubtful, ms >= 1250 && ms < 4250 ? HostNumbers{1} : HostNumbers()) << ms;
    EXPECT_EQ(lost, ms == 4250 ? HostNumbers{1} : HostNumbers()) << ms;
    asked += int(doubtful.size());
  }
  EXPECT_EQ(asked, 12);
}

// What a host does whose datagrams something drops from a second after the start on, and that is then lost for good.
TEST(FailureDetector, AHostThatAnswersIsKeptAndFoundInFourSecondsOnceItDoesNot) {
  FailureDetector detector(2, 0, 0);
  HostNumbers lost, spared;
  uint64_t answered_ms = 0, found_ms = 0;
  for (uint64_t ms = 250; ms <= 70'000; ms += 250) {
    if (ms <= 1000) detector.heard(heartbeat_of(1, ms), ms * kMs);
    for (int host : detector.lost(ms * kMs)) lost.push_back(host), found_ms = ms;
    for (int host : detector.spared(ms * kMs)) spared.push_back(host);
    EXPECT_EQ(detector.all_heard(), ms < 5250 || !lost.empty()) << ms;
    if (detector.doubtful(ms * kMs).empty() || ms > 60'000) continue;
    EXPECT_EQ(lost, HostNumbers());
    detector.answered(1, ms * kMs);
    EXPECT_EQ(detector.doubtful(ms * kMs), HostNumbers());
    answered_ms = ms;
  }
  EXPECT_EQ(spared, HostNumbers{1}) << "told once";
  EXPECT_EQ(lost, HostNumbers{1});
  EXPECT_EQ(found_ms, answered_ms + 4000);
}

// A cut heals, an answer comes before the next heartbeat does, and the host is cut off again.
TEST(FailureDetector, OneAnswerBetweenTwoCutsIsNoReasonToWarn) {
  FailureDetector detector(2, 0, 0);
  detector.heard(heartbeat_of(1, 1), 0);
  for (uint64_t ms = 250; ms < 7000; ms += 250) {
    EXPECT_EQ(detector.lost(ms * kMs), HostNumbers()) << ms;
    EXPECT_EQ(detector.spared(ms * kMs), HostNumbers()) << ms;
    if (ms == 3000) detector.answered(1, ms * kMs);
  }
  EXPECT_EQ(detector.lost(7000 * kMs), HostNumbers{1});
  EXPECT_TRUE(detector.all_heard());
}

TEST(FailureDetector, AnAnswerSaysNothingOfWhoLookedAroundOrWasHeard) {
  FailureDetector detector(2, 0, 0);
  detector.answered(1, 100 * kMs);
  EXPECT_FALSE(detector.all_heard());
  EXPECT_EQ(lost_between(detector, 250, 3750), HostNumbers()) << "it was never heard";
  EXPECT_EQ(detector.never_heard(4000 * kMs), HostNumbers{1});
  detector.heard({1, 1, {7}, false, Code::ok, ""}, 4000 * kMs);
  detector.answered(1, 5000 * kMs);
  EXPECT_EQ(detector.awake_ns_ago(1, 0, 5000 * kMs), 1070 * kMs);
  EXPECT_FALSE(detector.heard_since(1, 4000 * kMs));
}

TEST(FailureDetector, WhoWasHeardSince) {
  FailureDetector detector(3, 0, 0);
  EXPECT_FALSE(detector.heard_since(1, 0));
  detector.heard(heartbeat_of(1, 1), 5 * kSecond);
  EXPECT_TRUE(detector.heard_since(1, 5 * kSecond - 1));
  EXPECT_FALSE(detector.heard_since(1, 5 * kSecond));
  detector.heard(last_heartbeat_of(1, 2), 6 * kSecond);
  EXPECT_FALSE(detector.heard_since(1, 0)) << "it has ended";
}

TEST(FailureDetector, WhenARankLookedAround) {
  FailureDetector detector(3, 0, 0);
  EXPECT_EQ(detector.awake_ns_ago(1, 0, 0), std::nullopt);  // not heard yet
  detector.heard({1, 1, {0, 150, kUnknownAge}, false, Code::ok, ""}, 100 * kMs);
  EXPECT_EQ(detector.awake_ns_ago(1, 0, 300 * kMs), 200 * kMs);
  EXPECT_EQ(detector.awake_ns_ago(1, 1, 300 * kMs), 1700 * kMs);
  for (auto [host, local] : {std::pair{1, 2}, {1, 3}, {1, -1}, {2, 0}, {0, 0}, {3, 0}, {-1, 0}})
    EXPECT_EQ(detector.awake_ns_ago(host, local, 300 * kMs), std::nullopt) << host << " " << local;
  detector.heard({1, 2, {40}, false, Code::ok, ""}, 300 * kMs);
  EXPECT_EQ(detector.awake_ns_ago(1, 0, 300 * kMs), 400 * kMs);
  EXPECT_EQ(detector.awake_ns_ago(1, 1, 300 * kMs), std::nullopt);
  // Own sleep is no proof of another's: of ten minutes one second counts.
  EXPECT_EQ(detector.awake_ns_ago(1, 0, 600 * kSecond), 400 * kMs + kSecond - 300 * kMs);
}

TEST(HeartbeatTurn, TheFirstRankSendsAndTheNextStepIn) {
  const uint64_t last = 100 * kSecond;
  for (auto [local, ms] : {std::pair{0, 250}, {1, 500}, {2, 750}, {7, 2000}, {8, 2000}, {500, 2000}}) {
    EXPECT_FALSE(heartbeat_is_due(last + uint64_t(ms) * kMs - 1, last, local)) << local;
    EXPECT_TRUE(heartbeat_is_due(last + uint64_t(ms) * kMs, last, local)) << local;
  }
  EXPECT_FALSE(heartbeat_is_due(last - kSecond, last, 0));  // another rank read the clock later
  EXPECT_TRUE(heartbeat_is_due(last, 0, 0));           // none has gone out yet
}

}  // namespace
}  // namespace lightcc
