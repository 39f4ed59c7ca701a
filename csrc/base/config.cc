// The two tables: knobs that do something, and variables that have no effect in this version, with the
// reason. Reading, docs/knobs.md and the list of values in force are all made from them.
#include "base/config.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace lightcc {
namespace {

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

constexpr const char* kLevels[] = {"trace", "debug", "info", "warning", "error", "fatal"};

// A variable's text and what it may be read as.
struct Value {
  const char* name;
  std::string text;

  [[noreturn]] void refuse(const std::string& expected) const {
    throw Error(Code::invalid_argument, std::string(name) + "=" + text + ": expected " + expected +
                                            "; correct it or unset it (docs/knobs.md)");
  }
  template <class T>
  bool parse(T& value) const {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    return error == std::errc() && stop == end;
  }
  int64_t whole(int64_t least, int64_t most, const std::string& expected) const {
    int64_t value = 0;
    if (!parse(value) || value < least || value > most) refuse(expected);
    return value;
  }
  double seconds() const {
    double value = 0;
    if (!parse(value) || !std::isfinite(value) || value < 0) refuse("seconds, 0 or more");
    return value;
  }
  bool flag() const {
    const std::string word = lower(text);
    for (const char* yes : {"1", "true", "yes", "on"}) {
      if (word == yes) return true;
    }
    for (const char* no : {"0", "false", "no", "off"}) {
      if (word == no) return false;
    }
    refuse("0 or 1 (or true, false, yes, no, on, off)");
  }
  int level() const {
    const std::string word = lower(text);
    for (int i = 0; i < 6; ++i) {
      if (word == kLevels[i] || word == std::to_string(i)) return i;
    }
    refuse("trace, debug, info, warning, error, fatal, or 0 to 5");
  }
};

std::string text_of(bool flag) { return flag ? "1" : "0"; }

std::string text_of(double number) {  // the shortest text that reads back as the same number
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, number);
  return std::string(text, end);
}

struct Knob {
  const char* name;
  const char* help;
  void (*set)(Config&, const Value&);
  std::string (*get)(const Config&);
};

constexpr int kIntMax = std::numeric_limits<int>::max();

const Knob kKnobs[] = {
    {"HOROVOD_FUSION_THRESHOLD",
     "Most bytes that travel as one fused collective. 0 is noted and ignored: many command lines carry it, and "
     "fusion here costs no waiting; LIGHTCC_FUSION=0 is what turns it off.",
     [](Config& c, const Value& v) {
       c.fusion_bytes = v.whole(0, std::numeric_limits<int64_t>::max(), "bytes, 0 or more");
     },
     [](const Config& c) { return std::to_string(c.fusion_bytes); }},
    {"LIGHTCC_FUSION", "0: every tensor travels alone. For comparisons and for finding faults.",
     [](Config& c, const Value& v) { c.fusion = v.flag(); }, [](const Config& c) { return text_of(c.fusion); }},
    {"HOROVOD_CACHE_CAPACITY",
     "Requests remembered for each process set; one that is remembered needs no negotiation of its shape. 0: none.",
     [](Config& c, const Value& v) {
       c.cache_capacity = static_cast<int>(v.whole(0, kIntMax, "a number of requests, 0 or more"));
     },
     [](const Config& c) { return std::to_string(c.cache_capacity); }},
    {"HOROVOD_STALL_CHECK_TIME_SECONDS",
     "Warn about a tensor that some ranks have submitted and others have not for so long.",
     [](Config& c, const Value& v) { c.stall_warn_s = v.seconds(); },
     [](const Config& c) { return text_of(c.stall_warn_s); }},
    {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "End the job on all ranks when such a tensor has waited so long. 0: never.",
     [](Config& c, const Value& v) { c.stall_end_s = v.seconds(); },
     [](const Config& c) { return text_of(c.stall_end_s); }},
    {"HOROVOD_STALL_CHECK_DISABLE", "1: neither warn about stalls nor end them.",
     [](Config& c, const Value& v) { c.stall_check = !v.flag(); },
     [](const Config& c) { return text_of(!c.stall_check); }},
    {"HOROVOD_START_TIMEOUT",
     "Seconds that init waits for the other ranks before it names the ones that did not come.",
     [](Config& c, const Value& v) { c.start_timeout_s = v.seconds(); },
     [](const Config& c) { return text_of(c.start_timeout_s); }},
    {"LIGHTCC_SELECT",
     "Forces the backend or algorithm of a kind of collective: `allreduce=ring,broadcast=binomial`. Must be the same "
     "on all ranks.",
     [](Config& c, const Value& v) { c.select = v.text; }, [](const Config& c) { return c.select; }},
    {"HOROVOD_LOG_LEVEL",
     "Lowest level that is written to stderr: trace, debug, info, warning, error, fatal, or 0 to 5.",
     [](Config& c, const Value& v) { c.log_level = v.level(); },
     [](const Config& c) { return std::string(kLevels[c.log_level]); }},
    {"HOROVOD_LOG_HIDE_TIME", "1: log lines carry no time.",
     [](Config& c, const Value& v) { c.log_hide_time = v.flag(); },
     [](const Config& c) { return text_of(c.log_hide_time); }},
    {"HOROVOD_TIMELINE",
     "File in which rank 0 writes what it did and when, for chrome://tracing; every rank, if the path has `{rank}` in "
     "it. DYNAMIC: none until `start_timeline` is called (docs/timeline.md).",
     [](Config& c, const Value& v) { c.timeline = v.text; }, [](const Config& c) { return c.timeline; }},
    {"HOROVOD_TIMELINE_MARK_CYCLES", "1: the timeline also marks every batch that the ranks agreed to run.",
     [](Config& c, const Value& v) { c.timeline_mark_cycles = v.flag(); },
     [](const Config& c) { return text_of(c.timeline_mark_cycles); }},
    {"LIGHTCC_SPIN_US",
     "Microseconds that a wait spins before it yields and then sleeps. -1: at most 20 if every rank of the host has a "
     "core, else 0.",
     [](Config& c, const Value& v) {
       c.spin_us = static_cast<int>(v.whole(-1, kIntMax, "microseconds, or -1 to choose by cores and ranks"));
     },
     [](const Config& c) { return std::to_string(c.spin_us); }}};

struct Idle {
  const char* name;
  const char* reason;
};

constexpr const char* kNoCycle = "there is no cycle: a request is acted on when it is submitted";
constexpr const char* kNoTuner = "nothing is tuned at run time; see LIGHTCC_SELECT and HOROVOD_FUSION_THRESHOLD";
constexpr const char* kOneHost = "it runs on one host, where there is no hierarchy";
constexpr const char* kCpuOnly = "it runs on CPU tensors only";
constexpr const char* kOwnTransport = "it has its own transport and uses neither MPI nor Gloo nor oneCCL";
constexpr const char* kNoTopk = "it has no Top-K compression; gradients travel dense";

constexpr Idle kIdle[] = {
    {"HOROVOD_CYCLE_TIME", kNoCycle},
    {"HOROVOD_AUTOTUNE", kNoTuner},
    {"HOROVOD_AUTOTUNE_LOG", kNoTuner},
    {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", kNoTuner},
    {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", kNoTuner},
    {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", kNoTuner},
    {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", kNoTuner},
    {"HOROVOD_HIERARCHICAL_ALLREDUCE", kOneHost},
    {"HOROVOD_HIERARCHICAL_ALLGATHER", kOneHost},
    {"HOROVOD_TORUS_ALLREDUCE", kOneHost},
    {"HOROVOD_THREAD_AFFINITY", "a waiting caller drives its own request, so no one thread is worth binding"},
    {"HOROVOD_NUM_NCCL_STREAMS", kCpuOnly},
    {"HOROVOD_BATCH_D2D_MEMCOPIES", kCpuOnly},
    {"HOROVOD_ENABLE_ASYNC_COMPLETION", kCpuOnly},
    {"HOROVOD_ENABLE_XLA_OPS", "it registers no XLA kernels"},
    {"HOROVOD_DISABLE_NVTX_RANGES", "it emits no NVTX ranges"},
    {"HOROVOD_DISABLE_GROUP_FUSION", "a group may always be fused with other tensors; see LIGHTCC_FUSION"},
    {"HOROVOD_DYNAMIC_PROCESS_SETS", "process sets can always be added and removed after init, at no cost a cycle"},
    {"HOROVOD_ADASUM_MPI_CHUNK_SIZE", kOwnTransport},
    {"HOROVOD_CPU_OPERATIONS", kOwnTransport},
    {"HOROVOD_CONTROLLER", kOwnTransport},
    {"HOROVOD_MPI_THREADS_DISABLE", kOwnTransport},
    {"HOROVOD_CCL_CACHE", kOwnTransport},
    {"HOROVOD_GLOO_IFACE", "it runs on one host and opens no network interface"},
    {"HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_START_TIMEOUT bounds init, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS a stall"},
    {"LIGHT_2D_ALLREDUCE", kOneHost},
    {"LIGHT_INTRA_SIZE", kOneHost},
    {"LIGHT_HIERARCHICAL_THRESHOLD", kOneHost},
    {"LIGHT_TOPK_ALLREDUCE", kNoTopk},
    {"LIGHT_TOPK_RATIO", kNoTopk},
    {"LIGHT_TOPK_THRESHOLD", kNoTopk},
    {"LIGHT_TOPK_FP16", kNoTopk}};

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
| Horovod's own | `HOROVOD_RANK` | the same as lightccrun | the same as lightccrun |
| torch.distributed | `MASTER_ADDR` | the same as torchrun | the same as torchrun |

lightccrun also sets `HOROVOD_CROSS_RANK` and `HOROVOD_CROSS_SIZE` (this host among the hosts) for scripts that
read them, and gives every job its own `LIGHTCC_JOB_ID`, by which its ranks find each other.

## For work on lightcc itself

`LIGHTCC_LIBRARY` is the path of the library that `import lightcc` loads instead of the one in the package.
)";

const char* text_if_set(const Environment& env, const char* name) {
  const char* text = env(name);
  return text && *text ? text : nullptr;  // NAME= in a shell script means "not set"
}

}  // namespace

Config read_config(const Environment& env, std::string* notes) {
  Config config;
  std::string found;
  auto note = [&](const std::string& line) { found += (found.empty() ? "" : "\n") + line; };
  for (const Knob& knob : kKnobs) {
    if (const char* text = text_if_set(env, knob.name)) knob.set(config, Value{knob.name, text});
  }
  if (config.fusion_bytes == 0) {
    config.fusion_bytes = Config{}.fusion_bytes;
    note("HOROVOD_FUSION_THRESHOLD=0 is ignored: fusion costs no waiting here; LIGHTCC_FUSION=0 turns it off");
  }
  for (const Idle& idle : kIdle) {
    if (const char* text = text_if_set(env, idle.name)) {
      note(std::string(idle.name) + "=" + text + " has no effect in this version: " + idle.reason);
    }
  }
  if (notes) *notes = found;
  return config;
}

std::string knobs_markdown() {
  std::string text =
      "# Knobs\n\n"
      "Environment variables that lightcc reads. This page is generated from `csrc/base/config.cc`: build the target\n"
      "`knobs` and redirect its output here. Sizes are bytes, times seconds (fractions allowed), switches 0 or 1\n"
      "(true, false, yes, no, on and off are understood too). An empty value counts as not set; one that cannot be\n"
      "read is an error in init that names the variable. `lightcc_describe(\"knobs\")` tells the values in force.\n\n"
      "| variable | default | meaning |\n| --- | --- | --- |\n";
  for (const Knob& knob : kKnobs) {
    const std::string fallback = knob.get(Config{});
    text += std::string("| `") + knob.name + "` | " + (fallback.empty() ? "(none)" : fallback);
    text += std::string(" | ") + knob.help + " |\n";
  }
  text +=
      "\n## Without effect in this version\n\n"
      "Known from Horovod or LightCC. Setting one is harmless; rank 0 says in the log that it has no effect.\n\n"
      "| variable | why |\n| --- | --- |\n";
  for (const Idle& idle : kIdle) text += std::string("| `") + idle.name + "` | " + idle.reason + " |\n";
  return text + kWorldVariables;
}

std::string knobs_text(const Config& config) {
  std::string text;
  for (const Knob& knob : kKnobs) text += std::string(knob.name) + "=" + knob.get(config) + "\n";
  return text;
}

}  // namespace lightcc
