// Communicators of an NcclDouble, and what it does later.
#include "nccl_double.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace lightcc::test {
namespace {

constexpr std::chrono::seconds kPatienceAtEnd{30};

// None is used twice, so that the use of one that is gone is found.
std::atomic<uintptr_t> handles{0x10000};
std::atomic<uint64_t> unique_ids{0};

std::string text_of(const NcclUniqueId& id) { return {id.internal, strnlen(id.internal, sizeof id.internal)}; }

}  // namespace

std::atomic<NcclDouble*> NcclDouble::current{nullptr};

NcclDouble::NcclDouble(CudaDouble& cuda) : cuda_(cuda), random_(cuda.seed()) {
  NcclDouble* none = nullptr;
  if (!current.compare_exchange_strong(none, this)) throw std::logic_error("there is another NcclDouble");
  thread_ = std::thread([this] { work(); });
}

NcclDouble::~NcclDouble() {
  {
    std::lock_guard lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
  Lock lock(mutex_);
  if (!changed_.wait_for(lock, kPatienceAtEnd, [&] { return kernels_ == 0; })) {
    std::fprintf(stderr, "NcclDouble: waited 30 s in vain for streams to come to its kernels (seed %llu)\n",
                 static_cast<unsigned long long>(cuda_.seed()));
    std::abort();
  }
  current = nullptr;
}

void NcclDouble::set_max_delay_us(double max_delay_us) {
  std::lock_guard lock(mutex_);
  max_delay_us_ = max_delay_us;
}

void NcclDouble::set_patience(int ms) {
  std::lock_guard lock(mutex_);
  patience_ = std::chrono::milliseconds(ms);
}

void NcclDouble::set_kernels(int at_a_time) {
  std::lock_guard lock(mutex_);
  at_a_time_ = size_t(at_a_time);
}

void NcclDouble::set_host_ids() {
  std::lock_guard lock(mutex_);
  has_host_ids_ = true;
}

void NcclDouble::set_version(int version) {
  std::lock_guard lock(mutex_);
  version_ = version;
}

size_t NcclDouble::leaks() const {
  std::lock_guard lock(mutex_);
  return members_.size();
}

void NcclDouble::fail(const std::string& function, int calls, int result) {
  std::lock_guard lock(mutex_);
  failures_[function] = {calls, result};
}

void NcclDouble::set_async_error(int device, int result) {
  std::lock_guard lock(mutex_);
  if (result == kNcclSuccess) async_errors_.erase(device);
  else async_errors_[device] = result;
}

// Calls

void NcclDouble::refuse(const std::string& why, int result) { throw Failure{result, why, true}; }

// Runs the body under the lock; words: what has failed. A call that has failed in a group fails the group.
int NcclDouble::attempt(const std::string& function, std::string& words, const std::function<int(Lock&)>& body) {
  Lock lock(mutex_);
  int result = kNcclSuccess;
  if (const auto planted = failures_.find(function); planted != failures_.end() && --planted->second.first <= 0) {
    result = planted->second.second, words = "planted";
    failures_.erase(planted);
    if (function == "GroupEnd") groups_.erase(std::this_thread::get_id());
  } else {
    try {
      return body(lock);
    } catch (const Failure& failure) {
      result = failure.result, words = "NCCL's " + function + " " + failure.words;
      if (failure.is_fault) cuda_.report(words);
    }
  }
  if (const auto group = groups_.find(std::this_thread::get_id()); group != groups_.end() && !group->second.result)
    group->second.result = result;
  return result;
}

int NcclDouble::device_of_call() {
  const int device = CudaDouble::current_device();
  if (device < 0) refuse("is called outside of on_device", kInvalidUsage);
  return device;
}

NcclDouble::MemberPtr NcclDouble::find(void* comm) {
  const auto found = members_.find(comm);
  if (found == members_.end()) refuse("is called for what is no communicator, or no longer", kInvalidArgument);
  return found->second;
}

NcclDouble::MemberPtr NcclDouble::own(void* comm) {
  const int device = device_of_call();
  MemberPtr member = find(comm);
  if (member->device != device)
    refuse("is called on device " + std::to_string(device) + " for a communicator of device " +
           std::to_string(member->device), kInvalidUsage);
  return member;
}

NcclDouble::MemberPtr NcclDouble::ready(void* comm) {
  MemberPtr member = own(comm);
  if (member->is_in_progress()) refuse("is called for a communicator that is in progress", kInvalidUsage);
  if (member->is_finalized) refuse("is called for a communicator that is finalized", kInvalidUsage);
  if (member->result) throw Failure{member->result, "is called for a communicator that has failed", false};
  return member;
}

void NcclDouble::begin(Member& member) {
  member.caller = std::this_thread::get_id();
  for (const auto& [comm, other] : members_)
    if (other.get() != &member && other->caller == member.caller && other->is_in_progress() && !other->is_aborted)
      refuse("is called while a call of this thread for another communicator is in progress", kInvalidUsage);
}

// What is done later

void NcclDouble::later(std::function<void()> action) {
  const std::chrono::duration<double, std::micro> delay(
      max_delay_us_ * std::pow(std::uniform_real_distribution<>()(random_), 4));  // most are short
  later_.emplace(Time::now() + std::chrono::duration_cast<Time::duration>(delay), std::move(action));
  changed_.notify_all();
}

void NcclDouble::work() {
  Lock lock(mutex_);
  for (;;) {
    if (later_.empty() && is_ending_) return;
    if (later_.empty()) {
      changed_.wait(lock);
    } else if (const auto due = later_.begin()->first; !is_ending_ && Time::now() < due) {
      changed_.wait_until(lock, due);
    } else {
      const auto action = std::move(later_.begin()->second);
      later_.erase(later_.begin());
      action();
      changed_.notify_all();
    }
  }
}

bool NcclDouble::Member::is_in_progress() const {
  if (result != kNcclSuccess) return false;
  return !is_ready || is_launching || (is_finalized && (is_finalizing || finished < launched));
}

// Communicators

int NcclDouble::get_unique_id(NcclUniqueId* id) {
  const std::string text = "double " + std::to_string(++unique_ids);
  const int number = int(communicators_.size()) + 1;
  *id = {};
  text.copy(id->internal, sizeof id->internal - 1);
  communicators_[text] = std::make_unique<Communicator>(Communicator{number});
  return kNcclSuccess;
}

int NcclDouble::init(void** comm, int ranks, const NcclUniqueId& id, int rank, const NcclConfig* config) {
  const int device = device_of_call();
  const NcclConfig expected;
  if (!config || config->size != expected.size || config->magic != expected.magic ||
      config->version != expected.version)
    refuse("is given no configuration of NCCL 2.14", kInvalidArgument);
  if (config->blocking != 0) refuse("is to make a communicator that blocks", kInvalidArgument);
  if (rank < 0 || rank >= ranks)
    refuse("is called for rank " + std::to_string(rank) + " of " + std::to_string(ranks), kInvalidArgument);
  const auto found = communicators_.find(text_of(id));
  if (found == communicators_.end()) refuse("is given what is no unique id", kInvalidArgument);
  Communicator& communicator = *found->second;
  const std::string text = "communicator " + std::to_string(communicator.number);
  if (communicator.ranks != 0 && communicator.ranks != ranks)
    refuse("is called for " + std::to_string(ranks) + " ranks of " + text + ", which has " +
           std::to_string(communicator.ranks), kInvalidArgument);
  if (communicator.members.count(rank))
    refuse("is called twice for rank " + std::to_string(rank) + " of " + text, kInvalidUsage);
  const auto member = std::make_shared<Member>(Member{&communicator, rank, device});
  begin(*member);
  communicator.ranks = ranks;
  *comm = reinterpret_cast<void*>(++handles);
  members_[*comm] = communicator.members[rank] = member;
  if (int(communicator.members.size()) == ranks) complete(communicator);
  return toss() ? kNcclInProgress : kNcclSuccess;
}

// All ranks have called. If one of them has given up, the others hear nothing.
void NcclDouble::complete(Communicator& communicator) {
  std::map<int, int> ranks_of_device;
  for (const auto& [rank, member] : communicator.members) {
    if (member->is_aborted) return;
    ++ranks_of_device[member->device];
  }
  const bool is_valid = has_host_ids_ || ranks_of_device.size() == communicator.members.size();
  for (const auto& [rank, member] : communicator.members) {
    const int result = is_valid ? kNcclSuccess : ranks_of_device[member->device] > 1 ? kInvalidUsage : kRemoteError;
    later([member = member, result] { member->is_ready = true, member->result = result; });
  }
}

int NcclDouble::finalize(void* comm) {
  const MemberPtr member = ready(comm);
  begin(*member);
  member->is_finalized = true;
  if (member->finished == member->launched && toss()) return kNcclSuccess;
  member->is_finalizing = true;
  later([member] { member->is_finalizing = false; });
  return kNcclInProgress;
}

int NcclDouble::destroy(void* comm) {
  const MemberPtr member = own(comm);
  members_.erase(comm);
  if (!member->is_finalized) refuse("is called for a communicator that is not finalized", kInvalidUsage);
  if (member->is_in_progress()) refuse("is called for a communicator that is in progress", kInvalidUsage);
  return kNcclSuccess;
}

// What was to be launched later is in its stream afterwards, but gives no result.
int NcclDouble::abort(Lock& lock, void* comm) {
  const MemberPtr member = own(comm);
  members_.erase(comm);
  changed_.wait(lock, [&] { return !member->is_launching; });
  member->is_aborted = true;
  changed_.notify_all();
  return kNcclSuccess;
}

}  // namespace lightcc::test
