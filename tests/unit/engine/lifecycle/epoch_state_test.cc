// The life of an epoch by script: in this phase that happens, expect exactly this.
#include "engine/lifecycle/epoch_state.h"

#include <gtest/gtest.h>

#include <random>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using namespace epoch_event;
using Phase = EpochState::Phase;

constexpr uint64_t kNow = 100'000'000'000;
const std::string kOwnName = "rank 0 (a thread)", kPeer = "rank 1 (a thread)";
const EpochCause kPeace{Code::shut_down, "rank 2 was interrupted"}, kFault{Code::timeout, "stalled"};

EpochState running() {
  EpochState state;
  state.rank_name = kOwnName;
  return state;
}
// Since this moment, for a peer's sake that has told everybody.
EpochState draining() { return transition(running(), EndedElsewhere{kPeace}, kNow).state; }
EpochState failed() { return transition(running(), OwnFailure{kFault}, kNow).state; }
EpochState closed() { return transition(running(), ShutDown{"done", false}, kNow).state; }
EpochState in(Phase phase) {
  switch (phase) {
    case Phase::running: return running();
    case Phase::draining: return draining();
    case Phase::failed: return failed();
    case Phase::closed: return closed();
  }
  return {};
}

std::string name_of(Phase phase) {
  const char* names[] = {"running", "draining", "failed", "closed"};
  return names[int(phase)];
}
// As a line of text, all that is not as in the beginning: "failed 'rank 1 died' (4), told".
std::string line_of(const EpochState& state) {
  std::string line = name_of(state.phase);
  if (!state.cause.text.empty()) line += " '" + state.cause.text + "' (" + std::to_string(int(state.cause.code)) + ")";
  if (state.draining_since_ns > 0) {
    line += " since " + std::to_string((state.draining_since_ns - kNow) / 1'000'000) + " ms";
    line += " moved " + std::to_string((state.moved_ns - kNow) / 1'000'000) + " ms";
  }
  if (state.told_elsewhere) line += ", told";
  for (int rank : state.left) line += ", left " + std::to_string(rank);
  if (!state.first_left.empty()) line += ", first '" + state.first_left + "'";
  if (state.request_failed_by_leaving) line += ", hit";
  return line;
}
std::string name_of(EpochAction action) {
  const char* names[] = {"nothing", "end", "end_and_tell", "leave"};
  return names[int(action)];
}
std::string line_of(const EpochTransition& next) { return line_of(next.state) + " -> " + name_of(next.action); }

// ---- every phase with every event

struct Row {
  Phase phase;
  EpochEvent event;
  std::string expected;
};

const EpochEvent kDied = PeerDied{kPeer}, kLost = HostLost{4, {{3, "rank 3"}, {4, "rank 4"}}},
                 kLeft = PeerLeft{1, "rank 1 has left"}, kInPeace = EndedElsewhere{{Code::shut_down, "rank 4: enough"}},
                 kFailedElsewhere = EndedElsewhere{{Code::peer_lost, "rank 4 died"}},
                 kOwnFailure = OwnFailure{{Code::internal, "no memory"}}, kInterrupted = Interrupted{"Ctrl-C"},
                 kJoin = JoinFailed{{Code::shut_down, "rank 1 has left"}}, kRequest = RequestShutDown{},
                 kMoved = Stepped{true, true}, kIdle = Stepped{false, false}, kStopped = ShutDown{"bye", false},
                 kStoppedAtWork = ShutDown{"bye", true};

const std::string kRunning = "running";
const std::string kDraining = "draining 'rank 2 was interrupted' (5) since 0 ms moved 0 ms, told";
const std::string kDrained = "failed 'rank 2 was interrupted' (5) since 0 ms moved 0 ms, told -> end";
const std::string kFailed = "failed 'stalled' (6) -> nothing", kClosed = "closed -> nothing";
std::string from_draining(const std::string& cause) {
  return "failed " + cause + " since 0 ms moved 0 ms, told -> end";
}
const std::string kLostText = "'a host is lost, nothing was heard of it for 4 s: rank 3, rank 4' (4)";

const Row kRows[] = {
    {Phase::running, kDied, "failed 'rank 1 (a thread) died' (4) -> end_and_tell"},
    {Phase::running, kLost, "failed " + kLostText + " -> end_and_tell"},
    {Phase::running, kLeft, "running, left 1, first 'rank 1 has left' -> nothing"},
    {Phase::running, kInPeace, "draining 'rank 4: enough' (5) since 0 ms moved 0 ms, told -> nothing"},
    {Phase::running, kFailedElsewhere, "failed 'rank 4 died' (4), told -> end"},
    {Phase::running, kOwnFailure, "failed 'rank 0 (a thread): no memory' (7) -> end_and_tell"},
    {Phase::running, kInterrupted, "failed 'Ctrl-C' (5) -> end_and_tell"},
    {Phase::running, kJoin, "draining 'rank 1 has left' (5) since 0 ms moved 0 ms -> nothing"},
    {Phase::running, kRequest, "running -> nothing"},
    {Phase::running, kMoved, "running -> nothing"},
    {Phase::running, kIdle, "running -> nothing"},
    {Phase::running, kStopped, "closed -> leave"},
    {Phase::running, kStoppedAtWork, "failed 'bye, with work in flight' (5) -> end_and_tell"},

    {Phase::draining, kDied, from_draining("'rank 1 (a thread) died' (4)")},
    {Phase::draining, kLost, from_draining(kLostText)},
    {Phase::draining, kLeft, kDraining + ", left 1, first 'rank 1 has left' -> nothing"},
    {Phase::draining, kInPeace, kDraining + " -> nothing"},
    {Phase::draining, kFailedElsewhere, from_draining("'rank 4 died' (4)")},
    {Phase::draining, kOwnFailure, from_draining("'rank 0 (a thread): no memory' (7)")},
    {Phase::draining, kInterrupted, from_draining("'Ctrl-C' (5)")},
    {Phase::draining, kJoin, kDraining + " -> nothing"},
    {Phase::draining, kRequest, kDraining + " -> nothing"},
    {Phase::draining, kMoved, kDraining + " -> nothing"},
    {Phase::draining, kIdle, kDrained},
    {Phase::draining, kStopped, "closed 'rank 2 was interrupted' (5) since 0 ms moved 0 ms, told -> leave"},
    {Phase::draining, kStoppedAtWork, from_draining("'bye, with work in flight' (5)")},

    {Phase::failed, kDied, kFailed},
    {Phase::failed, kLost, kFailed},
    {Phase::failed, kLeft, kFailed},
    {Phase::failed, kInPeace, kFailed},
    {Phase::failed, kFailedElsewhere, kFailed},
    {Phase::failed, kOwnFailure, kFailed},
    {Phase::failed, kInterrupted, kFailed},
    {Phase::failed, kJoin, kFailed},
    {Phase::failed, kRequest, kFailed},
    {Phase::failed, kMoved, kFailed},
    {Phase::failed, kIdle, kFailed},
    {Phase::failed, kStopped, kFailed},
    {Phase::failed, kStoppedAtWork, kFailed},

    {Phase::closed, kDied, kClosed},
    {Phase::closed, kLost, kClosed},
    {Phase::closed, kLeft, kClosed},
    {Phase::closed, kInPeace, kClosed},
    {Phase::closed, kFailedElsewhere, kClosed},
    {Phase::closed, kOwnFailure, kClosed},
    {Phase::closed, kInterrupted, kClosed},
    {Phase::closed, kJoin, kClosed},
    {Phase::closed, kRequest, kClosed},
    {Phase::closed, kMoved, kClosed},
    {Phase::closed, kIdle, kClosed},
    {Phase::closed, kStopped, kClosed},
    {Phase::closed, kStoppedAtWork, kClosed},
};

TEST(EpochState, EveryRowOfTheTableHolds) {
  for (const Row& row : kRows)
    EXPECT_EQ(line_of(transition(in(row.phase), row.event, kNow)), row.expected)
        << name_of(row.phase) << ", event " << row.event.index();
}

TEST(EpochState, TheTableHasEveryPhaseWithEveryEvent) {
  std::set<std::pair<Phase, size_t>> pairs;
  for (const Row& row : kRows) pairs.emplace(row.phase, row.event.index());
  for (Phase phase : {Phase::running, Phase::draining, Phase::failed, Phase::closed})
    for (size_t event = 0; event < std::variant_size_v<EpochEvent>; ++event)
      EXPECT_TRUE(pairs.contains({phase, event})) << name_of(phase) << ", event " << event;
}

// ---- what several events make together

// The last of these transitions. Events are 1 ms apart.
EpochTransition after(EpochState state, const std::vector<EpochEvent>& events) {
  EpochTransition last{std::move(state), EpochAction::nothing};
  uint64_t now_ns = kNow;
  for (const EpochEvent& event : events) last = transition(std::move(last.state), event, now_ns += 1'000'000);
  return last;
}

TEST(EpochState, DrainsUntilNothingHasMovedForLong) {
  const EpochState first = draining();
  EXPECT_EQ(transition(first, Stepped{false, true}, kNow + kQuietNs).action, EpochAction::nothing);
  EXPECT_EQ(transition(first, Stepped{false, true}, kNow + kQuietNs + 1).action, EpochAction::end);
  const EpochState moved = transition(first, Stepped{true, true}, kNow + kQuietNs).state;
  EXPECT_EQ(transition(moved, Stepped{false, true}, kNow + 2 * kQuietNs).action, EpochAction::nothing);
  EXPECT_EQ(line_of(transition(moved, Stepped{false, true}, kNow + 2 * kQuietNs + 1)),
            "failed 'rank 2 was interrupted' (5) since 0 ms moved 50 ms, told -> end");
}

TEST(EpochState, DrainsForASecondAtMostHoweverMuchMoves) {
  EpochState state = draining();
  uint64_t now_ns = kNow;
  for (; now_ns < kNow + kLongestDrainNs; now_ns += kQuietNs)
    state = transition(std::move(state), Stepped{true, true}, now_ns).state;
  ASSERT_EQ(now_ns, kNow + kLongestDrainNs);
  EXPECT_EQ(transition(state, Stepped{true, true}, now_ns).action, EpochAction::nothing);
  EXPECT_EQ(transition(state, Stepped{true, true}, now_ns + 1).action, EpochAction::end);
}

TEST(EpochState, ASecondPeerThatEndsInPeaceDoesNotProlongDraining) {
  EpochState state = transition(draining(), kInPeace, kNow + kQuietNs).state;
  EXPECT_EQ(transition(state, Stepped{false, true}, kNow + kQuietNs + 1).action, EpochAction::end);
}

// This rank's own join() ends the epoch, so the others hear it from here, unless one of them has said it meanwhile.
TEST(EpochState, AFailedJoinIsToldUnlessTheOthersKnow) {
  EXPECT_EQ(line_of(after(running(), {kJoin, kIdle})),
            "failed 'rank 1 has left' (5) since 1 ms moved 1 ms -> end_and_tell");
  EXPECT_EQ(line_of(after(running(), {kJoin, kInPeace, kIdle})),
            "failed 'rank 1 has left' (5) since 1 ms moved 1 ms, told -> end");
}

TEST(EpochState, OfAHostOnlyRanksThatHaveNotLeftAreLost) {
  const EpochEvent left_3 = PeerLeft{3, "rank 3 has left"}, left_4 = PeerLeft{4, "rank 4 has left"};
  EXPECT_EQ(line_of(after(running(), {left_3, kLost})),
            "failed 'a host is lost, nothing was heard of it for 4 s: rank 4' (4), left 3, first 'rank 3 has left' -> "
            "end_and_tell");
  EXPECT_EQ(line_of(after(running(), {left_3, left_4, kLost})),
            "running, left 3, left 4, first 'rank 3 has left' -> nothing");
}

TEST(EpochState, OnlyAnInternalFailureWithoutARankGetsThisOnes) {
  for (const auto& [cause, text] : std::vector<std::pair<EpochCause, std::string>>{
           {{Code::internal, "mmap: no memory"}, kOwnName + ": mmap: no memory"},
           {{Code::internal, "rank 7: no memory"}, "rank 7: no memory"},
           {{Code::timeout, "stalled"}, "stalled"}})
    EXPECT_EQ(transition(running(), OwnFailure{cause}, kNow).state.cause.text, text);
}

// ---- what the others hear when this rank leaves

TEST(LeaveMessage, GivesTheReasonCutShort) {
  EXPECT_EQ(leave_message(running(), "it shut down"), kOwnName + " has left (it shut down)");
  EXPECT_EQ(leave_message(running(), std::string(5000, '!')), kOwnName + " has left (" + std::string(300, '!') + ")");
}

TEST(LeaveMessage, GivesTheFirstCauseOnceARequestHasFailedByIt) {
  const EpochEvent first = PeerLeft{1, "rank 1 has left (ValueError)"};
  const EpochEvent second = PeerLeft{2, "rank 2 has left (it shut down)"};
  EXPECT_EQ(leave_message(after(running(), {first, second}).state, "done"), kOwnName + " has left (done)")
      << "no request has failed";
  EXPECT_EQ(leave_message(after(running(), {kRequest, first}).state, "done"), kOwnName + " has left (done)")
      << "the request failed before";
  EXPECT_EQ(leave_message(after(running(), {first, second, kRequest}).state, "done"),
            kOwnName + " has left after rank 1 has left (ValueError)");
}

TEST(LeaveMessage, NamesThisRankAndTheFirstOfALongChain) {
  const EpochEvent third = PeerLeft{2, "rank 2 has left after rank 1 has left (ValueError)"};
  EXPECT_EQ(leave_message(after(running(), {third, kRequest}).state, "done"),
            kOwnName + " has left after rank 1 has left (ValueError)");
}

// ---- the invariants, whatever happens in whatever order

TEST(EpochState, EndsOnceAndForGoodWithItsFirstCauseWhateverHappens) {
  std::vector<EpochEvent> all = {Stepped{false, true}};
  for (const Row& row : kRows)
    if (row.phase == Phase::running) all.push_back(row.event);
  for (unsigned seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    EpochState state = running();
    int actions = 0;
    for (uint64_t i = 0, now_ns = kNow; i < 60; ++i, now_ns += random() % kQuietNs) {
      const EpochState before = state;
      auto [next, action] = transition(std::move(state), all[random() % all.size()], now_ns);
      state = std::move(next);
      EXPECT_GE(int(state.phase), int(before.phase));
      if (before.over()) {
        EXPECT_EQ(line_of(state), line_of(before));
      }
      EXPECT_EQ(action != EpochAction::nothing, state.over() && !before.over());
      EXPECT_EQ(action == EpochAction::leave, state.phase == Phase::closed && !before.over());
      if (action == EpochAction::end || action == EpochAction::end_and_tell) {
        EXPECT_EQ(action == EpochAction::end, state.told_elsewhere);
      }
      if (before.phase == Phase::draining && state.phase == Phase::draining) {
        EXPECT_EQ(state.cause.text, before.cause.text);
      }
      actions += action != EpochAction::nothing;
    }
    EXPECT_EQ(actions, 1);
  }
}

}  // namespace
}  // namespace lightcc
