#include "engine/run/staged_run.h"

#include <algorithm>

#include "base/log.h"

namespace lightcc {

// Messages of hosts that have several ranks are of parts of a tensor's sum, which the host makes.
CodecRun* StagedRun::codec(const GroupBackends& backends) {
  const auto is_one = [](const auto& members) { return members.size() == 1; };
  if (!backends.compressed()) return nullptr;  // one host: nothing is compressed
  if (!std::ranges::all_of(backends.nodes(), is_one)) {
    if (!std::exchange(has_said_why_, true))
      log(Level::info, "compressed all-reduces of tensors of GPUs go through the host, which compresses them: GPUs do "
                       "where each host has one rank, and by NCCL where all hosts have equally many "
                       "(LIGHTCC_GPU_COMPRESSION)");
    return nullptr;
  }
  Staging& own = staging();
  if (!codec_) codec_ = std::make_unique<CodecRun>(cuda(cuda_library_), *pool_, own, *backends.compressed());
  return codec_.get();
}

}  // namespace lightcc
