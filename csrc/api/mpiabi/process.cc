#include "api/mpiabi/process.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "api/lightcc.h"
#include "base/clock.h"
#include "base/error.h"

const MPIABI_Comm MPIABI_COMM_NULL = 0, MPIABI_COMM_WORLD = 1;
const int MPIABI_UNDEFINED = -32766;

namespace lightcc::mpiabi {
namespace {

constexpr int kWaitMs = 100;
constexpr uint64_t kPatienceNs = 10'000'000'000;  // of finalize, while this process has nothing to do for the others

void expect_ok(int status) {
  if (status < 0 || status > LIGHTCC_PENDING) throw Error(Code(status < 0 ? -status : status), lightcc_error());
}

// Of an all-gather, whose shape the ranks have agreed on.
void* place(void* memory, int, const int64_t*, int) { return memory; }

}  // namespace

Process* (*process_of_thread)() = nullptr;

Process& process() {
  static Process* own = new Process;  // never destroyed: JAX's threads may outlive main()
  if (Process* threads = process_of_thread ? process_of_thread() : nullptr) return *threads;
  return *own;
}

void Process::init() {
  const int status = lightcc_init();
  std::lock_guard lock(mutex_);
  fault_ = status == LIGHTCC_OK ? "" : lightcc_error();
  if (status != LIGHTCC_OK) throw Error(Code(status), fault_);
  std::vector<int> all(static_cast<size_t>(lightcc_size()));
  std::iota(all.begin(), all.end(), 0);
  world_ = std::make_shared<Communicator>(0, std::move(all), lightcc_rank(), 0);
}

void Process::finalize() {
  if (!lightcc_initialized()) return;
  lightcc_request request{};
  request.size = sizeof request;
  request.tensor_size = sizeof(lightcc_tensor);
  request.kind = LIGHTCC_BARRIER;
  request.name = "jax.finalize";
  request.prescale = request.postscale = 1;
  const int64_t handle = lightcc_submit(&request);
  if (handle > 0) {
    uint64_t idle_since = now_ns(), seen = 0;
    while (lightcc_wait(handle, kWaitMs) == LIGHTCC_PENDING && now_ns() < idle_since + kPatienceNs)
      if (const Activity now = activity(); now.under_way > 0 || now.begun != seen)
        idle_since = now_ns(), seen = now.begun;
    lightcc_release(handle);
  }
  expect_ok(lightcc_shutdown_because("its program has ended"));
}

std::shared_ptr<Communicator> Process::communicator(MPIABI_Comm handle) {
  std::lock_guard lock(mutex_);
  if (!fault_.empty()) throw Error(Code::shut_down, fault_);
  if (handle == MPIABI_COMM_WORLD && world_) return world_;
  const auto found = communicators_.find(handle);
  if (found == communicators_.end())
    throw Error(Code::invalid_argument, handle == MPIABI_COMM_WORLD ? "MPI_Init_thread was not called"
                                                                    : "there is no such communicator: it was freed");
  if (!found->second.communicator) throw Error(Code::shut_down, found->second.fault);
  return found->second.communicator;
}

MPIABI_Comm Process::keep(Kept kept) {
  std::lock_guard lock(mutex_);
  communicators_.emplace(next_handle_, std::move(kept));
  return next_handle_++;
}

void Process::split(MPIABI_Comm handle, int colour, int key, MPIABI_Comm* made) {
  *made = MPIABI_COMM_NULL;  // jaxlib does not look at the result
  try {
    auto communicator = do_split(handle, colour, key);
    *made = communicator ? keep({std::move(communicator), ""}) : MPIABI_COMM_NULL;
  } catch (const Error& error) {
    *made = keep({nullptr, error.what()});
    throw;
  }
}

std::shared_ptr<Communicator> Process::do_split(MPIABI_Comm handle, int colour, int key) {
  const auto parent = communicator(handle);
  std::lock_guard only(splitting_);
  const int own = communicator(MPIABI_COMM_WORLD)->rank;
  const auto split = communicators_of(exchange({parent->number, parent->rank, colour, key}), MPIABI_UNDEFINED);
  std::shared_ptr<Communicator> made;
  groups_of_split_.clear();
  for (const std::vector<int>& ranks : split) {
    const int number = next_number_++, group = group_of(ranks);
    if (std::ranges::find(ranks, own) != ranks.end())
      made = std::make_shared<Communicator>(number, ranks, own, group);
  }
  return made;
}

std::vector<SplitCall> Process::exchange(const SplitCall& own) {
  const auto world = communicator(MPIABI_COMM_WORLD);
  std::vector<SplitCall> all(size_t(world->size()));
  const int64_t shape[] = {1, sizeof own};
  const lightcc_tensor tensor{&own, nullptr, shape, LIGHTCC_UINT8, 2, {}};
  const std::string name = "jax.split." + std::to_string(splits_++);
  lightcc_request request = request_of(LIGHTCC_ALLGATHER, name, *world, tensor);
  request.allocate = place;
  request.context = all.data();
  run(request);
  return all;
}

// All ranks come here with the same ranks, in the same order.
int Process::group_of(const std::vector<int>& ranks) {
  std::vector<int> members = ranks;
  std::ranges::sort(members);
  if (members.size() == 1 || int(members.size()) == communicator(MPIABI_COMM_WORLD)->size()) return 0;
  if (const auto found = groups_.find(members); found != groups_.end())
    return groups_of_split_.emplace_back(found->second);
  const auto add = [&] {
    const std::vector<int32_t> list(members.begin(), members.end());
    return lightcc_add_group(list.data(), int(list.size()));
  };
  int group = add();
  if (group == -LIGHTCC_INVALID_ARGUMENT) {  // there are as many as can be
    remove_unused_groups();
    group = add();
  }
  expect_ok(std::min(group, 0));
  return groups_of_split_.emplace_back(groups_[members] = group);
}

// What no rank has a communicator of, or gets one of by the present split. Which those are the ranks find out together.
void Process::remove_unused_groups() {
  std::vector<int32_t> used(groups_.size());
  {
    std::lock_guard lock(mutex_);
    size_t at = 0;
    for (const auto& [members, group] : groups_) {
      used[at] = std::ranges::find(groups_of_split_, group) != groups_of_split_.end();
      for (const auto& [handle, kept] : communicators_)
        if (kept.communicator && kept.communicator->size() > 1 && kept.communicator->group == group) used[at] = 1;
      ++at;
    }
  }
  const int64_t count = int64_t(used.size());
  const lightcc_tensor tensor{used.data(), used.data(), &count, LIGHTCC_INT32, 1, {}};
  const std::string name = "jax.unused." + std::to_string(splits_);
  lightcc_request request = request_of(LIGHTCC_ALLREDUCE, name, *communicator(MPIABI_COMM_WORLD), tensor);
  request.op = LIGHTCC_MAX;
  if (count > 0) run(request);
  size_t at = 0;
  for (auto it = groups_.begin(); it != groups_.end();)
    if (!used[at++]) {
      expect_ok(lightcc_remove_group(it->second));
      it = groups_.erase(it);
    } else {
      ++it;
    }
}

void Process::free(MPIABI_Comm handle) {
  std::lock_guard lock(mutex_);
  if (communicators_.erase(handle) == 0)
    throw Error(Code::invalid_argument, "there is no such communicator: it was freed");
}

}  // namespace lightcc::mpiabi
