// What the engine's events become in the timeline: rows, phases, activities and what is said of each.
#include "engine/run/tracing.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/clock.h"
#include "engine/run/batch_execution.h"
#include "unit/timeline_file.h"

namespace lightcc {
namespace {

using Events = std::vector<std::string>;

class Tracings : public testing::Test {
 protected:
  Tracings() {
    char name[] = "/tmp/tracing_test.XXXXXX";
    folder_ = mkdtemp(name);
    start(false);
  }
  void start(bool by_bucket) { timeline.start({path(), "a test", true, now_ns(), 0, by_bucket}); }
  ~Tracings() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ + "/t.json"; }
  test::TimelineText text() {
    timeline.stop(now_ns());
    test::TimelineText text(path());
    text.expect_complete();
    text.expect_nested();
    return text;
  }
  static BatchItem item(Kind kind, const std::string& name, std::vector<TensorSpec> tensors, int group = 0) {
    auto request = std::make_shared<Request>();
    request->group = group, request->key = key_of(kind, name), request->submitted_ns = now_ns();
    request->what.kind = kind, request->what.tensors = std::move(tensors);
    return {std::move(request), {}};
  }

  Timeline timeline;
  Tracing tracing{timeline};

 private:
  std::string folder_;
};

TEST_F(Tracings, TheLifeOfARequest) {
  const std::vector<BatchItem> batch{item(Kind::allreduce, "w", {{DType::float32, {4}}})};
  tracing.submitted(*batch[0].request);
  tracing.ready(0, "allreduce.w", 1);
  tracing.ready(0, "allreduce.w", 0);
  tracing.agreed(batch, true);
  tracing.activity(batch, "COPY_IN");
  tracing.activity(batch, "shared");
  tracing.activity(batch, "");
  tracing.finished(*batch[0].request, Code::ok, "");
  const auto all = text();
  EXPECT_EQ(all.row("allreduce.w"),
            (Events{"B NEGOTIATE_ALLREDUCE", "X 1", "X 0", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "B QUEUE", "E QUEUE",
                    "B COPY_IN", "E COPY_IN", "B shared", "E shared", "E ALLREDUCE"}));
  EXPECT_EQ(all.count(R"("name":"CYCLE_START","args":{"requests":1})"), 1u);
  EXPECT_EQ(all.count(R"("name":"ALLREDUCE","args":{"status":"ok"})"), 1u);
}

TEST_F(Tracings, ABatchThatRunsAtOnceIsNotQueued) {
  const std::vector<BatchItem> batch{item(Kind::barrier, "a", {}), item(Kind::barrier, "b", {})};
  tracing.agreed(batch, false);
  tracing.activity(batch, "shared");
  for (const BatchItem& one : batch) tracing.finished(*one.request, Code::ok, "");
  const auto all = text();
  for (const char* row : {"barrier.a", "barrier.b"})
    EXPECT_EQ(all.row(row), (Events{"B BARRIER", "B shared", "E shared", "E BARRIER"}));
  EXPECT_EQ(all.count(R"("args":{"requests":2})"), 1u);
  EXPECT_EQ(all.count(R"("args":{"fused_requests":2})"), 2u);
}

TEST_F(Tracings, PhasesOfACollectiveHaveARowEach) {
  const std::vector<BatchItem> batch{item(Kind::allreduce, "a", {}, 3), item(Kind::allreduce, "b", {}, 3)};
  const uint64_t now = now_ns();
  const TimedPhase phases[] = {{"FIRST", now + 1000, now + 9000}, {"SECOND", now + 3000, now + 12'000}};
  tracing.phases(batch, phases);
  tracing.phases(batch, {});
  const auto all = text();
  EXPECT_EQ(all.row("FIRST (process set 3)"), (Events{"B FIRST", "E FIRST"}));
  EXPECT_EQ(all.row("SECOND (process set 3)"), (Events{"B SECOND", "E SECOND"}));
  EXPECT_EQ(all.count(R"("args":{"request":"allreduce.a","fused_requests":2})"), 2u);
  std::map<std::string, double> times;
  for (const std::string& line : all.lines)
    if (all.field(line, "name") == "FIRST") times[all.field(line, "ph")] = std::stod(all.field(line, "ts"));
  EXPECT_NEAR(times.at("E") - times.at("B"), 8, 0.01) << "microseconds";
}

TEST_F(Tracings, EachKindSaysWhatMattersToIt) {
  const TensorSpec matrix{DType::float32, {2, 3}}, scalar{DType::int64, {}};
  const struct { Kind kind; std::vector<TensorSpec> tensors; const char* begins; } rows[] = {
      {Kind::allreduce, {matrix, scalar},
       R"("ALLREDUCE","args":{"dtype":"float32, int64","shape":"[2, 3], []","bytes":32,"op":"max",)"
       R"("fused_requests":1})"},
      {Kind::reducescatter, {matrix},
       R"("REDUCESCATTER","args":{"dtype":"float32","shape":"[2, 3]","bytes":24,"op":"max","fused_requests":1})"},
      {Kind::broadcast, {matrix},
       R"("BROADCAST","args":{"dtype":"float32","shape":"[2, 3]","bytes":24,"root_rank":3,"fused_requests":1})"},
      {Kind::allgather, {matrix},
       R"("ALLGATHER","args":{"dtype":"float32","shape":"[2, 3]","bytes":24,"fused_requests":1})"},
      {Kind::barrier, {}, R"("BARRIER","args":{"fused_requests":1})"},
      {Kind::join, {}, R"("JOIN","args":{"fused_requests":1})"}};
  for (auto& row : rows) {
    const BatchItem one = item(row.kind, "x", row.tensors);
    one.request->what.op = ReduceOp::max, one.request->what.root = 3;
    tracing.agreed({one}, false);
  }
  const auto all = text();
  for (auto& row : rows) EXPECT_EQ(all.count(row.begins), 1u) << row.begins << "\n" << all.text;
}

TEST_F(Tracings, ProcessSetsHaveRowsOfTheirOwn) {
  tracing.submitted(*item(Kind::allreduce, "w", {}).request);
  tracing.submitted(*item(Kind::allreduce, "w", {}, 2).request);
  tracing.ready(2, "allreduce.w", 5);
  tracing.refused(2, "allreduce.w", Code::mismatch, "why");
  const auto all = text();
  EXPECT_EQ(all.row("allreduce.w"), (Events{"B NEGOTIATE_ALLREDUCE", "E NEGOTIATE_ALLREDUCE"}));
  EXPECT_EQ(all.row("allreduce.w (process set 2)"), (Events{"B NEGOTIATE_ALLREDUCE", "X 5", "E NEGOTIATE_ALLREDUCE"}));
}

TEST_F(Tracings, ANameMayHoldADot) {
  tracing.ready(0, "add_process_set.a.b", 1);
  EXPECT_EQ(text().row("add_process_set.a.b"),
            (Events{"B NEGOTIATE_ADD_PROCESS_SET", "X 1", "E NEGOTIATE_ADD_PROCESS_SET"}));
}

TEST_F(Tracings, TheEndSaysHowItWentAndWhy) {
  const char* names[] = {"ok",        "pending",   "invalid_argument", "mismatch",
                         "peer_lost", "shut_down", "timeout",          "internal"};
  for (int code = 0; code <= int(Code::internal); ++code) {
    const BatchItem one = item(Kind::barrier, "x", {});
    tracing.submitted(*one.request);
    tracing.finished(*one.request, Code(code), code ? "because \"" + std::to_string(code) + "\"" : "");
  }
  tracing.refused(0, "barrier.never begun", Code::internal, "unseen");
  const auto all = text();
  EXPECT_EQ(all.count(R"("args":{"status":"ok"}})"), 1u);
  for (int code = 1; code <= int(Code::internal); ++code)
    EXPECT_EQ(all.count(std::string(R"("status":")") + names[code] + R"(","error":"because \")" +
                        std::to_string(code) + R"(\""})"),
              1u);
  EXPECT_EQ(all.count("unseen"), 0u) << "there is nothing that it could end";
}

TEST_F(Tracings, AnAutomaticNamesRowEndsWithItsRequest) {
  for (const char* name : {"noname.7", "noname.7", "w", "w"}) {
    const BatchItem one = item(Kind::allreduce, name, {});
    tracing.submitted(*one.request);
    tracing.finished(*one.request, Code::ok, "");
  }
  const auto all = text();
  EXPECT_EQ(all.count(R"("name":"allreduce.noname.7")"), 2u) << "the number may come again after join()";
  EXPECT_EQ(all.count(R"("name":"allreduce.w")"), 1u);
}

TEST_F(Tracings, WithoutATimelineNothingIsTold) {
  text();
  const std::vector<BatchItem> batch{item(Kind::allreduce, "w", {})};
  tracing.submitted(*batch[0].request);
  tracing.ready(0, "allreduce.w", 0);
  tracing.agreed(batch, true);
  tracing.activity(batch, "shared");
  start(false);
  tracing.activity(batch, "shared");  // of a phase that began before the file
  tracing.finished(*batch[0].request, Code::ok, "");
  EXPECT_EQ(text().row("allreduce.w"), Events{});
}

// ---- by buckets

TEST_F(Tracings, ABucketHasOneRowHoweverManyTensorsItHas) {
  start(true);
  const std::vector<BatchItem> batch{item(Kind::allreduce, "a", {{DType::float32, {4}}}),
                                     item(Kind::allreduce, "b", {{DType::float32, {6}}})};
  tracing.step_begins(now_ns());
  for (const BatchItem& one : batch) tracing.submitted(*one.request);
  for (int rank : {1, 0})
    for (const char* key : {"allreduce.a", "allreduce.b"}) tracing.ready(0, key, rank);
  tracing.agreed(batch, true);
  tracing.activity(batch, "shared");
  for (const BatchItem& one : batch) tracing.finished(*one.request, Code::ok, "");
  tracing.step_begins(now_ns());
  const auto all = text();
  EXPECT_EQ(all.row("bucket 1"),
            (Events{"B NEGOTIATE_ALLREDUCE", "X 1", "X 0", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "B QUEUE", "E QUEUE",
                    "B shared", "E shared", "E ALLREDUCE"}));
  EXPECT_EQ(all.row("steps"), (Events{"B STEP 1", "E STEP 1", "B STEP 2", "E STEP 2"}));
  EXPECT_EQ(all.row("allreduce.a"), Events{});
  EXPECT_EQ(all.count(R"("bytes":40,"fused_requests":2,"dtype":"float32","op":"sum",)"
                      R"("tensors":"allreduce.a, allreduce.b"})"), 1u);
  EXPECT_EQ(all.count(R"("name":"bytes","args":{"in flight":40,"waiting":40}})"), 1u);
  EXPECT_EQ(all.count(R"("name":"bytes","args":{"in flight":40,"waiting":0}})"), 1u);
  EXPECT_EQ(all.count(R"("name":"bytes","args":{"in flight":0,"waiting":0}})"), 1u);
}

TEST_F(Tracings, BucketsThatOverlapHaveDifferentRowsWhichOthersUseAgain) {
  start(true);
  const std::vector<BatchItem> first{item(Kind::allreduce, "a", {{DType::float32, {1}}})},
      second{item(Kind::allreduce, "b", {{DType::float32, {1}}})};
  for (const auto* batch : {&first, &second}) tracing.submitted(*(*batch)[0].request);
  for (const auto* batch : {&first, &second}) tracing.agreed(*batch, false);
  for (const auto* batch : {&first, &second}) tracing.finished(*(*batch)[0].request, Code::ok, "");
  const std::vector<BatchItem> third{item(Kind::allreduce, "c", {{DType::float32, {1}}})};
  tracing.submitted(*third[0].request);
  tracing.agreed(third, false);
  tracing.finished(*third[0].request, Code::ok, "");
  const auto all = text();
  EXPECT_EQ(all.row("bucket 1").size(), 8u);
  EXPECT_EQ(all.row("bucket 2").size(), 4u);
  EXPECT_EQ(all.row("bucket 3"), Events{});
}

TEST_F(Tracings, ARankThatIsAheadHasItsTickInTheNextBucket) {
  start(true);
  const auto step = [&](int last, int ahead) {
    const std::vector<BatchItem> batch{item(Kind::allreduce, "w", {{DType::float32, {4}}})};
    tracing.submitted(*batch[0].request);
    tracing.ready(0, "allreduce.w", last);
    tracing.agreed(batch, false);
    if (ahead >= 0) tracing.ready(0, "allreduce.w", ahead);
    tracing.finished(*batch[0].request, Code::ok, "");
  };
  step(0, 1);
  step(0, -1);
  EXPECT_EQ(text().row("bucket 1"),
            (Events{"B NEGOTIATE_ALLREDUCE", "X 0", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "E ALLREDUCE",
                    "B NEGOTIATE_ALLREDUCE", "X 1", "X 0", "E NEGOTIATE_ALLREDUCE", "B ALLREDUCE", "E ALLREDUCE"}));
}

TEST_F(Tracings, WhatFailsBeforeItRunsIsInARowOfItsOwn) {
  start(true);
  const std::vector<BatchItem> batch{item(Kind::allreduce, "w", {{DType::float32, {4}}})};
  tracing.submitted(*batch[0].request);
  tracing.finished(*batch[0].request, Code::mismatch, "ranks disagree");
  const auto all = text();
  EXPECT_EQ(all.row("failed"), (Events{"B allreduce.w", "E allreduce.w"}));
  EXPECT_EQ(all.count(R"({"status":"mismatch","error":"ranks disagree"})"), 1u);
}

TEST_F(Tracings, ABucketThatBeganBeforeTheFileIsNotInIt) {
  start(true);
  const std::vector<BatchItem> batch{item(Kind::allreduce, "w", {{DType::float32, {4}}})};
  tracing.submitted(*batch[0].request);
  tracing.agreed(batch, false);
  start(true);
  tracing.activity(batch, "shared");
  tracing.finished(*batch[0].request, Code::ok, "");
  EXPECT_EQ(text().count("allreduce"), 0u);
}

}  // namespace
}  // namespace lightcc
