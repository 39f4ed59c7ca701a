// Variables that are known from Horovod or LightCC and have no effect here, each with the reason.
#pragma once
#include <optional>

namespace lightcc {

struct IgnoredKnob {
  const char* name;
  const char* reason;
  std::optional<bool> no_op_value = {};  // of a switch: asks for what happens anyway, and is not noted
};

inline constexpr const char* kNoCycle = "there is no cycle: a request is acted on when it is submitted";
inline constexpr const char* kOwnTransport = "it has its own transport and uses neither MPI nor Gloo nor oneCCL";
inline constexpr const char* kOwnRendezvous = "ranks meet at LIGHTCC_STORE_ADDR, or where their launcher says";

inline constexpr IgnoredKnob kIgnoredKnobs[] = {
    {"HOROVOD_CYCLE_TIME", kNoCycle},
    {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "two candidates are compared, and there is no Gaussian process"},
    {"HOROVOD_THREAD_AFFINITY", "a waiting caller drives its own request, so no one thread is worth binding"},
    {"HOROVOD_ENABLE_ASYNC_COMPLETION", "nothing waits for a GPU to complete a collective", true},
    {"HOROVOD_ENABLE_XLA_OPS", "it registers no XLA kernels", false},
    {"HOROVOD_DISABLE_GROUP_FUSION", "a group may always be fused with other tensors; see LIGHTCC_FUSION", false},
    {"HOROVOD_DYNAMIC_PROCESS_SETS", "process sets can always be added and removed after init, at no cost a cycle",
     true},
    {"HOROVOD_ADASUM_MPI_CHUNK_SIZE", kOwnTransport},
    {"HOROVOD_CPU_OPERATIONS", kOwnTransport},
    {"HOROVOD_CONTROLLER", kOwnTransport},
    {"HOROVOD_MPI_THREADS_DISABLE", kOwnTransport},
    {"HOROVOD_CCL_CACHE", kOwnTransport, false},
    {"HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_START_TIMEOUT bounds init, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS a stall"},
    {"HOROVOD_GLOO_RENDEZVOUS_ADDR", kOwnRendezvous},
    {"HOROVOD_GLOO_RENDEZVOUS_PORT", kOwnRendezvous},
    {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "each rank sees all GPUs that Spark gives to its host's ranks", false},
    {"HOROVOD_SPARK_PYTHONPATH", "ranks find modules where Spark's tasks and the driver do"},
    {"HOROVOD_SPARK_WORK_DIR", "ranks run where Spark's tasks do"}};

}  // namespace lightcc
