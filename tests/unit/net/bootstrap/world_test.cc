// Which rank a process is, by the variables of each launcher.
#include "net/bootstrap/world.h"

#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "unit/helpers.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Variables = std::map<std::string, std::string>;

Environment from(const Variables& variables) {
  return [&variables](const char* name) {
    auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
}
World world_of(const Variables& variables) { return find_world(from(variables)); }
std::string refusal_of(const Variables& variables) {
  try {
    world_of(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "nothing";
}

const Variables kRun{{"LIGHTCC_JOB_ID", "j7"},
                     {"HOROVOD_RANK", "1"},
                     {"HOROVOD_SIZE", "3"},
                     {"HOROVOD_LOCAL_RANK", "1"},
                     {"HOROVOD_LOCAL_SIZE", "3"}};
const Variables kTorch{{"TORCHELASTIC_RUN_ID", "none"},
                       {"RANK", "1"},
                       {"WORLD_SIZE", "3"},
                       {"LOCAL_RANK", "1"},
                       {"LOCAL_WORLD_SIZE", "3"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", "29500"},
                       {"TORCHELASTIC_RESTART_COUNT", "0"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                         {"PMIX_NAMESPACE", "prterun-9"}};
const Variables kPmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}};
const Variables kSlurm{
    {"SLURM_PROCID", "1"},  {"SLURM_NTASKS", "3"},  {"SLURM_STEP_NUM_TASKS", "3"}, {"SLURM_JOB_ID", "77"},
    {"SLURM_STEP_ID", "0"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "0"},         {"SLURM_STEP_TASKS_PER_NODE", "3"}};
const Variables kHorovod{
    {"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "3"}, {"HOROVOD_LOCAL_RANK", "1"}, {"HOROVOD_LOCAL_SIZE", "3"}};
const Variables kMaster{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}, {"RANK", "1"},
                        {"WORLD_SIZE", "3"},          {"LOCAL_RANK", "1"},      {"LOCAL_WORLD_SIZE", "3"}};

Variables with(Variables variables, const Variables& changed) {
  for (auto& [name, value] : changed) variables[name] = value;
  return variables;
}
Variables without(Variables variables, std::initializer_list<const char*> names) {
  for (const char* name : names) variables.erase(name);
  return variables;
}

TEST(World, EachLauncherIsUnderstood) {
  const std::pair<const char*, Variables> rows[] = {
      {"lightccrun", kRun}, {"torchrun", kTorch},       {"Open MPI", kOpenMpi},  {"PMI", kPmi},
      {"Slurm", kSlurm},    {"HOROVOD_RANK", kHorovod}, {"MASTER_ADDR", kMaster}};
  for (auto& [launcher, variables] : rows) {
    SCOPED_TRACE(launcher);
    const World world = world_of(variables);
    EXPECT_EQ(world.launcher, launcher);
    EXPECT_EQ(world.rank, 1);
    EXPECT_EQ(world.size, 3);
    EXPECT_EQ(world.local_rank, 1);
    EXPECT_EQ(world.local_size, 3);
    EXPECT_TRUE(world.one_host());
    EXPECT_EQ(world.cross_rank, 0);
    EXPECT_EQ(world.cross_size, 1);
    EXPECT_FALSE(world.job.empty());
    EXPECT_FALSE(world.host.empty());
  }
}

TEST(World, SeveralHostsAreFine) {
  const World world =
      world_of(with(kRun, {{"HOROVOD_RANK", "2"}, {"HOROVOD_LOCAL_RANK", "0"}, {"HOROVOD_LOCAL_SIZE", "1"}}));
  EXPECT_EQ(world.rank, 2);
  EXPECT_EQ(world.local_rank, 0);
  EXPECT_EQ(world.local_size, 1);
  EXPECT_FALSE(world.one_host());
}

TEST(World, WhoSharesAHostIsUnknownWhereTheLauncherDoesNotSay) {
  for (auto& variables :
       {without(kHorovod, {"HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"}), without(kMaster, {"LOCAL_WORLD_SIZE"}),
        without(kPmi, {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"}), without(kSlurm, {"SLURM_STEP_TASKS_PER_NODE"}),
        with(without(kRun, {"HOROVOD_LOCAL_RANK"}), {{"HOROVOD_LOCAL_SIZE", "2"}})}) {
    const World world = world_of(variables);
    SCOPED_TRACE(world.launcher);
    EXPECT_EQ(world.rank, 1);
    EXPECT_EQ(world.local_size, 0);
    EXPECT_EQ(world.local_rank, 0);
    EXPECT_FALSE(world.one_host());
  }
  EXPECT_TRUE(world_of({{"HOROVOD_RANK", "0"}, {"HOROVOD_SIZE", "1"}}).one_host());
}

TEST(World, SlurmIsBelievedInsideAStepOnly) {
  for (auto& variables : {with(without(kSlurm, {"SLURM_STEP_ID"}), {{"SLURM_PROCID", "0"}}),  // a batch script
                          without(kSlurm, {"SLURM_STEP_ID", "SLURM_PROCID"}),  // salloc's shell
                          with(kSlurm, {{"SLURM_STEP_ID", "4294967291"}}),  // the batch step
                          with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}}),  // the interactive step
                          with(kSlurm, {{"SLURM_STEP_ID", "extern"}}),
                          with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "1"}}),  // SLURM_NTASKS is the allocation's
                          with(without(kSlurm, {"SLURM_JOB_ID", "SLURM_STEP_ID"}), {{"SLURM_PROCID", "0"}})})
    EXPECT_EQ(world_of(variables).launcher, "none");
  EXPECT_EQ(world_of(without(kSlurm, {"SLURM_STEP_NUM_TASKS"})).launcher, "Slurm");
  const World world = world_of(with(kSlurm, {{"SLURM_NTASKS", "5"},
                                             {"SLURM_STEP_NUM_TASKS", "5"},
                                             {"SLURM_NODEID", "1"},
                                             {"SLURM_STEP_TASKS_PER_NODE", "1,2(x2)"}}));
  EXPECT_EQ(world.local_size, 2);
  EXPECT_NE(world.job, world_of(with(kSlurm, {{"SLURM_STEP_ID", "1"}})).job);
}

TEST(World, NothingSetIsAWorldOfOne) {
  const World world = world_of({});
  EXPECT_EQ(world.launcher, "none");
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.size, 1);
}

TEST(World, TheLauncherNearestToTheProcessIsBelieved) {
  Variables nested = kOpenMpi;  // torchrun started under mpirun
  nested["OMPI_COMM_WORLD_RANK"] = "2";
  nested.insert(kTorch.begin(), kTorch.end());
  EXPECT_EQ(world_of(nested).launcher, "torchrun");
  EXPECT_FALSE(is_nested(from(nested)));
  // lightccrun takes the others' variables away, and sets torchrun's but for its mark.
  Variables run = with(kRun, {{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "3"},
                              {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
  run.insert(kSlurm.begin(), kSlurm.end());  // which a whole allocation has
  EXPECT_EQ(world_of(run).launcher, "lightccrun");
  EXPECT_FALSE(is_nested(from(run)));
  EXPECT_EQ(nesting_remark(from(run)), "");
}

TEST(World, ALauncherInsideARankOfLightccrunIsBelievedAndRemarkedUpon) {
  const std::pair<const char*, Variables> rows[] = {{"torchrun", kTorch}, {"Open MPI", kOpenMpi}, {"PMI", kPmi}};
  for (auto& [launcher, variables] : rows) {
    SCOPED_TRACE(launcher);
    Variables both = with(variables, {{"LIGHTCC_JOB_ID", "j7"}, {"HOROVOD_RANK", "0"}, {"HOROVOD_SIZE", "2"}});
    const World world = world_of(both);
    EXPECT_EQ(world.launcher, launcher);
    EXPECT_EQ(world.rank, 1);
    EXPECT_EQ(world.size, 3);
    EXPECT_TRUE(is_nested(from(both)));
    const std::string remark = nesting_remark(from(both));
    EXPECT_TRUE(contains(remark, "inside rank 0 of the 2 that lightccrun has started")) << remark;
    EXPECT_TRUE(contains(remark, "the 3 ranks of the inner launcher")) << remark;
    EXPECT_TRUE(contains(remark, "env -u LIGHTCC_JOB_ID")) << remark;
    EXPECT_EQ(nesting_remark(from(with(both, {{"HOROVOD_RANK", "1"}}))), "");  // it is said once
    both["HOROVOD_SIZE"] = "1";  // there is one world
    EXPECT_EQ(nesting_remark(from(both)), "");
    EXPECT_EQ(world_of(both).launcher, launcher);
  }
}

TEST(World, HalfOfWhatALauncherSetsIsRefused) {
  const std::tuple<Variables, const char*, const char*, const char*> rows[] = {
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "RANK=0 WORLD_SIZE=2", "MASTER_ADDR and MASTER_PORT", "torchrun"},
      {{{"WORLD_SIZE", "2"}}, "WORLD_SIZE=2", "RANK and MASTER_ADDR", "torchrun"},
      {{{"MASTER_ADDR", "127.0.0.1"}, {"RANK", "1"}}, "RANK=1", "WORLD_SIZE and MASTER_PORT", "torchrun"},
      {without(kMaster, {"MASTER_PORT"}), "WORLD_SIZE=3", "MASTER_PORT", "torchrun"},
      {without(kTorch, {"RANK"}), "WORLD_SIZE=3", "RANK", "torchrun"},
      {{{"HOROVOD_SIZE", "4"}}, "HOROVOD_SIZE=4", "HOROVOD_RANK", "lightccrun"},
      {{{"HOROVOD_RANK", "1"}}, "HOROVOD_RANK=1", "HOROVOD_SIZE", "lightccrun"},
      {without(kRun, {"HOROVOD_RANK"}), "HOROVOD_SIZE=3", "HOROVOD_RANK", "lightccrun"},
      {without(kOpenMpi, {"OMPI_COMM_WORLD_SIZE"}), "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE", "mpirun"},
      {without(kOpenMpi, {"OMPI_COMM_WORLD_RANK"}), "OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_RANK", "mpirun"},
      {without(kPmi, {"PMI_RANK"}), "PMI_SIZE=3", "PMI_RANK", "mpiexec"},
      {without(kPmi, {"PMI_SIZE"}), "PMI_RANK=1", "PMI_SIZE", "mpiexec"},
      {without(kSlurm, {"SLURM_PROCID"}), "SLURM_NTASKS=3", "SLURM_PROCID", "srun"},
      {without(kSlurm, {"SLURM_NTASKS"}), "SLURM_PROCID=1", "SLURM_NTASKS", "srun"},
      {without(kSlurm, {"SLURM_STEP_ID"}), "SLURM_PROCID=1", "SLURM_STEP_ID", "srun"},
      {without(kSlurm, {"SLURM_JOB_ID"}), "SLURM_PROCID=1", "SLURM_JOB_ID", "srun"}};
  for (auto& [variables, there, missing, set_by] : rows) {
    const std::string text = refusal_of(variables);
    SCOPED_TRACE(text);
    EXPECT_TRUE(contains(text, there));
    EXPECT_TRUE(contains(text, std::string("but ") + missing));
    EXPECT_TRUE(contains(text, set_by));
  }
}

TEST(World, VariablesThatSayNothingOfOthersAreAWorldOfOne) {
  for (const Variables& variables :
       {Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, Variables{{"RANK", "gold"}}, Variables{{"RANK", "0"}},
        Variables{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}, Variables{{"LIGHTCC_JOB_ID", "left over"}},
        Variables{{"LOCAL_RANK", "1"}}, Variables{{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "77"}},
        Variables{{"MASTER_ADDR", "h"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}}}) {
    EXPECT_EQ(world_of(variables).size, 1);
    EXPECT_EQ(world_of(variables).rank, 0);
  }
}

TEST(World, AMarkWithoutRankAndSizeIsPassedOver) {
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
  // Ranks may spell the master's address differently, and mpirun may set it on some hosts only.
  EXPECT_EQ(world_of(kTorch).job, world_of(with(kTorch, {{"MASTER_ADDR", "localhost"}})).job);
  EXPECT_EQ(world_of(kOpenMpi).job, world_of(with(kOpenMpi, {{"MASTER_ADDR", "h1"}, {"MASTER_PORT", "1"}})).job);
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

TEST(World, ASubsetIsAWorldOfItsOwn) {
  World four = world_of(kRun);
  four.size = four.local_size = 4, four.rank = four.local_rank = 2;
  const World part = subset(four, {2, 0});
  EXPECT_EQ(part.rank, 0);
  EXPECT_EQ(part.size, 2);
  EXPECT_EQ(part.local_rank, 0);
  EXPECT_EQ(part.local_size, 2);
  EXPECT_EQ(part.launched_rank(0), 2);
  EXPECT_EQ(part.launched_rank(1), 0);
  EXPECT_EQ(part.launcher, four.launcher);
  EXPECT_NE(part.job, four.job);
  EXPECT_NE(part.job, subset(four, {0, 2}).job);
  EXPECT_NE(part.job, subset(four, {1, 2}).job);
  const World again = subset(part, {0});  // of the subset's ranks
  EXPECT_EQ(again.launched_rank(0), 2);

  four.local_size = 2, four.local_rank = 0;  // on two hosts: the list does not say who shares one
  EXPECT_FALSE(subset(four, {2, 0}).one_host());
  EXPECT_EQ(subset(four, {2, 0}).local_size, 0);
  EXPECT_TRUE(subset(four, {2}).one_host());
}

TEST(World, ASubsetMustBeAListOfRanksWithThisOne) {
  const World world = world_of(kRun);  // rank 1 of 3
  const std::pair<std::vector<int>, const char*> rows[] = {{{0, 2}, "init(comm=[0, 2]): rank 1 on host "},
                                                           {{}, "init(comm=[]): a list of different ranks"},
                                                           {{1, 1}, "different ranks of this job (0 to 2)"},
                                                           {{1, 3}, "(0 to 2)"},
                                                           {{-1, 1}, "(0 to 2)"}};
  for (auto& [ranks, expected] : rows) {
    try {
      subset(world, ranks);
      ADD_FAILURE() << expected;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      EXPECT_TRUE(contains(error.what(), expected)) << error.what();
    }
  }
}

}  // namespace
}  // namespace lightcc
