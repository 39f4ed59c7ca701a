// Heartbeats by script: what a beat says arrives or is refused, and given who was heard when, exactly these are lost.
#include "net/pulse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace lightcc {
namespace {

constexpr uint64_t kMs = 1'000'000, kSecond = 1000 * kMs;
const Terms kTerms{"job-7", "0.2.0", "a secret", 4};
const BeatKey kKey = beat_key(kTerms);
using Hosts = std::vector<int>;

Beat beat_of(int host, uint64_t sequence) { return {host, sequence, {}, false, Code::ok, ""}; }
Beat last_beat_of(int host, uint64_t sequence) { return {host, sequence, {}, true, Code::peer_lost, "rank 3 died"}; }

TEST(Beat, WhatIsSaidArrives) {
  const Beat sent{7, uint64_t(1) << 60, {0, 25, kUnknownAge}, false, Code::ok, ""};
  const auto got = parse_beat(encode(sent, kKey), kKey);
  ASSERT_TRUE(got);
  EXPECT_EQ(got->host, 7);
  EXPECT_EQ(got->sequence, uint64_t(1) << 60);
  EXPECT_EQ(got->awake_ages, sent.awake_ages);
  EXPECT_FALSE(got->over);

  const auto last = parse_beat(encode(last_beat_of(2, 5), kKey), kKey);
  ASSERT_TRUE(last);
  EXPECT_TRUE(last->over);
  EXPECT_EQ(last->code, Code::peer_lost);
  EXPECT_EQ(last->cause, "rank 3 died");
}

TEST(Beat, AnyFitsIntoOneDatagram) {
  Beat many = beat_of(1, 2), talkative = last_beat_of(1, 2);
  many.awake_ages.assign(5000, 3);
  talkative.cause.assign(999, 'x').append("\u20ac and more");
  talkative.awake_ages.assign(5000, 3);
  EXPECT_LE(encode(many, kKey).size(), kBeatBytes);
  EXPECT_LE(encode(talkative, kKey).size(), kBeatBytes);
  EXPECT_EQ(parse_beat(encode(many, kKey), kKey).value().awake_ages, std::vector<uint16_t>(512, 3));
  EXPECT_EQ(parse_beat(encode(talkative, kKey), kKey).value().cause, std::string(999, 'x'));
}

TEST(Beat, AgesAreInHundredthsOfASecond) {
  EXPECT_EQ(age_of(0), 0);
  EXPECT_EQ(age_of(10 * kMs - 1), 0);
  EXPECT_EQ(age_of(2500 * kMs), 250);
  EXPECT_EQ(age_of(10 * kMs * 0xfffe), 0xfffe);
  EXPECT_EQ(age_of(UINT64_MAX), 0xfffe);  // and not unknown
}

TEST(Beat, OfAnotherSecretJobOrEpochIsAStrangers) {
  const std::string bytes = encode(beat_of(1, 2), kKey);
  Terms secret = kTerms, job = kTerms, epoch = kTerms, version = kTerms;
  secret.secret += "x", job.job += "x", ++epoch.epoch, version.version += "x";
  EXPECT_TRUE(parse_beat(bytes, beat_key(version)));  // versions differ nowhere once the ranks have met
  for (const Terms& other : {secret, job, epoch}) EXPECT_FALSE(parse_beat(bytes, beat_key(other)));
  // The name alone may be known to all.
  BeatKey forged = beat_key(secret);
  forged.name = kKey.name;
  EXPECT_FALSE(parse_beat(encode(beat_of(1, 2), forged), kKey));
  Terms none = kTerms;
  none.secret = "";
  EXPECT_THROW(beat_key(none), Error);
}

TEST(Beat, EveryBitCountsAndSoDoesTheLength) {
  for (const Beat& beat : {Beat{1, 2, {3, 4}, false, Code::ok, ""}, last_beat_of(1, 2)}) {
    const std::string bytes = encode(beat, kKey);
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      std::string changed = bytes;
      changed[bit / 8] ^= char(1 << bit % 8);
      EXPECT_FALSE(parse_beat(changed, kKey)) << bit;
    }
    for (size_t n = 0; n < bytes.size(); ++n) EXPECT_FALSE(parse_beat(bytes.substr(0, n), kKey)) << n;
    EXPECT_FALSE(parse_beat(bytes + '\0', kKey));
  }
}

TEST(Beat, ValuesOutOfRangeAreRefusedWhoeverSignedThem) {
  Beat good = last_beat_of(0, 1);
  EXPECT_TRUE(parse_beat(encode(good, kKey), kKey));
  for (Code code : {Code::pending, Code(8), Code(-1)}) {
    Beat beat = good;
    beat.code = code;
    EXPECT_FALSE(parse_beat(encode(beat, kKey), kKey)) << int(code);
  }
  EXPECT_FALSE(parse_beat(encode(beat_of(-1, 1), kKey), kKey));
}

TEST(PulseWay, UpToNineHostsEveryoneHearsEveryone) {
  EXPECT_EQ(listeners_of(0, 1), Hosts());
  EXPECT_EQ(listeners_of(1, 2), Hosts{0});
  EXPECT_EQ(listeners_of(2, 4), (Hosts{3, 0, 1}));
  EXPECT_EQ(listeners_of(8, 9).size(), 8u);
}

TEST(PulseWay, BeyondThatAHostIsHeardAtPowersOfTwo) {
  EXPECT_EQ(listeners_of(0, 10), (Hosts{1, 2, 4, 8}));
  EXPECT_EQ(listeners_of(9, 10), (Hosts{0, 1, 3, 7}));
  EXPECT_EQ(heard_by(0, 10), (Hosts{9, 8, 6, 2}));
  EXPECT_EQ(listeners_of(5, 1000).size(), 10u);
}

TEST(PulseWay, HearingIsTheInverseOfBeingHeard) {
  for (int hosts = 1; hosts <= 40; ++hosts)
    for (int host = 0; host < hosts; ++host) {
      const Hosts to = listeners_of(host, hosts);
      EXPECT_EQ(std::set<int>(to.begin(), to.end()).size(), to.size());
      EXPECT_EQ(std::count(to.begin(), to.end(), host), 0);
      for (int other = 0; other < hosts; ++other) {
        const Hosts from = heard_by(other, hosts);
        EXPECT_EQ(std::count(to.begin(), to.end(), other), std::count(from.begin(), from.end(), host));
      }
    }
}

// Calls as an engine does: every 250 ms, from one time to another; both ends included. What is lost on the way.
Hosts lost_between(Pulse& pulse, uint64_t from_ms, uint64_t to_ms) {
  Hosts all;
  for (uint64_t ms = from_ms; ms <= to_ms; ms += 250)
    for (int host : pulse.lost(ms * kMs)) all.push_back(host);
  return all;
}

TEST(Pulse, AHostThatFallsSilentIsLostAfterFourSecondsAndOnce) {
  Pulse pulse(3, 0, 0);
  EXPECT_TRUE(pulse.heard(beat_of(1, 1), 100 * kMs));
  EXPECT_TRUE(pulse.heard(beat_of(2, 1), 100 * kMs));
  EXPECT_EQ(lost_between(pulse, 250, 3000), Hosts());
  EXPECT_TRUE(pulse.heard(beat_of(2, 2), 3100 * kMs));
  EXPECT_EQ(lost_between(pulse, 3250, 4000), Hosts());
  EXPECT_EQ(pulse.lost(4100 * kMs - 1), Hosts());
  EXPECT_EQ(pulse.lost(4100 * kMs), Hosts{1});
  EXPECT_EQ(lost_between(pulse, 4250, 7000), Hosts());
  EXPECT_EQ(lost_between(pulse, 7100, 7100), Hosts{2});
  EXPECT_EQ(lost_between(pulse, 7250, 20000), Hosts());
}

TEST(Pulse, AHostThatGoesOnBeatingIsNotLost) {
  Pulse pulse(2, 0, 0);
  for (uint64_t ms = 0; ms < 60'000; ms += 3750) {  // as with fourteen of fifteen beats lost
    EXPECT_TRUE(pulse.heard(beat_of(1, ms + 1), ms * kMs));
    EXPECT_EQ(lost_between(pulse, ms, ms + 3750), Hosts());
  }
}

TEST(Pulse, EchoesAndLateOnesKeepNobodyAlive) {
  Pulse pulse(2, 0, 0);
  EXPECT_TRUE(pulse.heard(beat_of(1, 5), 0));
  EXPECT_EQ(lost_between(pulse, 250, 3750), Hosts());
  EXPECT_FALSE(pulse.heard(beat_of(1, 5), 3800 * kMs));
  EXPECT_FALSE(pulse.heard(beat_of(1, 4), 3800 * kMs));
  EXPECT_EQ(lost_between(pulse, 4000, 4000), Hosts{1});
}

TEST(Pulse, OwnBeatsAndThoseOfNoHostAreNoNews) {
  Pulse pulse(2, 0, 0);
  EXPECT_FALSE(pulse.heard(beat_of(0, 5), 0));
  EXPECT_FALSE(pulse.heard(beat_of(2, 5), 0));
  EXPECT_FALSE(pulse.heard(beat_of(-1, 5), 0));
}

TEST(Pulse, WhoWasNeverHeardIsToldApartFromWhoWasLost) {
  const uint64_t start = 77 * kSecond;
  Pulse pulse(3, 2, start);
  pulse.heard(beat_of(1, 1), start + 3 * kSecond);
  Hosts never;
  for (uint64_t ms = 250; ms < 4000; ms += 250)
    for (int host : pulse.never_heard(start + ms * kMs)) never.push_back(host);
  EXPECT_EQ(never, Hosts());
  EXPECT_EQ(pulse.never_heard(start + 4 * kSecond), Hosts{0});
  EXPECT_EQ(pulse.lost(start + 4 * kSecond), Hosts());
  EXPECT_EQ(pulse.never_heard(start + 5 * kSecond), Hosts());
  // It comes after all, and then falls silent.
  EXPECT_TRUE(pulse.heard(beat_of(0, 1), start + 5 * kSecond));
  pulse.heard(beat_of(1, 2), start + 5 * kSecond);
  EXPECT_EQ(lost_between(pulse, 82'250, 85'750), Hosts());
  pulse.heard(beat_of(1, 3), start + 8750 * kMs);
  EXPECT_EQ(lost_between(pulse, 86'000, 86'000), Hosts{0});
  EXPECT_EQ(pulse.never_heard(start + 10 * kSecond), Hosts());
}

TEST(Pulse, AHostThatSaidItIsOverIsNotMissed) {
  Pulse pulse(3, 0, 0);
  pulse.heard(beat_of(1, 1), 0);
  EXPECT_TRUE(pulse.heard(last_beat_of(1, 2), 0));
  EXPECT_TRUE(pulse.heard(last_beat_of(2, 1), 0));
  EXPECT_EQ(lost_between(pulse, 250, 20'000), Hosts());
  EXPECT_EQ(pulse.never_heard(20 * kSecond), Hosts());
  // One of its ranks goes on, and is missed when it ceases.
  EXPECT_TRUE(pulse.heard(beat_of(1, 3), 20 * kSecond));
  EXPECT_EQ(lost_between(pulse, 20'250, 24'000), Hosts{1});
}

TEST(Pulse, OfManyHostsOnlyThoseItHearsAreMissed) {
  Pulse pulse(16, 0, 0);
  EXPECT_TRUE(pulse.heard(beat_of(3, 1), 0));  // tells something in passing, and beats for others
  EXPECT_TRUE(pulse.heard(beat_of(15, 1), 0));
  EXPECT_EQ(lost_between(pulse, 250, 10'000), Hosts{15});
  EXPECT_EQ(pulse.never_heard(10 * kSecond), (Hosts{8, 12, 14}));
}

TEST(Pulse, WhoWasStoppedItselfDeclaresNobodyLostAtOnce) {
  Pulse pulse(3, 0, 0);
  pulse.heard(beat_of(1, 1), 0);
  EXPECT_EQ(lost_between(pulse, 250, 1000), Hosts());
  // Stopped for ten minutes. One second of them counts: host 1 has two more to be heard, host 2 likewise.
  const uint64_t woke = 601'000;
  EXPECT_EQ(pulse.lost(woke * kMs), Hosts());
  EXPECT_EQ(pulse.never_heard(woke * kMs), Hosts());
  EXPECT_EQ(lost_between(pulse, woke + 250, woke + 1750), Hosts());
  EXPECT_EQ(pulse.never_heard((woke + 1750) * kMs), Hosts());
  EXPECT_EQ(pulse.lost((woke + 2000) * kMs), Hosts{1});
  EXPECT_EQ(pulse.never_heard((woke + 2000) * kMs), Hosts{2});
}

TEST(Pulse, WhatWaitedWhileItWasStoppedCountsAsHeardNow) {
  Pulse pulse(2, 0, 0);
  pulse.heard(beat_of(1, 1), 0);
  EXPECT_EQ(pulse.lost(250 * kMs), Hosts());
  for (uint64_t sequence = 2; sequence < 20; ++sequence) EXPECT_TRUE(pulse.heard(beat_of(1, sequence), 600 * kSecond));
  EXPECT_EQ(lost_between(pulse, 600'000, 603'750), Hosts());
  EXPECT_EQ(lost_between(pulse, 604'000, 604'000), Hosts{1});
}

TEST(Pulse, OneThatIsAlwaysLateStillFindsOut) {
  Pulse pulse(2, 0, 0);
  pulse.heard(beat_of(1, 1), 0);
  for (uint64_t s = 10; s < 40; s += 10) EXPECT_EQ(pulse.lost(s * kSecond), Hosts()) << s;
  EXPECT_EQ(pulse.lost(40 * kSecond), Hosts{1});
}

TEST(Pulse, ATimeBeforeTheLastOneDoesNoHarm) {
  Pulse pulse(2, 0, 10 * kSecond);
  EXPECT_EQ(pulse.lost(11 * kSecond), Hosts());
  EXPECT_TRUE(pulse.heard({1, 1, {7}, false, Code::ok, ""}, 11'500 * kMs));
  EXPECT_EQ(pulse.lost(9 * kSecond), Hosts());
  EXPECT_EQ(pulse.awake_ns_ago(1, 0, 9 * kSecond), 70 * kMs);
  for (int i = 0; i < 10; ++i) {  // the same second does not count again
    EXPECT_EQ(pulse.lost(11 * kSecond), Hosts());
    EXPECT_EQ(pulse.lost(12 * kSecond), Hosts());
  }
}

TEST(Pulse, WhetherAllWereHeard) {
  Pulse pulse(3, 0, 0);
  pulse.heard(beat_of(1, 1), 0);
  EXPECT_FALSE(pulse.all_heard());
  pulse.heard(last_beat_of(2, 1), 0);
  EXPECT_TRUE(pulse.all_heard());
}

TEST(Pulse, WhoWasHeardSince) {
  Pulse pulse(3, 0, 0);
  EXPECT_FALSE(pulse.heard_since(1, 0));
  pulse.heard(beat_of(1, 1), 5 * kSecond);
  EXPECT_TRUE(pulse.heard_since(1, 5 * kSecond - 1));
  EXPECT_FALSE(pulse.heard_since(1, 5 * kSecond));
  pulse.heard(last_beat_of(1, 2), 6 * kSecond);
  EXPECT_FALSE(pulse.heard_since(1, 0)) << "it has ended";
}

TEST(Pulse, WhenARankLookedAround) {
  Pulse pulse(3, 0, 0);
  EXPECT_EQ(pulse.awake_ns_ago(1, 0, 0), std::nullopt);  // not heard yet
  pulse.heard({1, 1, {0, 150, kUnknownAge}, false, Code::ok, ""}, 100 * kMs);
  EXPECT_EQ(pulse.awake_ns_ago(1, 0, 300 * kMs), 200 * kMs);
  EXPECT_EQ(pulse.awake_ns_ago(1, 1, 300 * kMs), 1700 * kMs);
  for (auto [host, local] : {std::pair{1, 2}, {1, 3}, {1, -1}, {2, 0}, {0, 0}, {3, 0}, {-1, 0}})
    EXPECT_EQ(pulse.awake_ns_ago(host, local, 300 * kMs), std::nullopt) << host << " " << local;
  pulse.heard({1, 2, {40}, false, Code::ok, ""}, 300 * kMs);
  EXPECT_EQ(pulse.awake_ns_ago(1, 0, 300 * kMs), 400 * kMs);
  EXPECT_EQ(pulse.awake_ns_ago(1, 1, 300 * kMs), std::nullopt);
  // Own sleep is no proof of another's: of ten minutes one second counts.
  EXPECT_EQ(pulse.awake_ns_ago(1, 0, 600 * kSecond), 400 * kMs + kSecond - 300 * kMs);
}

TEST(PulseTurn, TheFirstRankBeatsAndTheNextStepIn) {
  const uint64_t last = 100 * kSecond;
  for (auto [local, ms] : {std::pair{0, 250}, {1, 500}, {2, 750}, {7, 2000}, {8, 2000}, {500, 2000}}) {
    EXPECT_FALSE(beat_is_due(last + uint64_t(ms) * kMs - 1, last, local)) << local;
    EXPECT_TRUE(beat_is_due(last + uint64_t(ms) * kMs, last, local)) << local;
  }
  EXPECT_FALSE(beat_is_due(last - kSecond, last, 0));  // another rank read the clock later
  EXPECT_TRUE(beat_is_due(last, 0, 0));                // none has gone out yet
}

}  // namespace
}  // namespace lightcc
