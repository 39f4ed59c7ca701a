// docs/knobs.md: the table of knobs, that of variables without effect, and what launchers set.
#include "base/config.h"
#include "base/ignored_knobs.h"
#include "base/known_variables.h"

namespace lightcc {
namespace {

constexpr const char* kWorldVariables = R"(
## Who takes part

Launchers say which rank a process is; these are read, not set by hand. The first row whose variables are
set is believed; if none is, the process is a world of one.

| launcher | recognised by | rank and size | on this host |
| --- | --- | --- | --- |
| lightccrun | `LIGHTCC_JOB_ID` | `HOROVOD_RANK`, `HOROVOD_SIZE` | `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE` |
| torchrun | `TORCHELASTIC_RUN_ID` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
| Open MPI | `OMPI_COMM_WORLD_RANK` | `…_RANK`, `…_SIZE` | `…_LOCAL_RANK`, `…_LOCAL_SIZE` |
| MPICH, Intel MPI | `PMI_RANK` | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
| Slurm (srun) | `SLURM_STEP_ID` | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
| Horovod's own | `HOROVOD_RANK` | the same as lightccrun | the same as lightccrun |
| torch.distributed | `MASTER_ADDR`, `MASTER_PORT` | the same as torchrun | the same as torchrun |

Slurm's row counts only in a process that srun started: a step that is none of Slurm's own, and `SLURM_STEP_NUM_TASKS`,
if set, equal to `SLURM_NTASKS`. The shell of `salloc` and a batch script are worlds of one.

lightccrun also sets torchrun's variables but for its mark, and takes other launchers' marks away. So a mark of
torchrun, Open MPI or PMI beside lightccrun's is that of a launcher inside one of its ranks, and comes first. A process
that no row fits is refused if a rank above 0 or a size above 1 is set and what else its row needs is not.

lightccrun also sets `HOROVOD_CROSS_RANK` and `HOROVOD_CROSS_SIZE` (this host among the hosts) and `HOROVOD_HOSTNAME`
(its name as listed) for scripts that read them; the core itself finds out who shares a host (`LIGHTCC_HOST_ID`).
lightccrun gives every job its own `LIGHTCC_JOB_ID`, by which its ranks find each other, and every rank
`LIGHTCC_LAUNCHER_FD`, a socket by which `init()` hears that a rank that it waits for has ended. In an elastic job it
sets `HOROVOD_ELASTIC=1`, and `LIGHTCC_DRIVER_FD` to a socket by which `init()` asks who the others are; the variables
above stay what they were when the worker was started. `HOROVOD_ELASTIC_TIMEOUT` is the default of its
`--elastic-timeout`. `HOROVOD_SPARK_START_TIMEOUT` is that of `lightcc.spark.run(start_timeout=...)`, else 600 s.

`lightccrun --jax` sets `LIGHTCC_JAX=1` ([jax.md](jax.md)); a rank of JAX then keeps its own place there, by which the
processes that it starts know that they are no ranks. `import lightcc.jax` reads two variables of others, and leaves
what is set: `JAX_CPU_COLLECTIVES_IMPLEMENTATION`, else `mpi`, and `MPITRAMPOLINE_LIB`, else the path of
`liblightcc_jax.so`.

## How ranks on several hosts meet

If the launcher says that all ranks are on one host, they meet there and no port is opened. Else rank 0 listens and the
first of these that fits says where; if none does and it is not known who shares a host, all ranks are taken to be on
one.

| method | needs | rank 0 listens on |
| --- | --- | --- |
| address | `LIGHTCC_STORE_ADDR` | that port, or the next free one of 15 more |
| PMI | MPICH's or Intel MPI's mpiexec (`PMI_FD`) | any free port |
| PMIx | Open MPI's mpirun, libpmix.so.2 | any free port |
| master | `MASTER_ADDR`, `MASTER_PORT` (torchrun and many others) | the first free one of the 16 after `MASTER_PORT` |
| Slurm | `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST` | one of 16 between 20000 and 40015, by job and step |

`LIGHTCC_PORT_RANGE` replaces the ports of all methods but the first.

Every connection begins with a proof that both ends know the job's secret: `LIGHTCC_SECRET` if it is set (on all ranks,
any text; a random one of 32 characters is good), else `HOROVOD_SECRET_KEY`, else under PMI and PMIx a random one that
rank 0 draws for each init and hands out through the launcher. The other methods have nothing to hand it out with:
they use the job's name, which keeps jobs apart but can be guessed by others who reach the port.

## Nothing to configure when building

These steer how Horovod is compiled. lightcc is compiled in one way, which depends on no framework, MPI or CUDA, so its
setup reads none of them, and `lightccrun --check-build` says what can be used: )";

constexpr const char* kForDevelopers = R"(
## For work on lightcc itself

`LIGHTCC_LIBRARY` is the path of the library that `import lightcc` loads instead of the one in the package.
)";

}  // namespace

std::string knobs_markdown() {
  std::string text =
      "# Knobs\n\n"
      "Environment variables that lightcc reads. This page is generated from `csrc/base/config.cc`: build the target\n"
      "`knobs` and redirect its output here. Sizes are bytes, times seconds (fractions allowed), switches 0 or 1\n"
      "(true, false, yes, no, on and off are understood too). More than 1e9 seconds count as 1e9. An empty value\n"
      "counts as not set; one that cannot be read is an error in init that names the variable. Of a variable that\n"
      "begins as these do and is none of them, rank 0 says so at init, with the nearest name that is.\n"
      "`lightcc_describe(\"knobs\")` tells the values in force.\n\n"
      "| variable | default | meaning |\n| --- | --- | --- |\n";
  for (const KnobRow& knob : knob_rows()) {
    text += std::string("| `") + knob.name + "` | " + (knob.fallback.empty() ? "(none)" : knob.fallback);
    text += std::string(" | ") + knob.help + " |\n";
  }
  text +=
      "\n## Without effect in this version\n\n"
      "Known from Horovod or LightCC. Setting one is harmless; rank 0 says in the log that it has no effect, unless\n"
      "it is a switch that asks for what happens anyway.\n\n"
      "| variable | why |\n| --- | --- |\n";
  for (const IgnoredKnob& knob : kIgnoredKnobs) text += std::string("| `") + knob.name + "` | " + knob.reason + " |\n";
  text += kWorldVariables;
  for (const char* name : kBuildVariables)
    text += (name == kBuildVariables.front() ? "`" : ", `") + std::string(name) + "`";
  return text + ".\n" + kForDevelopers;
}

}  // namespace lightcc
