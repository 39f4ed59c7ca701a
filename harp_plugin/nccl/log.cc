#include "harp_plugin/nccl/log.h"

#include <atomic>

namespace harp {

namespace {

std::atomic<nccl::Logger> logger{nullptr};

void write(nccl::LogLevel level, const std::string& text) {
  if (nccl::Logger log = logger.load())
    log(level, nccl::kLogInit | nccl::kLogNet, "harp", 0, "NET/HARP : %s", text.c_str());
}

}  // namespace

void log_to(nccl::Logger log) { logger.store(log); }
void warn(const std::string& text) { write(nccl::kLogWarn, text); }
void inform(const std::string& text) { write(nccl::kLogInfo, text); }

}  // namespace harp
