// What callers hand to an engine, by script: this is handed in, expect exactly that.
#include "engine/request/inbox.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr bool kHandle = true, kNoHandle = false;

// name "": an automatic one.
RequestPtr request(const std::string& name, int group = 0, Kind kind = Kind::allreduce) {
  auto one = std::make_shared<Request>();
  one->group = group;
  one->what.kind = kind;
  one->what.tensors = {{DType::float32, {4}}};
  one->automatic = name.empty();
  if (!name.empty()) one->key = key_of(kind, name);
  one->submitted_ns = now_ns();
  return one;
}
std::string key_after_add(Inbox& inbox, int group, Kind kind) {
  const RequestPtr one = request("", group, kind);
  inbox.add(one, kNoHandle);
  return one->key;
}
// Of what the inbox holds: requests by their keys, refusals as "position:key why".
std::string line_of(const Inbox::Contents& contents) {
  std::string line;
  for (const RequestPtr& one : contents.requests) line += (line.empty() ? "" : " ") + one->key;
  for (const auto& one : contents.refusals)
    line += (line.empty() ? "" : " ") + std::to_string(one.position) + ":" + one.key + " " + one.why;
  return line;
}
// What add() throws: "5 text"; "" if it takes the request.
std::string refusal_of(Inbox& inbox, const RequestPtr& one) {
  try {
    inbox.add(one, kNoHandle);
    return "";
  } catch (const Error& error) {
    return std::to_string(int(error.code())) + " " + error.what();
  }
}

TEST(Inbox, GivesOutEachRequestOnceInOrder) {
  Inbox inbox(0);
  EXPECT_FALSE(inbox.full());
  EXPECT_EQ(inbox.add(request("a"), kHandle), 1);
  EXPECT_EQ(inbox.add(request("b"), kNoHandle), 2);
  EXPECT_TRUE(inbox.full());
  EXPECT_EQ(line_of(inbox.take()), "allreduce.a allreduce.b");
  EXPECT_FALSE(inbox.full());
  EXPECT_EQ(line_of(inbox.take()), "");
}

TEST(Inbox, CountsARequestUntilItHasFinished) {
  Inbox inbox(0);
  inbox.add(request("a"), kNoHandle);
  EXPECT_EQ(inbox.in_flight(), 1);
  inbox.take();
  EXPECT_EQ(inbox.in_flight(), 1) << "taken, but not finished";
  const RequestPtr adopted = request("b");
  inbox.adopt(*adopted);
  EXPECT_EQ(inbox.in_flight(), 2) << "from the fast path";
  EXPECT_EQ(inbox.add(request("b"), kNoHandle), 0) << "its name is in use";
  EXPECT_EQ(inbox.in_flight(), 2);
  inbox.finished();
  inbox.finished();
  EXPECT_EQ(inbox.in_flight(), 0);
  EXPECT_FALSE(inbox.full()) << "an adopted request is taken by nobody, one that was not added neither";
}

TEST(Inbox, TellsBehindWhichRequestsARefusalCame) {
  Inbox inbox(0);
  EXPECT_TRUE(inbox.add_refusal(*request("x"), "bad shape"));
  EXPECT_TRUE(inbox.full());
  inbox.add(request("a"), kNoHandle);
  inbox.add(request("b"), kNoHandle);
  inbox.add_refusal(*request("y"), "bad root");
  EXPECT_EQ(line_of(inbox.take()), "allreduce.a allreduce.b 0:allreduce.x bad shape 2:allreduce.y bad root");
  inbox.add_refusal(*request("z"), "again");
  EXPECT_EQ(line_of(inbox.take()), "0:allreduce.z again");
}

// ---- names

TEST(Inbox, ANameIsInUseUntilItsRequestReleasesIt) {
  Inbox inbox(0);
  const RequestPtr first = request("a");
  inbox.add(first, kNoHandle);
  EXPECT_EQ(inbox.add(request("a"), kNoHandle), Inbox::kInUse);
  std::thread([&] { EXPECT_EQ(inbox.add(request("a"), kNoHandle), Inbox::kContended); }).join();
  EXPECT_EQ(inbox.add(request("a", 1), kNoHandle), 2) << "in another process set it is another name";
  EXPECT_EQ(inbox.add(request("a", 0, Kind::broadcast), kNoHandle), 3) << "and so in another kind";
  EXPECT_FALSE(inbox.release_name(*first));
  EXPECT_EQ(inbox.add(request("a"), kNoHandle), 4);
}

TEST(Inbox, ANameWithAHandleIsHeldUntilItIsGivenBack) {
  Inbox inbox(0);
  const RequestPtr first = request("a");
  first->submitted_ns += 1'000'000'000'000;  // so long is no test delayed: the time to hold it has not passed
  inbox.add(first, kHandle);
  EXPECT_FALSE(inbox.is_held(0, Kind::allreduce, "a")) << "it is in flight";
  EXPECT_TRUE(inbox.release_name(*first));
  EXPECT_TRUE(inbox.is_held(0, Kind::allreduce, "a"));
  EXPECT_FALSE(inbox.is_held(0, Kind::broadcast, "a"));
  EXPECT_FALSE(inbox.is_held(1, Kind::allreduce, "a"));
  inbox.give_back(*first);
  EXPECT_FALSE(inbox.is_held(0, Kind::allreduce, "a"));
}

TEST(Inbox, NumbersAutomaticNamesByProcessSetAndKind) {
  Inbox inbox(0);
  EXPECT_EQ(key_after_add(inbox, 0, Kind::allreduce), key_of(Kind::allreduce, automatic_name(0)));
  EXPECT_EQ(inbox.draw_number(0, Kind::allreduce), 1u) << "one sequence with the fast path";
  EXPECT_EQ(key_after_add(inbox, 0, Kind::allreduce), key_of(Kind::allreduce, automatic_name(2)));
  EXPECT_EQ(key_after_add(inbox, 0, Kind::allgather), key_of(Kind::allgather, automatic_name(0)));
  EXPECT_EQ(key_after_add(inbox, 3, Kind::allreduce), key_of(Kind::allreduce, automatic_name(0)));
  inbox.forget_group(3);
  EXPECT_EQ(inbox.draw_number(3, Kind::allreduce), 0u) << "a new process set has this id";
  EXPECT_EQ(inbox.draw_number(0, Kind::allreduce), 3u) << "the others' are kept";
}

TEST(Inbox, NumbersGoOnBehindThoseThatOthersHaveUsed) {
  Inbox inbox(0);
  inbox.skip_name(0, key_of(Kind::allreduce, automatic_name(5)));
  inbox.skip_name(0, key_of(Kind::allreduce, automatic_name(2)));
  inbox.skip_name(0, key_of(Kind::allreduce, "a name of the user's"));
  EXPECT_EQ(inbox.draw_number(0, Kind::allreduce), 6u);
  EXPECT_EQ(inbox.draw_number(0, Kind::allgather), 0u);
  EXPECT_EQ(inbox.draw_number(1, Kind::allreduce), 0u);
}

// ---- when nothing may begin

TEST(Inbox, TakesNothingBesideAJoinUntilItEnds) {
  for (bool all_have_joined : {true, false}) {
    Inbox inbox(3);
    inbox.draw_number(0, Kind::allreduce);
    EXPECT_EQ(refusal_of(inbox, request("", 0, Kind::join)), "");
    EXPECT_EQ(refusal_of(inbox, request("")),
              "2 allreduce of an unnamed tensor: rank 3 has called join() and takes part in nothing new until it "
              "returns");
    inbox.end_join(all_have_joined);
    EXPECT_EQ(inbox.draw_number(0, Kind::allreduce), all_have_joined ? 0u : 1u)
        << "a refused request uses up no number; when all have joined, all begin anew";
    EXPECT_EQ(refusal_of(inbox, request("a")), "");
  }
}

TEST(Inbox, TakesNothingAfterTheEpochHasFailed) {
  Inbox inbox(0);
  EXPECT_EQ(inbox.failure(), "");
  inbox.add(request("a"), kNoHandle);
  inbox.fail({Code::peer_lost, "rank 1 died"});
  EXPECT_EQ(inbox.failure(), "rank 1 died");
  EXPECT_EQ(refusal_of(inbox, request("b")), "4 allreduce of tensor 'b': rank 1 died");
  EXPECT_FALSE(inbox.add_refusal(*request("c"), "bad shape"));
  EXPECT_EQ(line_of(inbox.take()), "allreduce.a") << "what came before is the engine's to fail";
  EXPECT_TRUE(inbox.close());
  EXPECT_EQ(refusal_of(inbox, request("b")), "4 allreduce of tensor 'b': rank 1 died") << "the first cause";
}

TEST(Inbox, TakesNothingAfterItWasClosed) {
  Inbox inbox(0);
  EXPECT_TRUE(inbox.close());
  EXPECT_FALSE(inbox.close()) << "the second time";
  EXPECT_EQ(refusal_of(inbox, request("b")), "5 allreduce of tensor 'b': lightcc has been shut down");
  EXPECT_FALSE(inbox.add_refusal(*request("c"), "bad shape"));
  EXPECT_FALSE(inbox.full());
  EXPECT_EQ(inbox.in_flight(), 0);
}

// ---- threads

TEST(Inbox, LosesNothingOfManyThreadsAndCountsItBeforeItIsTaken) {
  constexpr int kThreads = 4, kEach = 500;
  Inbox inbox(0);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) inbox.add(request(""), kNoHandle);
    });
  std::set<std::string> keys;
  const uint64_t deadline = now_ns() + 20'000'000'000;
  while (keys.size() < kThreads * kEach && now_ns() < deadline) {
    const Inbox::Contents contents = inbox.take();
    EXPECT_GE(inbox.in_flight(), int(contents.requests.size()));
    for (const RequestPtr& one : contents.requests) {
      EXPECT_TRUE(keys.insert(one->key).second) << one->key << " twice";
      inbox.finished();
    }
    if (contents.requests.empty()) std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(keys.size(), size_t(kThreads * kEach));
  EXPECT_EQ(inbox.in_flight(), 0);
}

}  // namespace
}  // namespace lightcc
