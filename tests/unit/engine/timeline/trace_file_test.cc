// A file of trace events: what is written of each, and what is left out when it cannot be written.
#include "engine/timeline/trace_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "base/clock.h"
#include "base/error.h"
#include "unit/timeline_file.h"

namespace lightcc {
namespace {

class TraceFiles : public testing::Test {
 protected:
  TraceFiles() {
    char name[] = "/tmp/trace_file_test.XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~TraceFiles() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ + "/t.json"; }
  test::TimelineText text() const { return test::TimelineText(path()); }
  static std::string end_of(uint64_t dropped) { return "\"dropped_events\":" + std::to_string(dropped) + "}"; }

 private:
  std::string folder_;
};

TEST_F(TraceFiles, EachKindOfEventIsALine) {
  {
    TraceFile file(path(), R"({"name":"me"})", 1'000'000, 64);
    EXPECT_TRUE(file.put({'M', 3, 1'000'000, "a \"row\"", ""}));
    EXPECT_TRUE(file.put({'B', 3, 1'000'001, "slice", R"({"bytes":4})"}));
    EXPECT_TRUE(file.put({'X', 3, 1'001'999, "\xff", ""}));
    EXPECT_TRUE(file.put({'E', 3, 3'000'000, "slice", ""}));
    EXPECT_TRUE(file.put({'i', 0, 3'000'000, "all", ""}));
    file.close(1'000'000 + 3'600'000'000'000);  // an hour later
    EXPECT_FALSE(file.failed());
  }
  EXPECT_EQ(text().text, R"([
{"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"me"}},
{"name":"process_name","ph":"M","pid":3,"tid":3,"args":{"name":"a \"row\""}},
{"name":"process_sort_index","ph":"M","pid":3,"tid":3,"args":{"sort_index":3}},
{"ph":"B","ts":0.001,"pid":3,"tid":3,"name":"slice","args":{"bytes":4}},
{"ph":"X","ts":1.999,"pid":3,"tid":3,"dur":0,"name":"\ufffd"},
{"ph":"E","ts":2000.000,"pid":3,"tid":3,"name":"slice"},
{"ph":"i","ts":2000.000,"pid":0,"tid":0,"s":"g","name":"all"},
{"ph":"i","ts":3600000000.000,"pid":0,"tid":0,"s":"g","name":"TIMELINE_END","args":{"dropped_events":0}}
]
)");
}

TEST_F(TraceFiles, WhatWasThereBeforeIsGone) {
  { TraceFile(path(), R"({"name":"before"})", 0, 64).close(0); }
  { TraceFile(path(), "{}", 0, 64); }
  EXPECT_EQ(text().text, "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{}}\n]\n");
}

TEST_F(TraceFiles, AFileThatCannotBeMadeIsNamedWithTheReason) {
  try {
    TraceFile file(path() + "/below", "{}", 0, 64);
    ADD_FAILURE() << "it was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_EQ(error.what(), "cannot write '" + path() + "/below': No such file or directory");
  }
}

TEST_F(TraceFiles, ASliceIsTakenOnlyWithRoomForItsEnd) {
  {
    TraceFile file(path(), "{}", 0, 2);
    EXPECT_TRUE(file.put({'B', 1, 1, "outer", ""}));
    EXPECT_FALSE(file.put({'B', 1, 2, "inner", ""})) << "whether the beginning of the outer one is written or not";
    EXPECT_TRUE(file.put({'E', 1, 3, "outer", ""}));
    file.close(4);
  }
  EXPECT_EQ(text().row("outer"), std::vector<std::string>()) << "its row was never named";
  EXPECT_EQ(text().count("outer"), 2u);
  EXPECT_EQ(text().count("inner"), 0u);
  EXPECT_EQ(text().count(end_of(2)), 1u) << "a slice is two events";
}

TEST_F(TraceFiles, ARowsNameThatIsLeftOutDoesNotCount) {
  {
    TraceFile file(path(), "{}", 0, 0);
    EXPECT_FALSE(file.put({'M', 1, 1, "row", ""}));
    EXPECT_FALSE(file.put({'X', 1, 1, "moment", ""}));
    EXPECT_FALSE(file.put({'B', 1, 1, "slice", ""}));
    file.close(2);
  }
  EXPECT_EQ(text().count(end_of(3)), 1u);
}

TEST_F(TraceFiles, AFullQueueDropsSlicesWholeAndCountsThem) {
  constexpr size_t kQueue = 64;
  constexpr int kSlices = 20'000;
  uint64_t dropped = 0, begun = 0;
  {
    TraceFile file(path(), "{}", 0, kQueue);
    for (int i = 0; i < kSlices; ++i) {
      const bool taken = file.put({'B', 1, 1, "outer", ""});
      if (!file.put({'X', 1, 1, "tick", ""})) ++dropped;
      taken ? ++begun : dropped += 2;
      if (!taken) continue;
      EXPECT_TRUE(file.put({'E', 1, 1, "outer", ""})) << "the end of a slice that was taken";
    }
    file.close(3);
  }
  const auto all = text();
  all.expect_complete();
  all.expect_nested();
  EXPECT_GT(dropped, 0u) << "the queue was never full: the test shows nothing";
  EXPECT_GE(begun, kQueue / 4);
  EXPECT_EQ(all.count(R"("ph":"B")"), begun);
  EXPECT_EQ(all.count(R"("ph":"E")"), begun);
  EXPECT_EQ(all.count(end_of(dropped)), 1u) << all.text;
}

// A pipe's reader may end first. Writing to it then would end this process by SIGPIPE.
TEST_F(TraceFiles, AReaderThatHasGoneEndsTheFileAndNothingElse) {
  ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);
  Fd reader(open(path().c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(reader);
  TraceFile file(path(), "{}", 0, 64);
  reader = Fd();
  EXPECT_TRUE(file.put({'X', 1, 1, "moment", ""}));
  const uint64_t deadline = now_ns() + 20'000'000'000;
  while (!file.failed() && now_ns() < deadline) usleep(1000);
  EXPECT_TRUE(file.failed());
  EXPECT_FALSE(file.put({'X', 1, 1, "moment", ""}));
  file.close(2);
}

}  // namespace
}  // namespace lightcc
