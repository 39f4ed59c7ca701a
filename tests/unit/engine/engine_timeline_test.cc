// What the engine tells its timeline. Ranks are threads; the file is rank 0's unless said otherwise.
#include <unistd.h>

#include <filesystem>

#include "labels.h"
#include "unit/ranks.h"
#include "unit/timeline_file.h"

LABEL(as_placed);

namespace lightcc::test {
namespace {

using Lines = std::vector<std::string>;

class EngineTimeline : public testing::Test {
 protected:
  EngineTimeline() {
    char name[] = "/tmp/engine_timeline_test.XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~EngineTimeline() override { std::filesystem::remove_all(folder_); }
  void start(Engine& engine, const std::string& name = "t.json") const {
    engine.timeline().start({folder_ + "/" + name, "a test", true, now_ns(), 0});
  }
  TimelineText stop(Engine& engine, const std::string& name = "t.json") const {
    engine.timeline().stop(now_ns());
    return file(name);
  }
  TimelineText file(const std::string& name = "t.json") const {
    TimelineText file(folder_ + "/" + name);
    file.expect_complete();
    file.expect_nested();
    return file;
  }

 private:
  std::string folder_;
};

// The ticks of a row, sorted, and what is left without them.
Lines ticks(Lines& events) {
  Lines ticks;
  for (auto& event : events)
    if (event.starts_with("X ")) ticks.push_back(event.substr(2));
  std::erase_if(events, [](auto& event) { return event.starts_with("X "); });
  std::sort(ticks.begin(), ticks.end());
  return ticks;
}

TEST_F(EngineTimeline, ShowsWhoWasReadyAndWhatWasDone) {
  Ranks ranks(3);
  start(ranks[0]);
  ranks.each([](Engine& engine, int) {
    std::vector<float> x(100, 1), y(50, 1);
    done(engine, request(engine, Kind::allreduce, "two", {in_place(x), in_place(y)}));  // copied together
    done(engine, request(engine, Kind::allreduce, "one", {in_place(x)}));
    done(engine, request(engine, Kind::broadcast, "b", {in_place(x)}));
    done(engine, request(engine, Kind::barrier, "", {}));
  });
  const TimelineText file = stop(ranks[0]);
  Lines two = file.row("allreduce.two"), one = file.row("allreduce.one"), b = file.row("broadcast.b"),
        barrier = file.row("barrier.noname.0");
  for (Lines* row : {&two, &one, &b, &barrier}) {
    ASSERT_GE(row->size(), 5u);
    EXPECT_TRUE((*row)[0].starts_with("B NEGOTIATE_"));
    EXPECT_TRUE((*row)[4].starts_with("E NEGOTIATE_")) << "the ticks lie in the negotiation";
    EXPECT_EQ(ticks(*row), (Lines{"0", "1", "2"}));
  }
  EXPECT_EQ(two, (Lines{"B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "B MEMCPY_IN_FUSION_BUFFER",
                        "E MEMCPY_IN_FUSION_BUFFER", "B shared", "E shared", "B MEMCPY_OUT_FUSION_BUFFER",
                        "E MEMCPY_OUT_FUSION_BUFFER", "E ALLREDUCE"}));
  EXPECT_EQ(one, (Lines{"B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "B shared", "E shared",
                        "E ALLREDUCE"}));
  EXPECT_EQ(b, (Lines{"B NEGOTIATE_BROADCAST", "E NEGOTIATE_BROADCAST", "B BROADCAST", "B shared", "E shared",
                      "E BROADCAST"}));
  EXPECT_EQ(barrier, (Lines{"B NEGOTIATE_BARRIER", "E NEGOTIATE_BARRIER", "B BARRIER", "E BARRIER"}));
  EXPECT_EQ(file.count("CYCLE_START"), 4u);
  EXPECT_EQ(file.count(R"("args":{"dtype":"float32, float32","shape":"[100], [50]","bytes":600,"op":"sum",)"
                       R"("fused_requests":1})"),
            1u);
  EXPECT_EQ(file.count(R"("status":"ok")"), 4u);
}

TEST_F(EngineTimeline, ARequestThatIsRememberedShowsTheSame) {
  constexpr int kRounds = 20;
  Ranks ranks(2);
  start(ranks[0]);
  ranks.each([](Engine& engine, int) {
    std::vector<float> x(100, 1);
    for (int i = 0; i < kRounds; ++i) done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
  });
  Lines row = stop(ranks[0]).row("allreduce.x");
  EXPECT_EQ(row.size(), size_t(kRounds) * 8);
  EXPECT_EQ(ticks(row).size(), size_t(kRounds) * 2);
}

TEST_F(EngineTimeline, NamesTheWayThatTheSelectorChose) {
  Config config;
  config.select = "allreduce=ring";
  Ranks ranks(2, config);
  start(ranks[1]);  // no coordinator: it sees no ticks
  ranks.each([](Engine& engine, int) {
    std::vector<float> x(100, 1);
    done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
  });
  EXPECT_EQ(stop(ranks[1]).row("allreduce.x"), (Lines{"B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE",
                                                      "B links/ring", "E links/ring", "E ALLREDUCE"}));
}

TEST_F(EngineTimeline, ProcessSetsHaveRowsOfTheirOwnAndTicksAreWorldRanks) {
  Ranks ranks(3);
  start(ranks[1]);
  ranks.each([](Engine& engine, int rank) {
    const int group = add_group(engine, {1, 2});
    std::vector<float> x(100, 1);
    done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
    if (rank > 0) done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}, group));
  });
  const TimelineText file = stop(ranks[1]);
  Lines world = file.row("allreduce.x"), set = file.row("allreduce.x (process set 1)");
  EXPECT_EQ(ticks(world), Lines{});
  EXPECT_EQ(ticks(set), (Lines{"1", "2"}));
  EXPECT_EQ(set, world);
  EXPECT_EQ(file.row("add_process_set.noname.0").size(), 4u);
}

TEST_F(EngineTimeline, ADisagreementEndsTheNegotiationWithItsText) {
  Ranks ranks(2);
  start(ranks[0]);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(size_t(rank) + 1, 1);
    EXPECT_EQ(run(engine, request(engine, Kind::allreduce, "x", {in_place(x)})), Code::mismatch);
  });
  const TimelineText file = stop(ranks[0]);
  Lines row = file.row("allreduce.x");
  EXPECT_EQ(ticks(row), (Lines{"0", "1"}));
  EXPECT_EQ(row, (Lines{"B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE"}));
  EXPECT_EQ(file.count(R"("status":"mismatch","error":"allreduce of tensor 'x': ranks disagree on shape)"), 1u);
}

TEST_F(EngineTimeline, ShutdownCompletesTheFileAndSaysWhatDidNotFinish) {
  Ranks ranks(2);
  start(ranks[0]);
  std::vector<float> x(100, 1);
  auto alone = request(ranks[0], Kind::allreduce, "alone", {in_place(x)});
  ranks[0].submit(alone, false);
  ranks[0].shutdown();
  EXPECT_EQ(alone->code, Code::shut_down);
  const TimelineText file = this->file();
  Lines row = file.row("allreduce.alone");
  EXPECT_EQ(ticks(row), Lines{"0"});
  EXPECT_EQ(row, (Lines{"B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE"}));
  EXPECT_EQ(file.count(R"("status":"shut_down")"), 1u);
}

TEST_F(EngineTimeline, MayStartAndStopWhileRequestsFly) {
  constexpr int kTimelines = 8;
  Ranks ranks(2);
  std::atomic<bool> stopped{false}, flying{false};
  std::thread watcher([&] {
    for (const uint64_t end = now_ns() + kPatienceNs; !flying && now_ns() < end;) std::this_thread::yield();
    for (int i = 0; i < kTimelines; ++i) {
      start(ranks[0], std::to_string(i));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      stop(ranks[0], std::to_string(i));
    }
    stopped = true;
  });
  ranks.each([&](Engine& engine, int) {
    std::vector<std::vector<float>> x(4, std::vector<float>(1000, 1));
    for (int64_t more = 1; more;) {
      std::vector<RequestPtr> all;
      for (size_t i = 0; i < x.size(); ++i)
        all.push_back(request(engine, Kind::allreduce, "x" + std::to_string(i), {in_place(x[i])}));
      for (auto& one : all) engine.submit(one, false);
      for (auto& one : all) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
      flying = true;
      int64_t go_on = stopped ? 0 : 1;  // rank 0's view holds
      done(engine, request(engine, Kind::broadcast, "more", {in_place(&go_on, 1)}));
      more = go_on;
    }
  });
  watcher.join();
  size_t begun = 0;
  for (int i = 0; i < kTimelines; ++i) begun += file(std::to_string(i)).count(R"("ph":"B")");
  EXPECT_GT(begun, 0u);
}

}  // namespace
}  // namespace lightcc::test
