#include "net/bootstrap/world.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "base/text.h"
#include "base/types.h"
#include "net/bootstrap/slurm.h"

namespace lightcc {
namespace {

// The variables of one launcher. Each must say rank and size; where the local ones are missing, it is not known which
// ranks share a host.
struct Launcher {
  const char* name;
  const char* mark;  // set by this launcher and no other
  const char *rank, *size, *local_rank, *local_size;
  std::string (*job)(const Environment&);  // what only its ranks share; empty: their parent process
  const char* set_by;  // for people who have set some of them
  std::vector<const char*> more = {};  // which it sets too, without which the ranks cannot be found
};

std::string text(const Environment& env, const char* name) { return env(name) ? env(name) : ""; }

int number(const Environment& env, const char* name, int fallback) {
  const char* text = name ? env(name) : nullptr;
  if (!text || !*text) return fallback;
  int value = 0;
  auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end || value < 0)
    throw Error(Code::invalid_argument, std::string(name) + "=" + shown(text) + " is not a rank or size");
  return value;
}

std::string no_job(const Environment&) { return ""; }
std::string lightcc_job(const Environment& env) { return text(env, "LIGHTCC_JOB_ID"); }
// One run id for ever by default, so torch's port and the restart tell jobs apart. Not its address, which ranks may
// spell differently.
std::string torch_job(const Environment& env) {
  return text(env, "TORCHELASTIC_RUN_ID") + ":" + text(env, "MASTER_PORT") + "/" +
         text(env, "TORCHELASTIC_RESTART_COUNT");
}
std::string open_mpi_job(const Environment& env) {
  const std::string name = text(env, "PMIX_NAMESPACE");
  return name.empty() ? text(env, "OMPI_MCA_ess_base_jobid") : name;
}
std::string slurm_job(const Environment& env) {
  return "slurm-" + text(env, "SLURM_JOB_ID") + "." + text(env, "SLURM_STEP_ID");
}
std::string master_job(const Environment& env) { return "master:" + text(env, "MASTER_PORT"); }

const Launcher kLaunchers[] = {
    {"lightccrun", "LIGHTCC_JOB_ID", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     lightcc_job, "lightccrun"},
    {"torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", torch_job, "torchrun"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", open_mpi_job, "Open MPI's mpirun"},
    {"PMI", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", no_job,
     "mpiexec of MPICH or Intel MPI"},
    {"Slurm", "SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", nullptr, nullptr, slurm_job, "srun",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", no_job,
     "lightccrun"},
    {"MASTER_ADDR", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", master_job,
     "torchrun or lightccrun", {"MASTER_ADDR", "MASTER_PORT"}}};

// Whether this is in a step that a user's srun has begun. In the shell of salloc and in a batch script the variables
// speak of the allocation: there is no step, or it is one of the special ones at the end of the range.
bool is_slurm_step(const Environment& env) {
  constexpr uint32_t kFirstSpecialStep = 0xfffffff0;
  const std::string step = text(env, "SLURM_STEP_ID");
  uint32_t id = 0;
  auto [end, error] = std::from_chars(step.data(), step.data() + step.size(), id);
  return !step.empty() && error == std::errc() && end == step.data() + step.size() && id < kFirstSpecialStep;
}

// Whether Slurm started this very process as a task of a step.
bool is_slurm_task(const Environment& env) {
  const std::string tasks = text(env, "SLURM_STEP_NUM_TASKS");
  if (!is_slurm_step(env)) return false;
  return !text(env, "SLURM_JOB_ID").empty() && (tasks.empty() || tasks == text(env, "SLURM_NTASKS"));
}

// Slurm tells the tasks of every node of the step: "2(x3),1".
void read_slurm_locals(const Environment& env, World& world) {
  world.local_rank = number(env, "SLURM_LOCALID", 0);
  world.local_size = 0;
  const std::string tasks = text(env, "SLURM_STEP_TASKS_PER_NODE");
  if (tasks.empty() || text(env, "SLURM_NODEID").empty() || text(env, "SLURM_LOCALID").empty()) return;
  const std::vector<int> counts = tasks_per_node(tasks);
  const int node = number(env, "SLURM_NODEID", 0);
  if (node < int(counts.size())) world.local_size = counts[size_t(node)];
}

// The launcher process that started this rank and its start time: the same for all ranks it started on this host, and
// never the same again on this boot.
std::string parent_job() {
  std::ifstream file("/proc/" + std::to_string(getppid()) + "/stat");
  std::string stat((std::istreambuf_iterator<char>(file)), {});
  size_t field = stat.rfind(')');  // the command's name may hold spaces
  for (int i = 0; i < 20 && field != std::string::npos; ++i) field = stat.find(' ', field + 1);
  std::string start = field == std::string::npos ? "" : stat.substr(field + 1, stat.find(' ', field + 1) - field - 1);
  return "parent-" + std::to_string(getppid()) + "-" + start;
}

void check(const World& world) {
  const bool locals = world.local_size != 0;
  if (world.rank < world.size && world.local_size <= world.size && (!locals || world.local_rank < world.local_size))
    return;
  std::string says = world.launcher + " says rank " + std::to_string(world.rank) + " of " + std::to_string(world.size);
  if (locals) says += ", local rank " + std::to_string(world.local_rank) + " of " + std::to_string(world.local_size);
  throw Error(Code::invalid_argument, says + "; unset what was left over from another job");
}

bool is_set(const Environment& env, const char* name) { return env(name) && *env(name); }

bool fits(const Launcher& launcher, const Environment& env) {
  if (!env(launcher.mark) || !env(launcher.rank) || !env(launcher.size)) return false;
  if (launcher.job == slurm_job) return is_slurm_task(env);
  return launcher.job != master_job || is_set(env, "MASTER_PORT") || number(env, launcher.size, 1) == 1;
}

// lightccrun takes out of its ranks' environment what other launchers have said, so what is there was said by one that
// a rank has started. Slurm's variables stay: a whole allocation has them.
const Launcher* inner_launcher(const Environment& env) {
  if (!fits(kLaunchers[0], env)) return nullptr;
  for (const Launcher& launcher : kLaunchers)
    if ((launcher.job == torch_job || launcher.job == open_mpi_job || launcher.name == std::string("PMI")) &&
        fits(launcher, env))
      return &launcher;
  return nullptr;
}

// How large a number a variable is; 0 if it is none. RANK may be anything in a program that has no ranks.
int value_of(const Environment& env, const char* name) {
  const std::string value = text(env, name);
  int found = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), found);
  return error == std::errc() && end == value.data() + value.size() ? found : 0;
}

// For a process that no launcher's row fits: it may be told that there are other ranks, and too little to find them. A
// world of one would then train beside the others, and overwrite what they save.
void refuse_halves(const Environment& env) {
  for (const Launcher& launcher : kLaunchers) {
    if (launcher.job == torch_job && !env(launcher.mark)) continue;  // they are those of the last row
    const bool slurm = launcher.job == slurm_job;  // whose allocations have a size for processes that are no tasks
    if (slurm && is_set(env, "SLURM_STEP_ID") && !is_slurm_step(env)) continue;
    const bool one_of_several = value_of(env, launcher.rank) > 0 ||
                                (value_of(env, launcher.size) > 1 && (!slurm || is_slurm_step(env)));
    if (!one_of_several) continue;
    std::vector<const char*> needed{launcher.rank, launcher.size};
    needed.insert(needed.end(), launcher.more.begin(), launcher.more.end());
    std::string there, missing;
    int missed = 0;
    for (const char* name : needed)
      if (is_set(env, name))
        there += (there.empty() ? "" : " ") + std::string(name) + "=" + shown(env(name));
      else
        missing += (missed++ ? " and " : "") + std::string(name);
    if (missed == 0) continue;
    throw Error(Code::invalid_argument, "init: " + there + " says that there are several ranks, but " + missing +
                                            (missed == 1 ? " is" : " are") + " not set, so they cannot meet. " +
                                            launcher.set_by + " sets all of these: start the ranks with it, or set "
                                            "what is missing on each; for a world of one unset what is there");
  }
}

}  // namespace

World find_world(const Environment& env) {
  World world;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  world.host = host;
  const Launcher* launcher = inner_launcher(env);
  if (!launcher)
    launcher = std::find_if(kLaunchers, std::end(kLaunchers), [&](const Launcher& one) { return fits(one, env); });
  if (launcher == std::end(kLaunchers)) {
    refuse_halves(env);
    return world;
  }
  const bool slurm = launcher->job == slurm_job;
  world.launcher = launcher->name;
  world.rank = number(env, launcher->rank, 0);
  world.size = number(env, launcher->size, 1);
  world.local_size = number(env, launcher->local_size, world.size == 1);
  world.local_rank = number(env, launcher->local_rank, world.one_host() ? world.rank : -1);
  if (slurm) read_slurm_locals(env, world);
  if (world.local_size == 0 || world.local_rank < 0) world.local_size = world.local_rank = 0;
  check(world);
  world.job = launcher->job(env);
  world.job_of_host = world.job.empty();
  if (world.job_of_host) world.job = parent_job();
  return world;
}

bool is_nested(const Environment& env) { return inner_launcher(env) != nullptr; }

std::string nesting_remark(const Environment& env) {
  const Launcher *inner = inner_launcher(env), &outer = kLaunchers[0];
  if (!inner || number(env, outer.size, 1) == 1 || number(env, outer.rank, 0) != 0) return "";
  return inner->set_by + std::string(" was started inside rank 0 of the ") + text(env, outer.size) +
         " that lightccrun has started. This world has the " + text(env, inner->size) +
         " ranks of the inner launcher, and knows nothing of those that other ranks of lightccrun start. If all are to "
         "train together, leave one of the launchers out: lightccrun -np N python ...; if this is meant, unset "
         "LIGHTCC_JOB_ID before the inner one: env -u LIGHTCC_JOB_ID ...";
}

World subset(const World& world, const std::vector<int>& ranks) {
  const std::string list = "init(comm=[" + text_of(ranks) + "])";
  auto refuse = [&](const std::string& why) { throw Error(Code::invalid_argument, list + ": " + why); };
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (ranks.empty() || sorted.front() < 0 || sorted.back() >= world.size ||
      std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    refuse("a list of different ranks of this job (0 to " + std::to_string(world.size - 1) + ") is expected");
  auto self = std::find(ranks.begin(), ranks.end(), world.rank);
  if (self == ranks.end())
    refuse("rank " + std::to_string(world.rank) + " on host " + world.host +
           " is not in the list; only the ranks of a list may call init with it");
  World part = world;
  part.rank = int(self - ranks.begin());
  part.size = int(ranks.size());
  part.members.clear();
  for (int rank : ranks) part.members.push_back(world.launched_rank(rank));
  const bool known = world.one_host() || part.size == 1;
  part.local_rank = known ? part.rank : 0;
  part.local_size = known ? part.size : 0;
  part.cross_rank = 0;
  part.cross_size = 1;
  part.job += "/ranks " + text_of(part.members);
  return part;
}

}  // namespace lightcc
