#include "base/known_variables.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/config.h"
#include "base/ignored_knobs.h"

namespace lightcc {
namespace {

// Those that are no knobs of the core: launchers set them, or Python reads them.
constexpr const char* kOthers[] = {
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_ELASTIC", "HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_SECRET_KEY",
    "HOROVOD_SPARK_START_TIMEOUT",
    "LIGHTCC_JOB_ID", "LIGHTCC_SECRET", "LIGHTCC_DRIVER_FD", "LIGHTCC_LAUNCHER_FD", "LIGHTCC_LAUNCH_COMMAND",
    "LIGHTCC_GRACE_PERIOD", "LIGHTCC_LIBRARY", "LIGHTCC_JAX",
    // HARP's (harp_plugin/api/config.cc)
    "HARP_PORT", "HARP_IFNAME", "HARP_ENGINES", "HARP_INLINE", "HARP_PATHS", "HARP_PORT_RANGE", "HARP_MTU",
    "HARP_DELAY_TARGET_US", "HARP_PEER_TIMEOUT_MS", "HARP_CONNECT_TIMEOUT_MS", "HARP_AUTH", "HARP_SECRET",
    "HARP_STATS", "HARP_GSO", "HARP_GRO", "HARP_XDP_COPIES", "HARP_XDP_QUEUES", "HARP_HARPD", "HARP_XDP_FALLBACK",
    "HARP_MAX_RECVS"};

constexpr std::string_view kPrefixes[] = {"HOROVOD_", "LIGHTCC_", "LIGHT_", "HARP_"};
constexpr std::string_view kTests = "LIGHTCC_TEST_";  // tests tell each other such

// "": none of ours.
std::string_view prefix_of(std::string_view name) {
  for (std::string_view prefix : kPrefixes)
    if (name.starts_with(prefix)) return prefix;
  return "";
}

// Letters to insert, delete or replace (Levenshtein's distance).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

// "" if none is near. Another prefix counts as one letter: many are Horovod's, and people write LIGHTCC_ there.
std::string nearest(std::string_view name, const std::vector<std::string>& known) {
  const std::string_view prefix = prefix_of(name), rest = name.substr(prefix.size());
  size_t least = rest.size() / 4 + 2;
  std::string found;
  for (const std::string& one : known) {
    const std::string_view its_prefix = prefix_of(one);
    const size_t letters = distance(rest, std::string_view(one).substr(its_prefix.size())) + (its_prefix != prefix);
    if (letters >= least) continue;
    least = letters;
    found = one;
  }
  return found;
}

}  // namespace

const std::vector<const char*> kBuildVariables = {
    "HOROVOD_DEBUG", "HOROVOD_CMAKE", "HOROVOD_SKIP_COMPILE", "HOROVOD_LOCAL_VERSION", "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CUDA_HOME", "HOROVOD_ROCM_HOME", "HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_GPU_ALLREDUCE", "HOROVOD_GPU_ALLGATHER", "HOROVOD_GPU_BROADCAST", "HOROVOD_GPU_ALLTOALL",
    "HOROVOD_GPU_REDUCESCATTER", "HOROVOD_ALLOW_MIXED_GPU_IMPL", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK", "HOROVOD_NVTX_INCLUDE", "HOROVOD_WITH_MPI", "HOROVOD_WITHOUT_MPI",
    "HOROVOD_WITH_GLOO", "HOROVOD_WITHOUT_GLOO", "HOROVOD_WITH_PYTORCH", "HOROVOD_WITHOUT_PYTORCH",
    "HOROVOD_WITH_TENSORFLOW", "HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITH_MXNET", "HOROVOD_WITHOUT_MXNET",
    "HOROVOD_WITH_NVTX", "HOROVOD_WITHOUT_NVTX"};

std::vector<std::string> known_variables() {
  std::vector<std::string> names;
  for (const KnobRow& knob : knob_rows()) {
    names.push_back(knob.name);
    names.insert(names.end(), knob.other_names.begin(), knob.other_names.end());
  }
  for (const IgnoredKnob& knob : kIgnoredKnobs) names.push_back(knob.name);
  names.insert(names.end(), std::begin(kOthers), std::end(kOthers));
  names.insert(names.end(), kBuildVariables.begin(), kBuildVariables.end());
  return names;
}

std::string unknown_variables(const char* const* set, bool harp) {
  const std::vector<std::string> known = known_variables();
  std::vector<std::string> names;
  for (; *set; ++set) {
    const std::string_view entry = *set, name = entry.substr(0, entry.find('='));
    const bool is_empty = name.size() + 1 >= entry.size();  // as good as not set
    if (is_empty || prefix_of(name).empty() || name.starts_with(kTests)) continue;
    if (std::find(known.begin(), known.end(), name) == known.end()) names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) {
    const std::string near = nearest(name, known);
    const bool others_too = name.starts_with("LIGHT_") || name.starts_with("HARP_");
    if ((others_too && near.empty()) || (name.starts_with("HARP_") && !harp)) continue;
    text += (text.empty() ? "" : "\n") + name + " is set, but lightcc knows no variable of that name: " +
            (near.empty() ? "docs/knobs.md lists those that it reads" : "did you mean " + near + "?");
  }
  return text;
}

}  // namespace lightcc
