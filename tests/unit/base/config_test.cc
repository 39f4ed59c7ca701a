#include "base/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "labels.h"
#include "unit/variables.h"

LABEL(alone);

namespace lightcc {
namespace {

Config read(const Variables& variables, std::string* notes = nullptr) { return read_config(from(variables), notes); }

std::string refusal(const std::string& name, const std::string& value) {
  try {
    read({{name, value}});
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_argument);
    return e.what();
  }
  return "accepted";
}

TEST(Config, DefaultsAreThoseOfTheStruct) {
  std::string notes = "old";
  EXPECT_EQ(knobs_text(read({}, &notes)), knobs_text(Config{}));
  EXPECT_EQ(notes, "");
}

// Whatever a variable holds, the error names it, in one line of bounded length.
TEST(Config, EveryErrorNamesTheVariableAndQuotesALineOfIt) {
  for (const KnobRow& row : knob_rows())
    for (const std::string& value : {std::string("1\nLIGHTCC_FUSION=0"), std::string("\x1b[31m\x7f\r"),
                                     std::string(100'000, 'x'), std::string(5000, '7')}) {
      const std::string error = refusal(row.name, value);
      EXPECT_TRUE(error.starts_with(row.name + std::string("="))) << row.name << ": " << error;
      EXPECT_LT(error.size(), 500u) << row.name;
      EXPECT_TRUE(std::ranges::none_of(error, [](char c) { return uint8_t(c) < ' ' || c == '\x7f'; })) << error;
    }
  EXPECT_EQ(refusal("LIGHTCC_SELECT", "allreduce=ring\nx"),
            "LIGHTCC_SELECT=allreduce=ring\\nx: expected text without line breaks and other control characters; "
            "correct it or unset it (docs/knobs.md)");
}

TEST(Config, AFailureLeavesTheOtherVariablesRead) {
  std::optional<Error> failure;
  const auto env = [](const char* name) -> const char* {
    if (name == std::string("HOROVOD_CACHE_CAPACITY")) return "many";
    if (name == std::string("LIGHTCC_STORE_ADDR")) return "h1:4711";
    return name == std::string("LIGHTCC_SPIN_US") ? "soon" : nullptr;
  };
  const Config config = read_config(env, nullptr, &failure);
  EXPECT_EQ(config.store_addr, "h1:4711");
  ASSERT_TRUE(failure);
  EXPECT_TRUE(std::string(failure->what()).starts_with("HOROVOD_CACHE_CAPACITY=many: expected")) << failure->what();
}

TEST(Config, ReadsEveryKnob) {
  const Config c = read({{"HOROVOD_FUSION_THRESHOLD", "1048576"},
                         {"LIGHTCC_FUSION", "off"},
                         {"HOROVOD_CACHE_CAPACITY", "7"},
                         {"HOROVOD_STALL_CHECK_TIME_SECONDS", "1.5"},
                         {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "3"},
                         {"HOROVOD_STALL_CHECK_DISABLE", "1"},
                         {"HOROVOD_START_TIMEOUT", "0.25"},
                         {"LIGHTCC_SELECT", "allreduce=ring"},
                         {"HOROVOD_LOG_LEVEL", "Debug"},
                         {"HOROVOD_LOG_HIDE_TIME", "yes"},
                         {"HOROVOD_TIMELINE", "/tmp/t.json"},
                         {"HOROVOD_TIMELINE_MARK_CYCLES", "1"},
                         {"LIGHTCC_SPIN_US", "20"},
                         {"LIGHTCC_STORE_ADDR", "h1:4711"},
                         {"LIGHTCC_IFACE", "eth0"},
                         {"LIGHTCC_PORT_RANGE", "20000-20100"},
                         {"HOROVOD_NUM_NCCL_STREAMS", "3"},
                         {"LIGHTCC_NET", "HARP"},
                         {"LIGHTCC_NET_PLUGIN", "ofi"},
                         {"HOROVOD_BATCH_D2D_MEMCOPIES", "0"}});
  EXPECT_EQ(c.fusion_bytes, 1048576);
  EXPECT_FALSE(c.fusion);
  EXPECT_EQ(c.cache_capacity, 7);
  EXPECT_EQ(c.stall_warn_s, 1.5);
  EXPECT_EQ(c.stall_end_s, 3);
  EXPECT_FALSE(c.stall_check);
  EXPECT_EQ(c.start_timeout_s, 0.25);
  EXPECT_EQ(c.select, "allreduce=ring");
  EXPECT_EQ(c.log_level, 1);
  EXPECT_TRUE(c.log_hide_time);
  EXPECT_EQ(c.timeline, "/tmp/t.json");
  EXPECT_TRUE(c.timeline_mark_cycles);
  EXPECT_EQ(c.spin_us, 20);
  EXPECT_EQ(c.store_addr, "h1:4711");
  EXPECT_EQ(c.iface, "eth0");
  EXPECT_EQ(c.port_range, "20000-20100");
  EXPECT_EQ(c.nccl_streams, 3);
  EXPECT_EQ(c.net, "harp");
  EXPECT_EQ(c.net_plugin, "ofi");
  EXPECT_FALSE(c.batch_copies);
}

TEST(Config, InterfacesHaveOtherNamesToo) {
  EXPECT_EQ(read({{"NCCL_SOCKET_IFNAME", "nccl"}}).iface, "nccl");
  EXPECT_EQ(read({{"NCCL_SOCKET_IFNAME", "nccl"}, {"HOROVOD_GLOO_IFACE", "gloo"}}).iface, "gloo");
  EXPECT_EQ(read({{"HOROVOD_GLOO_IFACE", "gloo"}, {"LIGHTCC_IFACE", "own"}}).iface, "own");
  EXPECT_EQ(read({{"HOROVOD_GLOO_IFACE", "gloo"}, {"LIGHTCC_IFACE", ""}}).iface, "gloo");
}

TEST(Config, TheSecretIsNotShown) {
  const Variables variables{{"LIGHTCC_SECRET", "pst"}};
  std::string notes;
  EXPECT_EQ(knobs_text(read(variables, &notes)).find("pst"), std::string::npos);
  EXPECT_EQ(notes, "");
}

TEST(Config, WhatKnobsTextPrintsReadsBackTheSame) {
  const Config c = read({{"HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1"}, {"HOROVOD_LOG_LEVEL", "fatal"},
                         {"HOROVOD_STALL_CHECK_DISABLE", "true"}, {"LIGHTCC_SELECT", "broadcast=binomial"}});
  const std::string text = knobs_text(c);
  Variables again;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at), is = text.find('=', at);
    again[text.substr(at, is - at)] = text.substr(is + 1, end - is - 1);
    at = end + 1;
  }
  EXPECT_EQ(again.size(), 50u);
  EXPECT_EQ(knobs_text(read(again)), text);
}

TEST(Config, HorovodsNamesOfHierarchicalAllreduceAreRead) {
  EXPECT_TRUE(read({}).hierarchical);
  EXPECT_FALSE(read({{"HOROVOD_HIERARCHICAL_ALLREDUCE", "0"}}).hierarchical);
  EXPECT_FALSE(read({{"HOROVOD_TORUS_ALLREDUCE", "0"}}).hierarchical);
  EXPECT_TRUE(read({{"LIGHT_2D_ALLREDUCE", "1"}, {"HOROVOD_HIERARCHICAL_ALLREDUCE", "0"}}).hierarchical);
  const Config c = read({{"LIGHT_INTRA_SIZE", "4"}, {"LIGHT_HIERARCHICAL_THRESHOLD", "65536"}});
  EXPECT_EQ(c.intra_size, 4);
  EXPECT_EQ(c.hierarchical_bytes, 65536);
}

TEST(Config, HierarchicalAllgatherIsASwitchThatRankZeroSets) {
  EXPECT_TRUE(read({}).hierarchical_allgather);
  const Config off = read({{"HOROVOD_HIERARCHICAL_ALLGATHER", "0"}});
  EXPECT_FALSE(off.hierarchical_allgather);
  EXPECT_FALSE(with_settings(read({}), shared_settings(off)).hierarchical_allgather);
}

TEST(Config, ReadsTheTunersKnobs) {
  const Config c = read({{"HOROVOD_AUTOTUNE", "1"},
                         {"HOROVOD_AUTOTUNE_LOG", "log.csv"},
                         {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "0"},
                         {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "1"},
                         {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "7"}});
  EXPECT_TRUE(c.autotune);
  EXPECT_EQ(c.autotune_log, "log.csv");
  EXPECT_EQ(c.autotune_warmup_samples, 0);
  EXPECT_EQ(c.autotune_steps_per_sample, 1);
  EXPECT_EQ(c.autotune_most_samples, 7);
  EXPECT_FALSE(read({}).autotune);
  EXPECT_TRUE(with_settings(read({}), shared_settings(c)).autotune) << "rank 0's value holds";
}

TEST(Config, MetricsAreShownWhereRankZeroSays) {
  for (const char* place : {"9400", "0", "0.0.0.0:9400", "/tmp/metrics.prom"}) {
    const Config c = read({{"LIGHTCC_METRICS", place}});
    EXPECT_EQ(c.metrics, place);
    EXPECT_EQ(with_settings(read({}), shared_settings(c)).metrics, place);
  }
  EXPECT_EQ(read({}).metrics, "");
  for (const char* port : {"65536", "123456789012"}) EXPECT_THROW(read({{"LIGHTCC_METRICS", port}}), Error);
}

TEST(Config, RowsOfTheTimelineAndRangesOfNvtx) {
  EXPECT_TRUE(read({}).timeline_by_bucket);
  EXPECT_FALSE(read({{"LIGHTCC_TIMELINE_ROWS", "tensors"}}).timeline_by_bucket);
  EXPECT_THROW(read({{"LIGHTCC_TIMELINE_ROWS", "1"}}), Error);
  EXPECT_TRUE(read({}).nvtx);
  EXPECT_FALSE(read({{"HOROVOD_DISABLE_NVTX_RANGES", "1"}}).nvtx);
}

TEST(Config, WeightsAreComparedAsRankZeroSays) {
  EXPECT_EQ(read({}).check_weights, 0);
  const Config c = read({{"HOROVOD_CHECK_WEIGHTS", "10"}});
  EXPECT_EQ(c.check_weights, 10);
  EXPECT_EQ(with_settings(read({}), shared_settings(c)).check_weights, 10);
  EXPECT_THROW(read({{"HOROVOD_CHECK_WEIGHTS", "-1"}}), Error);
}

TEST(Config, SwitchesUnderstandWords) {
  for (const char* yes : {"1", "true", "TRUE", "yes", "On"}) EXPECT_TRUE(read({{"LIGHTCC_FUSION", yes}}).fusion) << yes;
  for (const char* no : {"0", "false", "False", "no", "OFF"}) EXPECT_FALSE(read({{"LIGHTCC_FUSION", no}}).fusion) << no;
}

TEST(Config, TimesFitIntoNanoseconds) {
  const Config c = read({{"HOROVOD_START_TIMEOUT", "2e10"},
                         {"HOROVOD_STALL_CHECK_TIME_SECONDS", "1e300"},
                         {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "99999999999"}});
  EXPECT_EQ(c.start_timeout_s, 1e9);
  EXPECT_EQ(c.stall_warn_s, 1e9);
  EXPECT_EQ(c.stall_end_s, 1e9);
}

TEST(Config, LogLevelsByNameOrNumber) {
  const char* names[] = {"trace", "DEBUG", "Info", "warning", "error", "fatal"};
  for (int level = 0; level < 6; ++level) {
    EXPECT_EQ(read({{"HOROVOD_LOG_LEVEL", names[level]}}).log_level, level);
    EXPECT_EQ(read({{"HOROVOD_LOG_LEVEL", std::to_string(level)}}).log_level, level);
  }
}

TEST(Config, EmptyMeansNotSet) {
  std::string notes;
  const Config c = read({{"HOROVOD_FUSION_THRESHOLD", ""}, {"HOROVOD_CYCLE_TIME", ""}}, &notes);
  EXPECT_EQ(c.fusion_bytes, 128 << 20);
  EXPECT_EQ(notes, "");
}

TEST(Config, RefusalNamesVariableValueAndExpectation) {
  EXPECT_EQ(refusal("HOROVOD_CACHE_CAPACITY", "many"),
            "HOROVOD_CACHE_CAPACITY=many: expected a number of requests, 0 or more; "
            "correct it or unset it (docs/knobs.md)");
}

TEST(Config, RefusesWhatDoesNotParse) {
  const std::pair<const char*, const char*> cases[] = {
      {"HOROVOD_FUSION_THRESHOLD", "-1"},          {"HOROVOD_FUSION_THRESHOLD", "64MB"},
      {"HOROVOD_FUSION_THRESHOLD", "1e6"},         {"HOROVOD_FUSION_THRESHOLD", "99999999999999999999"},
      {"HOROVOD_CACHE_CAPACITY", "2147483648"},    {"HOROVOD_START_TIMEOUT", "soon"},
      {"HOROVOD_START_TIMEOUT", "-1"},             {"HOROVOD_START_TIMEOUT", "inf"},
      {"HOROVOD_STALL_CHECK_TIME_SECONDS", "nan"}, {"HOROVOD_STALL_CHECK_DISABLE", "2"},
      {"LIGHTCC_FUSION", "maybe"},                 {"HOROVOD_LOG_LEVEL", "6"},
      {"HOROVOD_LOG_LEVEL", "loud"},               {"LIGHTCC_SPIN_US", "-2"},
      {"LIGHTCC_SPIN_US", "5 "},                   {"HOROVOD_AUTOTUNE", "maybe"},
      {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "0"},  {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "0"}};
  for (const auto& [name, value] : cases) {
    const std::string text = refusal(name, value);
    EXPECT_EQ(text.find(std::string(name) + "=" + value + ": expected "), 0u) << text;
  }
}

TEST(Config, FusionThresholdZeroIsNotedAndIgnored) {
  std::string notes;
  EXPECT_EQ(read({{"HOROVOD_FUSION_THRESHOLD", "0"}}, &notes).fusion_bytes, 128 << 20);
  EXPECT_EQ(notes.find("HOROVOD_FUSION_THRESHOLD=0 is ignored"), 0u) << notes;
}

TEST(Config, VariablesWithoutEffectAreNotedOneALine) {
  std::string notes;
  read({{"HOROVOD_CYCLE_TIME", "5"}, {"HOROVOD_CONTROLLER", "mpi"}, {"UNRELATED", "1"}}, &notes);
  EXPECT_NE(notes.find("HOROVOD_CYCLE_TIME=5 has no effect in this version: "), std::string::npos) << notes;
  EXPECT_NE(notes.find("\nHOROVOD_CONTROLLER=mpi has no effect in this version: "), std::string::npos) << notes;
  EXPECT_EQ(std::count(notes.begin(), notes.end(), '\n'), 1);
}

TEST(Config, ASwitchThatAsksForWhatHappensAnywayIsNotNoted) {
  std::string notes;
  read({{"HOROVOD_CCL_CACHE", "0"},
        {"HOROVOD_DYNAMIC_PROCESS_SETS", "1"},
        {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "0"},
        {"LIGHT_TOPK_ALLREDUCE", "False"}},
       &notes);
  EXPECT_EQ(notes, "");
  read({{"HOROVOD_DYNAMIC_PROCESS_SETS", "0"},
        {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "1"},
        {"HOROVOD_CCL_CACHE", "maybe"}},
       &notes);
  for (const char* noted : {"HOROVOD_DYNAMIC_PROCESS_SETS=0 has", "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1 has",
                            "HOROVOD_CCL_CACHE=maybe has"})
    EXPECT_NE(notes.find(noted), std::string::npos) << notes;
}

TEST(Config, NotesAreOptional) { EXPECT_NO_THROW(read({{"HOROVOD_CYCLE_TIME", "5"}})); }

TEST(Config, PageListsEveryKnobWithItsDefault) {
  const std::string page = knobs_markdown();
  EXPECT_EQ(page.find("# Knobs\n"), 0u);
  EXPECT_NE(page.find("| `HOROVOD_FUSION_THRESHOLD` | 134217728 | "), std::string::npos);
  EXPECT_NE(page.find("| `LIGHTCC_SELECT` | (none) | "), std::string::npos);
  EXPECT_NE(page.find("| `HOROVOD_CYCLE_TIME` | "), std::string::npos);
  const std::string values = knobs_text(Config{});
  for (size_t at = 0; at < values.size(); at = values.find('\n', at) + 1) {
    const std::string name = values.substr(at, values.find('=', at) - at);
    EXPECT_NE(page.find("| `" + name + "` | "), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace lightcc
