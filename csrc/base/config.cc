// The table of knobs that do something; beside it, in ignored_knobs.h, stands that of variables that have no effect.
// Reading, docs/knobs.md (knobs_page.cc) and the list of values in force are all made from them.
#include "base/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "base/ignored_knobs.h"
#include "base/text.h"

namespace lightcc {
namespace {

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

std::optional<bool> switch_of(const std::string& text) {
  const std::string word = lower(text);
  for (const char* yes : {"1", "true", "yes", "on"})
    if (word == yes) return true;
  for (const char* no : {"0", "false", "no", "off"})
    if (word == no) return false;
  return std::nullopt;
}

constexpr double kMostSeconds = 1e9;  // 31 years: added to any clock's nanoseconds they still fit 64 bits

constexpr size_t kMostValueBytes = 4096;  // as long as a path may be

constexpr const char* kLevels[] = {"trace", "debug", "info", "warning", "error", "fatal"};

// A variable's text and what it may be read as.
struct Setting {
  const char* name;
  std::string text;

  [[noreturn]] void refuse(const std::string& expected) const {
    throw Error(Code::invalid_argument, std::string(name) + "=" + shown(text) + ": expected " + expected +
                                            "; correct it or unset it (docs/knobs.md)");
  }
  // What every value must be, also of free text: it travels to other ranks in a line of its own.
  void check() const {
    const auto is_control = [](char c) { return uint8_t(c) < ' ' || c == '\x7f'; };
    if (std::any_of(text.begin(), text.end(), is_control))
      refuse("text without line breaks and other control characters");
    if (text.size() > kMostValueBytes) refuse("at most " + std::to_string(kMostValueBytes) + " bytes");
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
  int number(int least, const char* expected) const {
    return static_cast<int>(whole(least, std::numeric_limits<int>::max(), expected));
  }
  int64_t bytes() const { return whole(0, std::numeric_limits<int64_t>::max(), "bytes, 0 or more"); }
  double seconds() const {
    double value = 0;
    if (!parse(value) || !std::isfinite(value) || value < 0) refuse("seconds, 0 or more");
    return std::min(value, kMostSeconds);
  }
  double share() const {
    double value = 0;
    if (!parse(value) || !(value > 0 && value <= 1)) refuse("a number above 0 and at most 1");
    return value;
  }
  bool flag() const {
    if (const auto value = switch_of(text)) return *value;
    refuse("0 or 1 (or true, false, yes, no, on, off)");
  }
  std::string one_of(std::initializer_list<const char*> words) const {
    std::string expected;
    for (const char* word : words) {
      if (lower(text) == word) return word;
      expected += (expected.empty() ? "" : " or ") + std::string(word);
    }
    refuse(expected);
  }
  std::string place() const {  // a port, an address and a port, or a path
    const bool is_number = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
    if (is_number && (text.size() > 5 || std::stoi(text) > 65535))
      refuse("a port from 0 to 65535 (0: any free one), address:port, or the path of a file");
    return text;
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
  void (*set)(Config&, const Setting&);
  std::string (*get)(const Config&);
  const char* other_names[2] = {};  // read in this order if it is not set itself
};

const Knob kKnobs[] = {
    {"HOROVOD_FUSION_THRESHOLD",
     "Most bytes that travel as one fused collective. 0 is noted and ignored: many command lines carry it, and "
     "fusion here costs no waiting; LIGHTCC_FUSION=0 is what turns it off.",
     [](Config& c, const Setting& v) { c.fusion_bytes = v.bytes(); },
     [](const Config& c) { return std::to_string(c.fusion_bytes); }},
    {"LIGHTCC_FUSION", "0: every tensor travels alone. For comparisons and for finding faults.",
     [](Config& c, const Setting& v) { c.fusion = v.flag(); }, [](const Config& c) { return text_of(c.fusion); }},
    {"HOROVOD_CACHE_CAPACITY",
     "Requests remembered for each process set; one that is remembered needs no negotiation of its shape. 0: none.",
     [](Config& c, const Setting& v) { c.cache_capacity = v.number(0, "a number of requests, 0 or more"); },
     [](const Config& c) { return std::to_string(c.cache_capacity); }},
    {"HOROVOD_STALL_CHECK_TIME_SECONDS",
     "Warn about a tensor that some ranks have submitted and others have not for so long.",
     [](Config& c, const Setting& v) { c.stall_warn_s = v.seconds(); },
     [](const Config& c) { return text_of(c.stall_warn_s); }},
    {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "End the job on all ranks when such a tensor has waited so long. 0: never.",
     [](Config& c, const Setting& v) { c.stall_end_s = v.seconds(); },
     [](const Config& c) { return text_of(c.stall_end_s); }},
    {"LIGHTCC_DEADLOCK_CHECK_SECONDS",
     "Warn about ranks that wait for each other, so that none of them can go on, when they have waited so long: one "
     "is in an operation that the other has not called, and the other in one that the first has not. 0: only as of "
     "stalls.",
     [](Config& c, const Setting& v) { c.deadlock_s = v.seconds(); },
     [](const Config& c) { return text_of(c.deadlock_s); }},
    {"HOROVOD_STALL_CHECK_DISABLE", "1: neither warn about stalls and deadlocks nor end them.",
     [](Config& c, const Setting& v) { c.stall_check = !v.flag(); },
     [](const Config& c) { return text_of(!c.stall_check); }},
    {"HOROVOD_START_TIMEOUT",
     "Seconds that init waits for the other ranks before it names the ones that did not come.",
     [](Config& c, const Setting& v) { c.start_timeout_s = v.seconds(); },
     [](const Config& c) { return text_of(c.start_timeout_s); }},
    {"LIGHTCC_SELECT",
     "Forces the backend or algorithm of a kind of collective: `allreduce=ring,broadcast=binomial`. Must be the same "
     "on all ranks.",
     [](Config& c, const Setting& v) { c.select = v.text; }, [](const Config& c) { return c.select; }},
    {"LIGHT_2D_ALLREDUCE",
     "1: all-reduces between hosts are hierarchical (docs/design.md). 0: they use flat rings and trees. If it is not "
     "set, `HOROVOD_HIERARCHICAL_ALLREDUCE` and then `HOROVOD_TORUS_ALLREDUCE` are read.",
     [](Config& c, const Setting& v) { c.hierarchical = v.flag(); },
     [](const Config& c) { return text_of(c.hierarchical); },
     {"HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_TORUS_ALLREDUCE"}},
    {"LIGHT_HIERARCHICAL_THRESHOLD", "Bytes of the smallest all-reduce that is hierarchical; see LIGHT_2D_ALLREDUCE.",
     [](Config& c, const Setting& v) { c.hierarchical_bytes = v.bytes(); },
     [](const Config& c) { return std::to_string(c.hierarchical_bytes); }},
    {"HOROVOD_HIERARCHICAL_ALLGATHER",
     "1: all-gathers bring each byte to each host once, and the ranks there hand it on. 0: they are flat.",
     [](Config& c, const Setting& v) { c.hierarchical_allgather = v.flag(); },
     [](const Config& c) { return text_of(c.hierarchical_allgather); }},
    {"LIGHT_INTRA_SIZE",
     "Collectives that go by host take so many ranks of a host for a host of their own (the last may have fewer), so "
     "that one machine can act as several. local_rank and local_size stay as they are. 0: all ranks of a host.",
     [](Config& c, const Setting& v) { c.intra_size = v.number(0, "ranks, 0 or more"); },
     [](const Config& c) { return std::to_string(c.intra_size); }},
    {"LIGHTCC_CALIBRATION",
     "1: where ranks are on several hosts, the first init among them measures latency and bandwidth (at most a "
     "second), and the algorithms of all-reduces follow from that. 0: from sizes and numbers of hosts alone.",
     [](Config& c, const Setting& v) { c.calibration = v.flag(); },
     [](const Config& c) { return text_of(c.calibration); }},
    {"LIGHTCC_CACHE_DIR",
     "Directory in which rank 0 keeps what was measured of a set of hosts, for later runs, and processes with GPUs, in "
     "its folder `kernels`, what they have compiled for them; to delete a file there means to do that anew. Not set: "
     "`lightcc` in `XDG_CACHE_HOME` or in `~/.cache`.",
     [](Config& c, const Setting& v) { c.cache_dir = v.text; }, [](const Config& c) { return c.cache_dir; }},
    {"HOROVOD_AUTOTUNE",
     "1: all-reduces between hosts, of 16 KiB and more, try a second algorithm by turns while training runs, and keep "
     "the quicker, for each power of two of bytes; what was found is kept in LIGHTCC_CACHE_DIR for later runs. 0: the "
     "same algorithms in each run, and so the same rounding.",
     [](Config& c, const Setting& v) { c.autotune = v.flag(); }, [](const Config& c) { return text_of(c.autotune); }},
    {"HOROVOD_AUTOTUNE_LOG", "File in which rank 0 writes each sample that counts, as CSV.",
     [](Config& c, const Setting& v) { c.autotune_log = v.text; }, [](const Config& c) { return c.autotune_log; }},
    {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "The first samples of each size, which do not count.",
     [](Config& c, const Setting& v) { c.autotune_warmup_samples = v.number(0, "a number of samples, 0 or more"); },
     [](const Config& c) { return std::to_string(c.autotune_warmup_samples); }},
    {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "All-reduces of one size that make a sample.",
     [](Config& c, const Setting& v) {
       c.autotune_steps_per_sample = v.number(1, "a number of all-reduces, 1 or more");
     },
     [](const Config& c) { return std::to_string(c.autotune_steps_per_sample); }},
    {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
     "Most samples of each size that count; six are enough if the algorithms differ clearly.",
     [](Config& c, const Setting& v) { c.autotune_most_samples = v.number(1, "a number of samples, 1 or more"); },
     [](const Config& c) { return std::to_string(c.autotune_most_samples); }},
    {"LIGHT_TOPK_ALLREDUCE",
     "1: optimizers and gradient tapes that are given no compression send the largest gradients only, and leave the "
     "rest for later steps (docs/compression.md).",
     [](Config& c, const Setting& v) { c.topk = v.flag(); }, [](const Config& c) { return text_of(c.topk); }},
    {"LIGHT_TOPK_RATIO", "The share of a gradient's elements that they send, above 0 and at most 1.",
     [](Config& c, const Setting& v) { c.topk_ratio = v.share(); },
     [](const Config& c) { return text_of(c.topk_ratio); }},
    {"LIGHT_TOPK_THRESHOLD",
     "If the gradients of a step that can be compressed have fewer bytes, they travel dense; also where compression "
     "was asked for by the program.",
     [](Config& c, const Setting& v) { c.topk_threshold = v.bytes(); },
     [](const Config& c) { return std::to_string(c.topk_threshold); }},
    {"LIGHT_TOPK_FP16", "1: the values are sent as float16.",
     [](Config& c, const Setting& v) { c.topk_fp16 = v.flag(); }, [](const Config& c) { return text_of(c.topk_fp16); }},
    {"HOROVOD_CHECK_WEIGHTS",
     "Each so many exchanges of gradients the ranks compare their weights, and end with an error that names those that "
     "differ (docs/troubleshooting.md). 0: never.",
     [](Config& c, const Setting& v) { c.check_weights = v.number(0, "a number of steps, 0 or more"); },
     [](const Config& c) { return std::to_string(c.check_weights); }},
    {"HOROVOD_LOG_LEVEL",
     "Lowest level that is written to stderr: trace, debug, info, warning, error, fatal, or 0 to 5.",
     [](Config& c, const Setting& v) { c.log_level = v.level(); },
     [](const Config& c) { return std::string(kLevels[c.log_level]); }},
    {"HOROVOD_LOG_HIDE_TIME", "1: log lines carry no time.",
     [](Config& c, const Setting& v) { c.log_hide_time = v.flag(); },
     [](const Config& c) { return text_of(c.log_hide_time); }},
    {"HOROVOD_TIMELINE",
     "File in which rank 0 writes what it did and when, for chrome://tracing; every rank, if the path has `{rank}` in "
     "it. DYNAMIC: none until `start_timeline` is called (docs/timeline.md).",
     [](Config& c, const Setting& v) { c.timeline = v.text; }, [](const Config& c) { return c.timeline; }},
    {"HOROVOD_TIMELINE_MARK_CYCLES", "1: the timeline also marks every batch that the ranks agreed to run.",
     [](Config& c, const Setting& v) { c.timeline_mark_cycles = v.flag(); },
     [](const Config& c) { return text_of(c.timeline_mark_cycles); }},
    {"LIGHTCC_TIMELINE_ROWS",
     "What has a row in the timeline: `buckets`, beside a row of steps and counters of bytes; or `tensors`, as "
     "Horovod's timeline has it (docs/timeline.md).",
     [](Config& c, const Setting& v) { c.timeline_by_bucket = v.one_of({"buckets", "tensors"}) == "buckets"; },
     [](const Config& c) { return std::string(c.timeline_by_bucket ? "buckets" : "tensors"); }},
    {"LIGHTCC_METRICS",
     "Where rank 0 shows the metrics of all ranks in Prometheus's text format (docs/metrics.md): a port of this host "
     "alone, as `9400`; `address:port`; or a file, which is written anew every two seconds. Rank 0's value holds.",
     [](Config& c, const Setting& v) { c.metrics = v.place(); }, [](const Config& c) { return c.metrics; }},
    {"HOROVOD_DISABLE_NVTX_RANGES",
     "1: no NVTX ranges around what PyTorch's programs wait for (docs/timeline.md). 0: they are there if a library of "
     "NVTX is.",
     [](Config& c, const Setting& v) { c.nvtx = !v.flag(); }, [](const Config& c) { return text_of(!c.nvtx); }},
    {"LIGHTCC_SPIN_US",
     "Microseconds that a wait spins before it yields and then sleeps. -1: at most 20 if every rank of the host has a "
     "core, else 0.",
     [](Config& c, const Setting& v) { c.spin_us = v.number(-1, "microseconds, or -1 to choose by cores and ranks"); },
     [](const Config& c) { return std::to_string(c.spin_us); }},
    {"LIGHTCC_STORE_ADDR",
     "Where the ranks of several hosts meet: `host:port`, or several with commas in between, a host of rank 0 (an IPv6 "
     "address in brackets). Rank 0 listens on that port, or on the next free one of 15 more. lightccrun sets it; "
     "elsewhere the launcher usually says enough (below). Must be set on all ranks (mpirun: `-x LIGHTCC_STORE_ADDR`).",
     [](Config& c, const Setting& v) { c.store_addr = v.text; }, [](const Config& c) { return c.store_addr; }},
    {"LIGHTCC_IFACE",
     "Network interfaces between hosts: `eth0,eth1` (those names, or all that begin so), `=eth0` (exactly), all at "
     "once; `^docker0,lo`: the first other. Not set: `HOROVOD_GLOO_IFACE`, then `NCCL_SOCKET_IFNAME` are read.",
     [](Config& c, const Setting& v) { c.iface = v.text; },
     [](const Config& c) { return c.iface; },
     {"HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"}},
    {"LIGHTCC_NET",
     "What carries data and messages between hosts: `tcp`; `harp`, lightcc's own stack over UDP; `xdp`, that stack "
     "past the kernel's (docs/harp.md). Rank 0's value holds.",
     [](Config& c, const Setting& v) { c.net = v.one_of({"tcp", "harp", "xdp"}); },
     [](const Config& c) { return c.net; }},
    {"LIGHTCC_NET_PLUGIN",
     "A network plugin of NCCL's (versions 6 to 12 of its interface) that carries data and messages between hosts, in "
     "place of `LIGHTCC_NET`: a path, or the NAME of `libnccl-net-NAME.so` (docs/nccl.md). Rank 0's value holds.",
     [](Config& c, const Setting& v) { c.net_plugin = v.text; }, [](const Config& c) { return c.net_plugin; }},
    {"LIGHTCC_HOST_ID",
     "Ranks with different values never share memory, as if they were on different hosts; with equal ones they do if "
     "they can. If it is not set, boot id, network namespace and user decide who may.",
     [](Config& c, const Setting& v) { c.host_id = v.text; }, [](const Config& c) { return c.host_id; }},
    {"LIGHTCC_PORT_RANGE",
     "The only ports to listen on, `20000-20100`, for firewalls that let no others through. LIGHTCC_STORE_ADDR names "
     "its own. Must be the same on all ranks.",
     [](Config& c, const Setting& v) { c.port_range = v.text; }, [](const Config& c) { return c.port_range; }},
    {"LIGHTCC_PINNED_BYTES",
     "Most bytes of pinned memory that a rank keeps, until shutdown, for tensors of GPUs that go through the host, in "
     "all process sets together (docs/gpu.md). What an operation needs beyond that is pinned for it alone.",
     [](Config& c, const Setting& v) { c.pinned_bytes = v.bytes(); },
     [](const Config& c) { return std::to_string(c.pinned_bytes); }},
    {"LIGHTCC_CUDA_LIBRARY",
     "A library through which tensors of GPUs are reached, in place of CUDA's driver (docs/gpu.md). For tests.",
     [](Config& c, const Setting& v) { c.cuda_library = v.text; }, [](const Config& c) { return c.cuda_library; }},
    {"LIGHTCC_GPU_COMPRESSION",
     "1: GPUs make the messages of Top-K and int8 themselves where each host has one rank, and messages alone cross "
     "the bus; or by NCCL where all hosts have equally many (docs/gpu.md). 0: the host makes them. Off until that has "
     "run on a GPU.",
     [](Config& c, const Setting& v) { c.gpu_compression = v.flag(); },
     [](const Config& c) { return text_of(c.gpu_compression); }},
    {"LIGHTCC_NCCL",
     "1: tensors of GPUs go by NCCL if all ranks can and say so. 0, or if one cannot: through host memory "
     "(docs/gpu.md).",
     [](Config& c, const Setting& v) { c.nccl = v.flag(); },
     [](const Config& c) { return text_of(c.nccl); }},
    {"LIGHTCC_NCCL_2D",
     "1: large all-reduces by NCCL between hosts are hierarchical too, unless LIGHT_2D_ALLREDUCE is 0 (docs/gpu.md). "
     "Off until that has run on several GPUs.",
     [](Config& c, const Setting& v) { c.nccl_2d = v.flag(); },
     [](const Config& c) { return text_of(c.nccl_2d); }},
    {"LIGHTCC_NCCL_LIBRARY",
     "The NCCL that is used, in place of the one that the process has loaded already (PyTorch's), or else of the "
     "system's `libnccl.so.2`.",
     [](Config& c, const Setting& v) { c.nccl_library = v.text; }, [](const Config& c) { return c.nccl_library; }},
    {"NCCL_HOSTID",
     "NCCL's own: ranks with different values are on different hosts to it. lightcc only reads it, to know whether two "
     "ranks with the same GPU can use NCCL (docs/gpu.md).",
     [](Config& c, const Setting& v) { c.nccl_host_id = v.text; }, [](const Config& c) { return c.nccl_host_id; }},
    {"HOROVOD_NUM_NCCL_STREAMS",
     "On so many streams, at most 16, the collectives of a GPU run by NCCL, by turns. Each has a communicator and a "
     "fusion buffer of its own (docs/gpu.md). Rank 0's value holds.",
     [](Config& c, const Setting& v) { c.nccl_streams = int(v.whole(1, 16, "a number of streams, 1 to 16")); },
     [](const Config& c) { return std::to_string(c.nccl_streams); }},
    {"HOROVOD_BATCH_D2D_MEMCOPIES",
     "1: tensors that are fused for NCCL are copied into one buffer, and back, by one kernel each. 0: one by one.",
     [](Config& c, const Setting& v) { c.batch_copies = v.flag(); },
     [](const Config& c) { return text_of(c.batch_copies); }},
    {"LIGHTCC_OUTPUT_POOL_BYTES",
     "Most bytes of memory that a rank keeps for the next outputs of operations that are not in place, once the "
     "program has dropped the outputs that lay there (docs/collectives.md); counted apart for memory of PyTorch's own. "
     "0: none.",
     [](Config& c, const Setting& v) { c.output_pool_bytes = v.bytes(); },
     [](const Config& c) { return std::to_string(c.output_pool_bytes); }},
    {"LIGHTCC_OUTPUT_POOL_IDLE_SECONDS", "Such memory goes back to the system when it was not used for so long.",
     [](Config& c, const Setting& v) { c.output_idle_s = v.seconds(); },
     [](const Config& c) { return text_of(c.output_idle_s); }}};

// Ranks that disagree on these would wait for each other, or for different things. Rank 0's values hold.
constexpr const char* kShared[] = {"HOROVOD_FUSION_THRESHOLD", "LIGHTCC_FUSION", "HOROVOD_CACHE_CAPACITY",
                                   "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                                   "LIGHTCC_DEADLOCK_CHECK_SECONDS", "HOROVOD_STALL_CHECK_DISABLE", "LIGHTCC_SELECT",
                                   "LIGHT_2D_ALLREDUCE", "LIGHT_HIERARCHICAL_THRESHOLD",
                                   "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_NUM_NCCL_STREAMS", "LIGHTCC_NET",
                                   "LIGHTCC_NET_PLUGIN", "LIGHT_INTRA_SIZE", "LIGHTCC_CALIBRATION", "HOROVOD_AUTOTUNE",
                                   "LIGHT_TOPK_ALLREDUCE", "LIGHT_TOPK_RATIO", "LIGHT_TOPK_THRESHOLD",
                                   "LIGHT_TOPK_FP16", "HOROVOD_CHECK_WEIGHTS", "LIGHTCC_METRICS"};

const Knob& knob_of(const std::string& name) {
  for (const Knob& knob : kKnobs)
    if (name == knob.name) return knob;
  throw Error(Code::internal, "a rank sent a setting that does not exist: " + name);
}

const char* text_if_set(const Environment& env, const char* name) {
  const char* text = env(name);
  return text && *text ? text : nullptr;  // NAME= in a shell script means "not set"
}

}  // namespace

Config read_config(const Environment& env, std::string* notes, std::optional<Error>* failure) {
  Config config;
  std::string found;
  auto note = [&](const std::string& line) { found += (found.empty() ? "" : "\n") + line; };
  for (const Knob& knob : kKnobs) {
    const char* name = knob.name;
    for (const char* other : knob.other_names)
      if (other && !text_if_set(env, name)) name = other;
    const char* const text = text_if_set(env, name);
    if (!text) continue;
    try {
      const Setting value{name, text};
      value.check();
      knob.set(config, value);
    } catch (const Error& error) {
      if (!failure) throw;
      if (!*failure) *failure = error;
    }
  }
  if (config.cache_dir.empty()) {
    if (const char* caches = text_if_set(env, "XDG_CACHE_HOME")) config.cache_dir = std::string(caches) + "/lightcc";
    else if (const char* home = text_if_set(env, "HOME")) config.cache_dir = std::string(home) + "/.cache/lightcc";
  }
  if (config.fusion_bytes == 0) {
    config.fusion_bytes = Config{}.fusion_bytes;
    note("HOROVOD_FUSION_THRESHOLD=0 is ignored: fusion costs no waiting here; LIGHTCC_FUSION=0 turns it off");
  }
  for (const IgnoredKnob& knob : kIgnoredKnobs) {
    const char* text = text_if_set(env, knob.name);
    if (text && !(knob.no_op_value && switch_of(text) == knob.no_op_value)) {
      note(std::string(knob.name) + "=" + shown(text) + " has no effect in this version: " + knob.reason);
    }
  }
  if (notes) *notes = found;
  return config;
}

std::string shared_settings(const Config& config) {
  std::string text;
  for (const char* name : kShared) text += std::string(name) + "=" + knob_of(name).get(config) + "\n";
  return text;
}

Config with_settings(Config config, const std::string& shared) {
  std::istringstream lines(shared);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = std::min(line.find('='), line.size());
    const Knob& knob = knob_of(line.substr(0, equals));
    knob.set(config, Setting{knob.name, line.substr(std::min(equals + 1, line.size()))});
  }
  return config;
}

std::string differing_settings(const std::string& rank0, const std::string& other) {
  std::istringstream theirs(rank0), ours(other);
  std::string text;
  for (std::string a, b; std::getline(theirs, a) && std::getline(ours, b);)
    if (a != b) text += (text.empty() ? "" : ", ") + b + " (rank 0: " + a.substr(a.find('=') + 1) + ")";
  return text;
}

std::vector<KnobRow> knob_rows() {
  std::vector<KnobRow> rows;
  for (const Knob& knob : kKnobs) {
    rows.push_back({knob.name, knob.help, knob.get(Config{}), {}});
    for (const char* other : knob.other_names)
      if (other) rows.back().other_names.push_back(other);
  }
  return rows;
}

std::string knobs_text(const Config& config) {
  std::string text;
  for (const Knob& knob : kKnobs) text += std::string(knob.name) + "=" + knob.get(config) + "\n";
  return text;
}

}  // namespace lightcc
