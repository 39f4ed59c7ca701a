// Every knob, in one table, with its parser. docs/knobs.md is generated from the table. Only what launchers set is read
// elsewhere (net/bootstrap/launchers.h).
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace lightcc {

using Environment = std::function<const char*(const char* name)>;  // getenv, or a test's map

inline constexpr const char* kTimelineLater = "DYNAMIC";  // start_timeline will say where

struct Config {
  int64_t fusion_bytes = 128 << 20;  // HOROVOD_FUSION_THRESHOLD: most bytes in one fused collective
  bool fusion = true;                // LIGHTCC_FUSION: 0 turns fusion off
  int cache_capacity = 1024;         // HOROVOD_CACHE_CAPACITY: requests remembered per group, 0 = none
  double stall_warn_s = 60;          // HOROVOD_STALL_CHECK_TIME_SECONDS
  double stall_end_s = 0;            // HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: 0 = never
  double deadlock_s = 5;             // LIGHTCC_DEADLOCK_CHECK_SECONDS: 0 = never
  bool stall_check = true;           // HOROVOD_STALL_CHECK_DISABLE: 1 turns warnings and endings off
  double start_timeout_s = 30;       // HOROVOD_START_TIMEOUT: longest wait for the other ranks in init
  std::string select;                // LIGHTCC_SELECT: forces backends, "allreduce=ring,broadcast=binomial"
  bool hierarchical = true;          // LIGHT_2D_ALLREDUCE: all-reduces between hosts are hierarchical
  int64_t hierarchical_bytes = 0;     // LIGHT_HIERARCHICAL_THRESHOLD: from so many bytes on
  bool hierarchical_allgather = true; // HOROVOD_HIERARCHICAL_ALLGATHER: all-gathers between hosts go by host
  int intra_size = 0;                // LIGHT_INTRA_SIZE: ranks that count as a host of their own, 0 = all of a host
  bool calibration = true;           // LIGHTCC_CALIBRATION: the network is measured, and decides on algorithms
  std::string cache_dir;             // LIGHTCC_CACHE_DIR: where that is kept for later runs; "": nowhere
  bool autotune = false;             // HOROVOD_AUTOTUNE: all-reduces between hosts are tuned in live steps
  std::string autotune_log;          // HOROVOD_AUTOTUNE_LOG: a file for its samples; "": none
  int autotune_warmup_samples = 3;   // HOROVOD_AUTOTUNE_WARMUP_SAMPLES: thrown away, of each size class
  int autotune_steps_per_sample = 10; // HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
  int autotune_most_samples = 20;    // HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES: of a size class
  bool topk = false;                 // LIGHT_TOPK_ALLREDUCE: gradients are compressed unless the program says how
  double topk_ratio = 0.01;          // LIGHT_TOPK_RATIO
  int64_t topk_threshold = 1 << 20;  // LIGHT_TOPK_THRESHOLD: bytes of a step that can be compressed; fewer go dense
  bool topk_fp16 = false;            // LIGHT_TOPK_FP16
  int check_weights = 0;             // HOROVOD_CHECK_WEIGHTS: exchanges between two comparisons; 0: none
  int log_level = 3;                 // HOROVOD_LOG_LEVEL: trace 0, debug 1, info 2, warning 3, error 4, fatal 5
  bool log_hide_time = false;        // HOROVOD_LOG_HIDE_TIME
  std::string timeline;              // HOROVOD_TIMELINE: a file, kTimelineLater, or "": there will be none
  bool timeline_mark_cycles = false; // HOROVOD_TIMELINE_MARK_CYCLES
  bool timeline_by_bucket = true;    // LIGHTCC_TIMELINE_ROWS: buckets or tensors
  std::string metrics;               // LIGHTCC_METRICS: where rank 0 shows the metrics; "": nowhere
  bool nvtx = true;                  // HOROVOD_DISABLE_NVTX_RANGES turns it off
  int spin_us = -1;                  // LIGHTCC_SPIN_US: how long a wait spins before it sleeps; -1: by cores and ranks
  std::string store_addr;            // LIGHTCC_STORE_ADDR: where the ranks of several hosts meet, "host:port,..."
  std::string iface;                 // LIGHTCC_IFACE: network interfaces to use, "eth0,eth1", "=eth0" or "^docker0"
  std::string net = "tcp";           // LIGHTCC_NET: what carries links between hosts: tcp, harp or xdp
  std::string net_plugin;            // LIGHTCC_NET_PLUGIN: NCCL's network plugin that carries them in its place
  std::string host_id;               // LIGHTCC_HOST_ID: ranks share memory only where it is the same; "": by the system
  int64_t output_pool_bytes = 512 << 20;  // LIGHTCC_OUTPUT_POOL_BYTES: most memory kept for the next outputs, 0 = none
  double output_idle_s = 10;         // LIGHTCC_OUTPUT_POOL_IDLE_SECONDS: how long it is kept without use
  int64_t pinned_bytes = 256 << 20;  // LIGHTCC_PINNED_BYTES: most pinned memory kept for tensors of GPUs
  std::string cuda_library;          // LIGHTCC_CUDA_LIBRARY: in place of CUDA's driver
  bool gpu_compression = false;      // LIGHTCC_GPU_COMPRESSION: GPUs compress their tensors themselves
  bool nccl = true;                  // LIGHTCC_NCCL: tensors of GPUs go by NCCL where they can
  bool nccl_2d = false;              // LIGHTCC_NCCL_2D: hierarchical all-reduces there too
  std::string nccl_host_id;          // NCCL_HOSTID: the host that NCCL takes this rank to be on; "": its own
  std::string nccl_library;          // LIGHTCC_NCCL_LIBRARY: in place of the one that is found
  int nccl_streams = 1;              // HOROVOD_NUM_NCCL_STREAMS: that batches of a GPU run on by turns
  bool batch_copies = true;          // HOROVOD_BATCH_D2D_MEMCOPIES: fused tensors of a GPU are copied in one launch
  std::string port_range;            // LIGHTCC_PORT_RANGE: the only ports to listen on, "20000-20100"
};

// Reads the table's variables. A value that does not parse throws Error{invalid_argument} naming the
// variable, the value and what is expected. Variables that Horovod has and lightcc ignores are listed in
// `notes` (one line each) when set.
Config read_config(const Environment&, std::string* notes = nullptr, std::optional<Error>* failure = nullptr);

// What must be the same on all ranks, as text for another rank.
std::string shared_settings(const Config&);
Config with_settings(Config, const std::string& shared);  // throws Error{internal} if it is no such text
// "HOROVOD_CACHE_CAPACITY=5 (rank 0: 1024), ..."; empty: none.
std::string differing_settings(const std::string& rank0, const std::string& other);

struct KnobRow {  // of the table: its text and its variables
  const char* name;
  const char* help;
  std::string fallback;                  // its default, as text
  std::vector<const char*> other_names;  // read if that is not set
};
std::vector<KnobRow> knob_rows();
std::string knobs_markdown();           // docs/knobs.md
std::string knobs_text(const Config&);  // "name=value" lines

}  // namespace lightcc
