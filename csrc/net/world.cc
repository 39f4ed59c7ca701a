#include "net/world.h"

#include <unistd.h>

#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/error.h"

namespace lightcc {
namespace {

// The variables of one launcher. Each must say rank and size; the local ones default to one host.
struct Launcher {
  const char* name;
  const char* mark;  // set by this launcher and no other
  const char *rank, *size, *local_rank, *local_size;
  const char* job;  // a job id shared by its ranks; nullptr: it has none, its ranks are children of one process
};
constexpr Launcher kLaunchers[] = {
    {"lightccrun", "LIGHTCC_JOB_ID", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     "LIGHTCC_JOB_ID"},
    {"torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"PMI", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr},
    {"HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     nullptr},
    {"MASTER_ADDR", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr}};

int number(const Environment& env, const char* name, int fallback) {
  const char* text = env(name);
  if (!text || !*text) return fallback;
  int value = 0;
  auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end || value < 0)
    throw Error(Code::invalid_argument, std::string(name) + "=" + text + " is not a rank or size");
  return value;
}

// The launcher process that started this rank and its start time: the same for all ranks it started, and
// never the same again on this boot.
std::string parent_job() {
  std::ifstream file("/proc/" + std::to_string(getppid()) + "/stat");
  std::string stat((std::istreambuf_iterator<char>(file)), {});
  size_t field = stat.rfind(')');  // the command's name may hold spaces
  for (int i = 0; i < 20 && field != std::string::npos; ++i) field = stat.find(' ', field + 1);
  std::string start = field == std::string::npos ? "" : stat.substr(field + 1, stat.find(' ', field + 1) - field - 1);
  return "parent-" + std::to_string(getppid()) + "-" + start;
}

std::string job_of(const Environment& env, const Launcher& launcher) {
  auto text = [&](const char* name) { return std::string(env(name) ? env(name) : ""); };
  std::string id = launcher.job ? text(launcher.job) : "";
  if (id.empty() && launcher.name == std::string("Open MPI")) id = text("OMPI_MCA_ess_base_jobid");
  if (id.empty()) id = parent_job();
  // torchrun: one run id for ever by default, so the store's address and the restart tell jobs apart.
  return id + "/" + text("MASTER_ADDR") + ":" + text("MASTER_PORT") + "/" + text("TORCHELASTIC_RESTART_COUNT");
}

}  // namespace

World find_world(const Environment& env) {
  World world;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  world.host = host;
  for (const Launcher& launcher : kLaunchers) {
    if (!env(launcher.mark) || !env(launcher.rank) || !env(launcher.size)) continue;
    world.launcher = launcher.name;
    world.rank = number(env, launcher.rank, 0);
    world.size = number(env, launcher.size, 1);
    world.local_size = number(env, launcher.local_size, world.size);
    world.local_rank = number(env, launcher.local_rank, world.rank);
    if (world.rank >= world.size || world.local_rank >= world.local_size || world.local_size > world.size)
      throw Error(Code::invalid_argument,
                  world.launcher + std::string(" says rank ") + std::to_string(world.rank) + " of " +
                      std::to_string(world.size) + ", local rank " + std::to_string(world.local_rank) + " of " +
                      std::to_string(world.local_size) + "; unset what was left over from another job");
    world.job = job_of(env, launcher);
    break;
  }
  if (world.local_size != world.size)
    throw Error(Code::invalid_argument, "rank " + std::to_string(world.rank) + ": " + world.launcher + " started " +
                                            std::to_string(world.local_size) + " of " + std::to_string(world.size) +
                                            " ranks on host " + world.host + "; this version runs on one host");
  return world;
}

}  // namespace lightcc
