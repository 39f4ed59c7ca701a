#include "engine/timeline/trace.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "unit/timeline_file.h"

namespace lightcc {
namespace {

using namespace std::chrono_literals;

class Trace : public testing::Test {
 protected:
  Trace() {
    char name[] = "/tmp/trace_test.XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~Trace() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name = "t.json") const { return folder_ + "/" + name; }
  Timeline::Start start(const std::string& name = "t.json") const {
    return {path(name), "rank 0 of 2 on host h", true, 1'000'000, 1'700'000'000'000'000};
  }
  test::TimelineText file(const std::string& name = "t.json") const { return test::TimelineText(path(name)); }

 private:
  std::string folder_;
};

TEST(TimelinePath, OneFileOrOneForEachRank) {
  EXPECT_EQ(timeline_path("/tmp/t.json", 0), "/tmp/t.json");
  EXPECT_EQ(timeline_path("/tmp/t.json", 1), "");
  EXPECT_EQ(timeline_path("/tmp/{rank}/t{rank}.json", 0), "/tmp/0/t0.json");
  EXPECT_EQ(timeline_path("/tmp/{rank}/t{rank}.json", 12), "/tmp/12/t12.json");
}

TEST_F(Trace, WritesPhasesActivitiesTicksAndMarks) {
  Timeline timeline;
  timeline.start(start());
  timeline.tick("w", "NEGOTIATE", "1", 1'002'003);
  timeline.phase("w", "NEGOTIATE", 1'002'000);  // it is in that phase; and time does not go back
  timeline.tick("w", "NEGOTIATE", "0", 1'003'000);
  timeline.mark("CYCLE_START", 1'004'000, JsonObject().add("requests", 1));
  timeline.phase("w", "ALLREDUCE", 1'004'000, JsonObject().add("bytes", 4));
  timeline.activity("w", "QUEUE", 1'004'000);
  timeline.activity("w", "QUEUE", 1'004'500);
  timeline.activity("w", "shared", 1'005'000);
  timeline.activity("w", "", 1'006'000);
  timeline.end("w", 2'234'567, JsonObject().add("status", "ok"));
  EXPECT_TRUE(timeline.stop(3'000'000));
  const std::vector<std::string> expected{
      "[",
      R"({"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"lightcc rank 0 of 2 on host h",)"
      R"("start_time_since_epoch_in_micros":1700000000000000}},)",
      R"({"name":"process_name","ph":"M","pid":1,"tid":1,"args":{"name":"w"}},)",
      R"({"name":"process_sort_index","ph":"M","pid":1,"tid":1,"args":{"sort_index":1}},)",
      R"({"ph":"B","ts":2.003,"pid":1,"tid":1,"name":"NEGOTIATE"},)",
      R"({"ph":"X","ts":2.003,"pid":1,"tid":1,"dur":0,"name":"1"},)",
      R"({"ph":"X","ts":3.000,"pid":1,"tid":1,"dur":0,"name":"0"},)",
      R"({"ph":"i","ts":4.000,"pid":0,"tid":0,"s":"g","name":"CYCLE_START","args":{"requests":1}},)",
      R"({"ph":"E","ts":4.000,"pid":1,"tid":1,"name":"NEGOTIATE"},)",
      R"({"ph":"B","ts":4.000,"pid":1,"tid":1,"name":"ALLREDUCE","args":{"bytes":4}},)",
      R"({"ph":"B","ts":4.000,"pid":1,"tid":1,"name":"QUEUE"},)",
      R"({"ph":"E","ts":5.000,"pid":1,"tid":1,"name":"QUEUE"},)",
      R"({"ph":"B","ts":5.000,"pid":1,"tid":1,"name":"shared"},)",
      R"({"ph":"E","ts":6.000,"pid":1,"tid":1,"name":"shared"},)",
      R"({"ph":"E","ts":1234.567,"pid":1,"tid":1,"name":"ALLREDUCE","args":{"status":"ok"}},)",
      R"({"ph":"i","ts":2000.000,"pid":0,"tid":0,"s":"g","name":"TIMELINE_END","args":{"dropped_events":0}})",
      "]"};
  EXPECT_EQ(file().lines, expected);
}

TEST_F(Trace, ATickOfTheNextRoundWaitsForTheEndOfThisOne) {
  Timeline timeline;
  timeline.start(start());
  timeline.phase("w", "NEGOTIATE", 2'000'000);
  timeline.phase("w", "ALLREDUCE", 3'000'000);
  timeline.tick("w", "NEGOTIATE", "1", 3'500'000);  // a rank that is done earlier, and back
  timeline.activity("w", "shared", 3'600'000);
  timeline.end("w", 4'000'000);
  timeline.phase("w", "NEGOTIATE", 4'500'000);
  timeline.stop(5'000'000);
  const auto all = file();
  all.expect_nested();
  const auto tick =
      std::find_if(all.lines.begin(), all.lines.end(), [](auto& line) { return line.find("\"1\"") != line.npos; });
  ASSERT_GE(tick - all.lines.begin(), 3);
  EXPECT_EQ(tick[-2], R"({"ph":"E","ts":3000.000,"pid":1,"tid":1,"name":"ALLREDUCE"},)");
  EXPECT_EQ(tick[-1], R"({"ph":"B","ts":3000.000,"pid":1,"tid":1,"name":"NEGOTIATE"},)");
  EXPECT_EQ(tick[1], R"({"ph":"E","ts":4000.000,"pid":1,"tid":1,"name":"NEGOTIATE"},)");
}

TEST_F(Trace, WhatBeganBeforeTheStartIsLeftOutAndWhatIsOpenAtTheStopEnds) {
  Timeline timeline;
  timeline.phase("early", "ALLREDUCE", 500'000);
  timeline.start(start());
  timeline.activity("early", "shared", 1'100'000);  // it is in no phase here
  timeline.end("early", 1'200'000);
  timeline.phase("late", "NEGOTIATE", 900'000);  // submitted before the start, taken up after it
  timeline.activity("late", "shared", 1'300'000);
  timeline.tick("late", "OTHER", "1", 1'300'000);
  timeline.stop(1'400'000);
  timeline.end("late", 1'500'000);
  const auto all = file();
  all.expect_complete();
  all.expect_nested();
  EXPECT_EQ(all.count("early"), 0u);
  EXPECT_EQ(all.count(R"("ph":"B","ts":0.000)"), 1u);
  EXPECT_EQ(all.count(R"("ph":"E","ts":400.000)"), 2u);
  EXPECT_EQ(all.count(R"("ph":"X")"), 0u);
}

TEST_F(Trace, MarksOnlyIfAskedFor) {
  Timeline timeline;
  Timeline::Start quiet = start();
  quiet.mark_cycles = false;
  timeline.start(quiet);
  timeline.mark("CYCLE_START", 2'000'000);
  timeline.stop(2'000'000);
  EXPECT_EQ(file().count("CYCLE_START"), 0u);
}

TEST_F(Trace, StartAndStopMayBeRepeated) {
  Timeline timeline;
  EXPECT_FALSE(timeline.running());
  EXPECT_FALSE(timeline.stop(0)) << "there is none";
  for (const char* name : {"a", "b", "a"}) {
    timeline.start(start(name));
    EXPECT_TRUE(timeline.running());
    timeline.phase(std::string("row of ") + name, "P", 2'000'000);
    EXPECT_TRUE(timeline.stop(3'000'000));
    EXPECT_FALSE(timeline.running());
    EXPECT_FALSE(timeline.stop(3'000'000));
    file(name).expect_complete();
    EXPECT_EQ(file(name).count("row of"), 1u);
  }
}

TEST_F(Trace, AStartWhileRunningCompletesTheFileBefore) {
  Timeline timeline;
  timeline.start(start("a"));
  timeline.phase("w", "P", 2'000'000);
  timeline.start(start("b"));
  timeline.phase("w", "Q", 2'000'000);
  file("a").expect_complete();
  file("a").expect_nested();
  EXPECT_EQ(file("a").count("\"P\""), 2u);
  timeline.stop(3'000'000);
  file("b").expect_complete();
  EXPECT_EQ(file("b").count("\"Q\""), 2u);
}

TEST_F(Trace, APathThatCannotBeWrittenIsNamedWithTheReason) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);  // nobody reads it: no wait, an error
  const std::pair<std::string, std::string> cases[] = {{path("no/such/folder"), "No such file or directory"},
                                                       {path("."), "Is a directory"},
                                                       {"", "No such file or directory"},
                                                       {path("pipe"), "No such device or address"},
                                                       {"/dev/full", "No space left on device"}};
  for (auto& [where, reason] : cases) {
    Timeline timeline;
    Timeline::Start bad = start();
    bad.path = where;
    try {
      timeline.start(bad);
      ADD_FAILURE() << where << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      EXPECT_EQ(error.what(), "cannot write '" + where + "': " + reason);
    }
    EXPECT_FALSE(timeline.running());
    timeline.phase("w", "P", 2'000'000);
    EXPECT_FALSE(timeline.stop(2'000'000));
  }
}

TEST_F(Trace, WhatIsWrittenIsInTheFileSoonAndLacksOnlyItsEnd) {
  Timeline timeline;
  timeline.start(start());
  timeline.phase("w", "P", 2'000'000);
  const uint64_t deadline = now_ns() + 10'000'000'000;
  while (file().count("\"P\"") == 0 && now_ns() < deadline) std::this_thread::sleep_for(10ms);
  const std::string so_far = file().text;
  EXPECT_TRUE(so_far.ends_with(R"({"ph":"B","ts":1000.000,"pid":1,"tid":1,"name":"P"})")) << so_far;
  timeline.stop(3'000'000);
  EXPECT_TRUE(file().text.starts_with(so_far));
}

TEST_F(Trace, AFullQueueLeavesATimelineNested) {
  Timeline timeline(8);
  timeline.start(start());
  for (int i = 0; i < 5'000; ++i) {
    const std::string row = "row" + std::to_string(i % 7);
    timeline.phase(row, "NEGOTIATE", 2'000'000);
    timeline.phase(row, "ALLREDUCE", 3'000'000);
    timeline.activity(row, "shared", 3'000'000);
    timeline.tick(row, "NEGOTIATE", "1", 3'000'000);
    timeline.end(row, 4'000'000);
  }
  timeline.stop(5'000'000);
  const auto all = file();
  all.expect_complete();
  all.expect_nested();
  EXPECT_EQ(all.count("\"dropped_events\":0}"), 0u) << "the queue was never full: the test shows nothing";
}

TEST_F(Trace, AnAutomaticRowIsForgotten) {
  Timeline timeline;
  timeline.start(start());
  for (int i = 0; i < 2; ++i) {
    timeline.phase("w", "P", 2'000'000);
    timeline.end("w", 3'000'000, {}, true);
  }
  timeline.stop(4'000'000);
  EXPECT_EQ(file().count(R"("name":"w")"), 2u) << "its second coming is another row";
}

TEST_F(Trace, ThreadsReportWhileOthersStartAndStop) {
  Timeline timeline;
  std::atomic<bool> done{false};
  std::vector<std::thread> reporters, lives;
  for (int t = 0; t < 3; ++t)
    reporters.emplace_back([&, t] {
      for (int i = 0; !done; ++i) {
        if (!timeline.running()) std::this_thread::yield();
        const std::string row = "row" + std::to_string((t + i) % 5);
        timeline.tick(row, "NEGOTIATE", std::to_string(t), now_ns());
        timeline.phase(row, "ALLREDUCE", now_ns());
        timeline.activity(row, "shared", now_ns());
        timeline.mark("CYCLE_START", now_ns());
        timeline.end(row, now_ns());
      }
    });
  for (int t = 0; t < 2; ++t)
    lives.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        Timeline::Start one = start("thread" + std::to_string(t) + "." + std::to_string(i));
        one.now_ns = now_ns();
        timeline.start(one);
        std::this_thread::sleep_for(2ms);
        timeline.stop(now_ns());
      }
    });
  for (std::thread& thread : lives) thread.join();
  done = true;
  for (std::thread& thread : reporters) thread.join();
  for (int t = 0; t < 2; ++t)
    for (int i = 0; i < 10; ++i) {
      const auto all = file("thread" + std::to_string(t) + "." + std::to_string(i));
      all.expect_complete();
      all.expect_nested();
    }
}

TEST_F(Trace, AFileThatCannotGrowEndsTheTimelineAndNothingElse) {
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit little{4096, before.rlim_max};
  std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &little);
  Timeline timeline;
  timeline.start(start());
  const uint64_t deadline = now_ns() + 10'000'000'000;
  while (timeline.running() && now_ns() < deadline) {
    timeline.mark(std::string(100, 'm'), 2'000'000);
    timeline.phase("w", "P", 2'000'000);
    timeline.end("w", 2'000'000);
    std::this_thread::sleep_for(1ms);
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_FALSE(timeline.running());
  EXPECT_TRUE(timeline.stop(3'000'000));
  EXPECT_LE(file().text.size(), 4096u);
  timeline.start(start("another"));
  timeline.stop(3'000'000);
  file("another").expect_complete();
}

}  // namespace
}  // namespace lightcc
