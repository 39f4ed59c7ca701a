// Which rank a process is, by the variables of each launcher.
#include "net/world.h"

#include <gtest/gtest.h>

#include <map>

#include "base/error.h"

namespace lightcc {
namespace {

using Variables = std::map<std::string, std::string>;

World world_of(const Variables& variables) {
  return find_world([&](const char* name) {
    auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}
std::string refusal_of(const Variables& variables) {
  try {
    world_of(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "nothing";
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

const Variables kRun{{"LIGHTCC_JOB_ID", "j7"},     {"HOROVOD_RANK", "1"},       {"HOROVOD_SIZE", "3"},
                     {"HOROVOD_LOCAL_RANK", "1"}, {"HOROVOD_LOCAL_SIZE", "3"}};
const Variables kTorch{{"TORCHELASTIC_RUN_ID", "none"}, {"RANK", "1"},          {"WORLD_SIZE", "3"},
                       {"LOCAL_RANK", "1"},             {"LOCAL_WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", "29500"},        {"TORCHELASTIC_RESTART_COUNT", "0"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                         {"PMIX_NAMESPACE", "prterun-9"}};
const Variables kPmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}};
const Variables kHorovod{{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "3"}};
const Variables kMaster{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}, {"RANK", "1"}, {"WORLD_SIZE", "3"}};

TEST(World, EachLauncherIsUnderstood) {
  const std::pair<const char*, Variables> rows[] = {{"lightccrun", kRun},         {"torchrun", kTorch},
                                                    {"Open MPI", kOpenMpi},       {"PMI", kPmi},
                                                    {"HOROVOD_RANK", kHorovod}, {"MASTER_ADDR", kMaster}};
  for (auto& [launcher, variables] : rows) {
    SCOPED_TRACE(launcher);
    const World world = world_of(variables);
    EXPECT_EQ(world.launcher, launcher);
    EXPECT_EQ(world.rank, 1);
    EXPECT_EQ(world.size, 3);
    EXPECT_EQ(world.local_rank, 1);
    EXPECT_EQ(world.local_size, 3);
    EXPECT_EQ(world.cross_rank, 0);
    EXPECT_EQ(world.cross_size, 1);
    EXPECT_FALSE(world.job.empty());
    EXPECT_FALSE(world.host.empty());
  }
}

TEST(World, NothingSetIsAWorldOfOne) {
  const World world = world_of({});
  EXPECT_EQ(world.launcher, "none");
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.size, 1);
}

TEST(World, TheLauncherNearestToTheProcessIsBelieved) {
  Variables nested = kOpenMpi;  // torchrun or lightccrun started under mpirun
  nested["OMPI_COMM_WORLD_RANK"] = "2";
  nested.insert(kTorch.begin(), kTorch.end());
  EXPECT_EQ(world_of(nested).launcher, "torchrun");
  nested.insert(kRun.begin(), kRun.end());
  EXPECT_EQ(world_of(nested).launcher, "lightccrun");
  EXPECT_EQ(world_of(nested).rank, 1);
}

TEST(World, AMarkWithoutRankAndSizeIsPassedOver) {
  EXPECT_EQ(world_of({{"MASTER_ADDR", "127.0.0.1"}, {"RANK", "1"}}).launcher, "none");
  Variables variables = kPmi;
  variables["LIGHTCC_JOB_ID"] = "left over";
  EXPECT_EQ(world_of(variables).launcher, "PMI");
}

TEST(World, JobsAreToldApart) {
  EXPECT_EQ(world_of(kRun).job, world_of(kRun).job);
  Variables other = kRun;
  other["LIGHTCC_JOB_ID"] = "j8";
  EXPECT_NE(world_of(kRun).job, world_of(other).job);
  for (const char* name : {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}) {  // torchrun's run id is always "none"
    other = kTorch;
    other[name] = "7";
    EXPECT_NE(world_of(kTorch).job, world_of(other).job) << name;
  }
  // Without an id: the launcher's process.
  EXPECT_TRUE(contains(world_of(kPmi).job, "parent-" + std::to_string(getppid()) + "-")) << world_of(kPmi).job;
}

TEST(World, ContradictionsAreRefusedByName) {
  const std::tuple<const char*, const char*, const char*> rows[] = {
      {"HOROVOD_RANK", "3", "lightccrun says rank 3 of 3"},
      {"HOROVOD_RANK", "one", "HOROVOD_RANK=one is not a rank or size"},
      {"HOROVOD_RANK", "-1", "HOROVOD_RANK=-1"},
      {"HOROVOD_SIZE", "0", "of 0"},
      {"HOROVOD_SIZE", "3x", "HOROVOD_SIZE=3x"},
      {"HOROVOD_LOCAL_RANK", "3", "local rank 3 of 3"},
      {"HOROVOD_LOCAL_SIZE", "4", "of 4; unset what was left over"}};
  for (auto& [name, value, expected] : rows) {
    Variables variables = kRun;
    variables[name] = value;
    EXPECT_TRUE(contains(refusal_of(variables), expected)) << refusal_of(variables);
  }
}

TEST(World, SeveralHostsAreRefusedByName) {
  Variables variables = kRun;
  variables["HOROVOD_LOCAL_SIZE"] = "2";
  const std::string text = refusal_of(variables);
  EXPECT_TRUE(contains(text, "lightccrun started 2 of 3 ranks on host " + world_of(kRun).host)) << text;
  EXPECT_TRUE(contains(text, "this version runs on one host")) << text;
}

}  // namespace
}  // namespace lightcc
