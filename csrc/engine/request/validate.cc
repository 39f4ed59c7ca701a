#include "engine/request/validate.h"

#include "base/limits.h"

namespace lightcc {
namespace {

[[noreturn]] void refuse(const Request& request, int rank, const std::string& why) {
  throw Error(Code::invalid_argument, request.title() + " on rank " + std::to_string(rank) + ": " + why);
}

// What no memory could hold, and what the other members would take for damage.
void validate_sizes(const Request& request, int64_t members, int rank) {
  const Kind kind = request.what.kind;
  const bool gathers = kind == Kind::allgather || kind == Kind::alltoall;
  const int64_t most = gathers ? kMostRequestBytes / members : kMostRequestBytes;
  int64_t bytes = 0;
  for (auto& tensor : request.what.tensors) {
    const Shape& shape = tensor.shape;
    const int64_t width = int64_t(size_of(tensor.dtype));
    const bool fits = is_countable(shape) && count_of(shape) <= (most - bytes) / width;
    if (!fits || (gathers && !shape.empty() && shape[0] > most))
      refuse(request, rank, "a tensor of shape " + text_of(shape) + " is larger than lightcc can send");
    bytes += count_of(shape) * width;
  }
}

// A codec: sums of what it can turn into float32, under a name by which the ranks find what they have left behind.
void validate_codec(const Request& request, int rank) {
  const Announcement& what = request.what;
  if (what.codec.kind == CodecKind::none) return;
  if (const char* fault = fault_of(what.codec)) refuse(request, rank, std::string("compression: ") + fault);
  if (what.kind != Kind::allreduce || (what.op != ReduceOp::sum && what.op != ReduceOp::average))
    refuse(request, rank, "only sums and averages can be compressed");
  if (request.automatic) refuse(request, rank, "compression needs a name, by which what is left behind is found");
  for (auto& tensor : what.tensors)
    if (tensor.dtype != DType::float32 && tensor.dtype != DType::float16 && tensor.dtype != DType::bfloat16)
      refuse(request, rank,
             std::string("compression takes float32, float16 and bfloat16 tensors, not ") + name_of(tensor.dtype));
}

// Alltoall: the rows that go to each member; none given means equal parts.
void validate_splits(Request& request, size_t members, int rank) {
  auto& splits = request.what.splits;
  const bool given = !splits.empty();
  if (given && splits.size() != members * request.what.tensors.size())
    refuse(request, rank, std::to_string(splits.size()) + " splits for " + std::to_string(members) + " ranks");
  for (size_t t = 0; t < request.what.tensors.size(); ++t) {
    int64_t rows = request.what.tensors[t].shape[0], sum = 0;
    if (!given && rows % int64_t(members))
      refuse(request, rank,
             std::to_string(rows) + " rows cannot be split equally among " + std::to_string(members) +
                 " ranks; give splits");
    if (!given && rows / int64_t(members) > INT32_MAX)  // what comes is told as 32-bit numbers
      refuse(request, rank, std::to_string(rows / int64_t(members)) + " rows for one rank are more than 2^31 - 1");
    if (!given) splits.insert(splits.end(), members, rows / int64_t(members));
    for (size_t i = t * members; i < (t + 1) * members; ++i) {
      if (splits[i] < 0) refuse(request, rank, "a split is negative");
      sum += splits[i];
    }
    if (sum > rows)
      refuse(request, rank,
             "splits sum to " + std::to_string(sum) + ", more than the " + std::to_string(rows) + " rows there are");
  }
}

void validate_peer(const Request& request, const Group& group, int rank) {
  if (!group.has_member(request.what.root))
    refuse(request, rank,
           "the peer is a rank within the process set, and set " + std::to_string(request.group) + " has ranks 0 to " +
               std::to_string(group.size() - 1));
  if (request.place.kind != DeviceKind::cpu)
    refuse(request, rank,
           "send and recv take tensors in the host's memory; copy a GPU's to the host, or use a collective");
}

}  // namespace

void validate(Request& request, const Group* group, int rank) {
  const Announcement& what = request.what;
  const auto process_set = [&] {
    return "process set " + std::to_string(request.group) +
           (group ? " (ranks " + text_of(group->ranks()) + ")" : std::string());
  };
  if (!group) refuse(request, rank, process_set() + " does not exist");
  if (!group->contains(rank)) refuse(request, rank, "this rank is not in " + process_set());
  if (what.kind == Kind::join && request.group != 0)
    refuse(request, rank, "join() is of the whole job, not of " + process_set());
  if (int(what.kind) <= int(Kind::receive)) validate_sizes(request, group->size(), rank);
  if (is_point_to_point(what.kind)) validate_peer(request, *group, rank);
  if (what.kind == Kind::broadcast && !group->contains(what.root))
    refuse(request, rank, "root rank " + std::to_string(what.root) + " is not in " + process_set());
  if (what.kind == Kind::allreduce && what.op == ReduceOp::adasum)
    for (auto& tensor : what.tensors)
      if (!is_floating(tensor.dtype))
        refuse(request, rank,
               std::string("Adasum combines float16, bfloat16, float32 and float64 tensors, not ") +
                   name_of(tensor.dtype));
  validate_codec(request, rank);
  if (what.kind == Kind::reducescatter && what.op == ReduceOp::adasum)
    refuse(request, rank, "Adasum combines whole tensors; reducescatter has every other operation");
  bool rows = what.kind == Kind::allgather || what.kind == Kind::alltoall || what.kind == Kind::reducescatter;
  for (auto& tensor : what.tensors)
    if (rows && tensor.shape.empty()) refuse(request, rank, "a scalar has no dimension 0");
  if (what.kind == Kind::alltoall) validate_splits(request, size_t(group->size()), rank);
}

void validate_rows(const Response& response, const Announcement& what, int index, int members, bool absent) {
  const auto damaged = [&] {
    throw Error(Code::internal, "told to run " + response.key + " with rows that nobody announced");
  };
  if (what.kind != Kind::allgather && what.kind != Kind::alltoall) {
    if (what.kind != Kind::join && !response.rows.empty()) damaged();
    return;
  }
  const size_t n = size_t(members), me = size_t(index);
  const bool matrix = what.kind == Kind::alltoall;
  if (response.rows.size() != what.tensors.size()) damaged();
  for (size_t t = 0; t < response.rows.size(); ++t) {
    const auto& rows = response.rows[t];
    if (rows.size() != (matrix ? n * n : n)) damaged();
    int64_t sum = 0, elements;
    for (int64_t each : rows)
      if (each < 0 || each > kMostRequestBytes || (sum += each) > kMostRequestBytes) damaged();
    const Shape& shape = what.tensors[t].shape;
    if (shape.empty() || __builtin_mul_overflow(sum, count_of(Shape(shape.begin() + 1, shape.end())), &elements) ||
        elements > kMostRequestBytes)
      damaged();
    for (size_t i = 0; i < (matrix ? n : 1); ++i) {
      const int64_t own = absent ? 0 : matrix ? what.splits[t * n + i] : shape[0];
      if (rows[matrix ? me * n + i : me] != own) damaged();
    }
  }
}

}  // namespace lightcc
