// Collectives of an NcclDouble: from the call by way of a group into a stream, and what a kernel does there.
#include <algorithm>

#include "nccl_double.h"

namespace lightcc::test {
namespace {

bool overlap(const Access& a, const Access& b) {
  const auto begin = [](const Access& one) { return reinterpret_cast<uintptr_t>(one.begin); };
  return begin(a) < begin(b) + b.bytes && begin(b) < begin(a) + a.bytes;
}
const void* behind(const void* begin, size_t bytes) { return static_cast<const std::byte*>(begin) + bytes; }

}  // namespace

// Calls

// Sets how many bytes this rank reads and writes as well.
void NcclDouble::check(Call& call, const Member& member) {
  const size_t ranks = size_t(member.communicator->ranks), own_rank = size_t(member.rank);
  if (nccl_size_of(call.numbers.dtype) == 0) refuse("is called with a dtype that is not modelled", kInvalidArgument);
  if (!nccl_op_name(call.numbers.op)) refuse("is called with an operation that is not modelled", kInvalidArgument);
  if (call.root < 0 || size_t(call.root) >= ranks)
    refuse("is called for rank " + std::to_string(call.root) + " of " + std::to_string(ranks), kInvalidArgument);
  const size_t bytes = call.numbers.count * nccl_size_of(call.numbers.dtype), own = own_rank * bytes;
  const bool is_root = call.root == member.rank;
  call.input_bytes = call.output_bytes = bytes;
  bool is_in_place = call.input == call.output;
  switch (call.operation) {
    case Operation::all_reduce: break;
    case Operation::reduce: call.output_bytes = is_root ? bytes : 0; break;
    case Operation::broadcast: call.input_bytes = is_root ? bytes : 0; break;
    case Operation::all_gather:
      call.output_bytes *= ranks, is_in_place = call.input == behind(call.output, own);
      break;
    case Operation::reduce_scatter:
      call.input_bytes *= ranks, is_in_place = call.output == behind(call.input, own);
      break;
    case Operation::send: call.output_bytes = 0; break;
    case Operation::recv: call.input_bytes = 0; break;
  }
  if (!is_in_place && overlap({call.input, call.input_bytes, false}, {call.output, call.output_bytes, true}))
    refuse("is called with an output that overlaps the input, but is not in place", kInvalidUsage);
}

std::vector<Access> NcclDouble::accesses_of(const Call& call) {
  std::vector<Access> accesses;
  if (call.input_bytes > 0) accesses.push_back({call.input, call.input_bytes, false});
  if (call.output_bytes > 0) accesses.push_back({call.output, call.output_bytes, true});
  return accesses;
}

int NcclDouble::collective(Call call, void* comm, void* stream) {
  const MemberPtr member = ready(comm);
  check(call, *member);
  const auto group = groups_.find(std::this_thread::get_id());
  LaunchPtr launch = group == groups_.end() ? nullptr : group->second.launch;
  if (!launch) launch = std::make_shared<Launch>(Launch{member, stream, {}});
  if (launch->member != member || launch->stream != stream)
    refuse("is called for another communicator or stream than its group: not modelled", kInvalidUsage);
  for (const Call& other : launch->calls)
    for (const Access& a : accesses_of(other))
      for (const Access& b : accesses_of(call))
        if ((a.writes || b.writes) && overlap(a, b))
          refuse("is called with memory that another call of its group uses", kInvalidUsage);
  meet(call, *member);
  launch->calls.push_back(std::move(call));
  if (group == groups_.end()) return start(launch);
  group->second.launch = launch;
  return kNcclSuccess;
}

int NcclDouble::start_group() {
  device_of_call();
  ++groups_[std::this_thread::get_id()].depth;
  return kNcclSuccess;
}

int NcclDouble::end_group() {
  device_of_call();
  const auto found = groups_.find(std::this_thread::get_id());
  if (found == groups_.end()) refuse("is called outside of a group", kInvalidUsage);
  if (--found->second.depth > 0) return kNcclSuccess;
  const Group group = std::move(found->second);
  groups_.erase(found);
  if (group.result) throw Failure{group.result, "is called for a group of which a call has failed", false};
  return group.launch ? start(group.launch) : kNcclSuccess;
}

// Finds the calls of the other ranks that belong to this one, or makes room for them.
void NcclDouble::meet(Call& call, Member& member) {
  const bool is_send = call.operation == Operation::send;
  const bool is_between_two = is_send || call.operation == Operation::recv;
  Communicator& communicator = *member.communicator;
  const std::pair<int, int> ends = !is_between_two ? std::pair(-1, -1)
                                   : is_send       ? std::pair(member.rank, call.root)
                                                   : std::pair(call.root, member.rank);
  call.place = is_between_two ? (is_send ? 0 : 1) : size_t(member.rank);
  const MeetingKey key{ends.first, ends.second, (is_send ? member.sends : member.calls)[ends]++};
  std::shared_ptr<Meeting>& meeting = communicator.meetings[key];
  if (!meeting) {
    meeting = std::make_shared<Meeting>();
    if (is_between_two) meeting->ranks = {ends.first, ends.second};
    else for (int rank = 0; rank < communicator.ranks; ++rank) meeting->ranks.push_back(rank);
    meeting->parts.resize(meeting->ranks.size());
  }
  call.meeting = meeting;
  if (++meeting->callers == meeting->ranks.size()) communicator.meetings.erase(key);
}

// At once or later, but in the order of the stream.
int NcclDouble::start(LaunchPtr launch) {
  begin(*launch->member);
  const bool is_at_once = toss();
  if (!(is_at_once ? queue(launch, false) : cuda_.promise(launch->member->device, launch->stream)))
    throw Failure{kCudaError, "could not use the stream", false};
  if (is_at_once) return kNcclSuccess;
  launch->member->is_launching = true;
  later([this, launch] {
    if (!queue(launch, true)) launch->member->result = kCudaError;
    launch->member->is_launching = false;
  });
  return kNcclInProgress;
}

bool NcclDouble::queue(const LaunchPtr& launch, bool was_promised) {
  Member& member = *launch->member;
  std::vector<Access> accesses;
  for (const Call& call : launch->calls)
    for (const Access& access : accesses_of(call)) accesses.push_back(access);
  launch->number = member.launched;
  if (!cuda_.run(member.device, launch->stream, "a kernel of NCCL", accesses, [=, this] { run(*launch); },
                 was_promised))
    return false;
  ++member.launched, ++kernels_;
  return true;
}

// Kernels

void NcclDouble::run(const Launch& launch) {
  Lock lock(mutex_);
  const auto deadline = Time::now() + patience_;
  Member& member = *launch.member;
  std::vector<std::string>& running = running_[member.device];
  const bool has_turn = await(lock, launch, deadline, [&]() -> std::string {
    if (running.size() >= at_a_time_)
      return "device " + std::to_string(member.device) + ", where " + running[0] + " runs";
    return member.finished < launch.number ? "the one before" : "";
  });
  if (has_turn) {
    const std::string words = in_words(launch);
    running.push_back(words);
    exchange(lock, launch, deadline);
    running.erase(std::ranges::find(running, words));
  }
  ++member.finished, --kernels_;
  changed_.notify_all();
}

// Holds no lock while it touches memory of the device, as other kernels do.
void NcclDouble::exchange(Lock& lock, const Launch& launch, Time::time_point deadline) {
  const Communicator& communicator = *launch.member->communicator;
  lock.unlock();
  std::vector<std::vector<std::byte>> inputs;
  for (const Call& call : launch.calls) {
    inputs.emplace_back(call.input_bytes);
    move_bytes(inputs.back().data(), call.input, call.input_bytes);
  }
  lock.lock();
  for (size_t i = 0; i < inputs.size(); ++i) arrive(launch.calls[i], communicator, std::move(inputs[i]));
  changed_.notify_all();
  const bool have_met = await(lock, launch, deadline, [&]() -> std::string {
    for (const Call& call : launch.calls)
      if (const auto missing = call.meeting->missing(); !missing.empty())
        return (missing.size() == 1 ? "rank " : "ranks ") + lightcc::text_of(missing);
    return "";
  });
  if (!have_met) return;
  lock.unlock();
  for (const Call& call : launch.calls)
    if (!call.meeting->is_broken) move_bytes(call.output, result_of(call).data(), call.output_bytes);
  lock.lock();
}

// Whether nothing is missing any more, before the kernel is to end.
bool NcclDouble::await(Lock& lock, const Launch& launch, Time::time_point deadline,
                       const std::function<std::string()>& missing) {
  const auto is_to_end = [&] { return is_ending_ || launch.member->is_aborted; };
  if (changed_.wait_until(lock, deadline, [&] { return is_to_end() || missing().empty(); })) return !is_to_end();
  cuda_.report(in_words(launch) + " waits for " + missing() + ": launched in another order?");
  return false;
}

std::vector<int> NcclDouble::Meeting::missing() const {
  std::vector<int> missing;
  for (size_t i = 0; i < parts.size(); ++i)
    if (!parts[i]) missing.push_back(ranks[i]);
  return missing;
}

void NcclDouble::arrive(const Call& call, const Communicator& communicator, std::vector<std::byte> input) {
  Meeting& meeting = *call.meeting;
  meeting.parts[call.place] = std::make_unique<Part>(Part{call, std::move(input)});
  meeting.parts[call.place]->call.meeting = nullptr;  // else each would hold the other
  if (!meeting.missing().empty()) return;
  const bool is_between_two = call.operation == Operation::send || call.operation == Operation::recv;
  const Call& first = meeting.parts[0]->call;
  for (const auto& part : meeting.parts) {
    const Call& other = part->call;
    if (other.numbers == first.numbers &&
        (is_between_two || (other.operation == first.operation && other.root == first.root)))
      continue;
    meeting.is_broken = true;
    cuda_.report("ranks " + std::to_string(meeting.ranks[0]) + " and " + std::to_string(meeting.ranks[other.place]) +
                 " of communicator " + std::to_string(communicator.number) + " disagree: " + in_words(first) +
                 ", but " + in_words(other));
  }
}

std::vector<std::byte> NcclDouble::result_of(const Call& call) {
  const auto& parts = call.meeting->parts;
  const size_t offset = call.operation == Operation::reduce_scatter ? call.place * call.output_bytes : 0;
  std::vector<const std::byte*> inputs;
  std::vector<std::byte> all;
  for (const auto& part : parts) {
    inputs.push_back(part->input.data() + offset);
    all.insert(all.end(), part->input.begin(), part->input.end());
  }
  switch (call.operation) {
    case Operation::reduce: if (call.output_bytes == 0) return {}; [[fallthrough]];
    case Operation::all_reduce:
    case Operation::reduce_scatter: return nccl_reduced(call.numbers, inputs);
    default: return all;  // of Broadcast and Recv one rank has an input
  }
}

// Words

std::string NcclDouble::in_words(const Call& call) {
  static constexpr const char* kNames[] = {"AllReduce", "Reduce", "Broadcast", "AllGather", "ReduceScatter",
                                           "Send", "Recv"};
  std::string words = kNames[int(call.operation)] + (" of " + test::in_words(call.numbers));
  const std::string rank = " rank " + std::to_string(call.root);
  switch (call.operation) {
    case Operation::reduce: words += " at" + rank; [[fallthrough]];
    case Operation::all_reduce:
    case Operation::reduce_scatter: return words + " (" + nccl_op_name(call.numbers.op) + ")";
    case Operation::send: return words + " to" + rank;
    case Operation::broadcast:
    case Operation::recv: return words + " from" + rank;
    default: return words;
  }
}

std::string NcclDouble::in_words(const Launch& launch) {
  const std::string calls = launch.calls.size() == 1 ? in_words(launch.calls[0])
                                                     : "a group of " + std::to_string(launch.calls.size()) + " calls";
  return calls + " on rank " + std::to_string(launch.member->rank) + " of communicator " +
         std::to_string(launch.member->communicator->number);
}

}  // namespace lightcc::test
