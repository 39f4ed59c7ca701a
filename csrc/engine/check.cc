#include "engine/check.h"

#include <algorithm>

namespace lightcc {
namespace {

[[noreturn]] void refuse(const Request& request, int rank, const std::string& why) {
  throw Error(Code::invalid_argument, request.title() + " on rank " + std::to_string(rank) + ": " + why);
}

bool has(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

// Alltoall: the rows that go to each member; none given means equal parts.
void check_splits(Request& request, size_t members, int rank) {
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

}  // namespace

void check(Request& request, const std::vector<int>& ranks, int rank) {
  const Announcement& what = request.what;
  std::string set = "process set " + std::to_string(request.group);
  if (ranks.empty()) refuse(request, rank, set + " does not exist");
  set += " (ranks " + text_of(ranks) + ")";
  if (!has(ranks, rank)) refuse(request, rank, "this rank is not in " + set);
  if (what.kind == Kind::join && request.group != 0) refuse(request, rank, "join() is of the whole job, not of " + set);
  if (what.kind == Kind::broadcast && !has(ranks, what.root))
    refuse(request, rank, "root rank " + std::to_string(what.root) + " is not in " + set);
  if (what.kind == Kind::allreduce && what.op == ReduceOp::adasum)
    for (auto& tensor : what.tensors)
      if (!is_floating(tensor.dtype))
        refuse(request, rank,
               std::string("Adasum combines float16, bfloat16, float32 and float64 tensors, not ") +
                   name_of(tensor.dtype));
  if (what.kind == Kind::reducescatter && what.op == ReduceOp::adasum)
    refuse(request, rank, "Adasum combines whole tensors; reducescatter has every other operation");
  bool rows = what.kind == Kind::allgather || what.kind == Kind::alltoall || what.kind == Kind::reducescatter;
  for (auto& tensor : what.tensors)
    if (rows && tensor.shape.empty()) refuse(request, rank, "a scalar has no dimension 0");
  if (what.kind == Kind::alltoall) check_splits(request, ranks.size(), rank);
}

void check_rows(const Item& item, const Announcement& what, int index, int members, bool absent) {
  constexpr int64_t kMostRows = int64_t(1) << 46;
  const auto damaged = [&] {
    throw Error(Code::internal, "told to run " + item.key + " with rows that nobody announced");
  };
  if (what.kind != Kind::allgather && what.kind != Kind::alltoall) {
    if (what.kind != Kind::join && !item.rows.empty()) damaged();
    return;
  }
  const size_t n = size_t(members), me = size_t(index);
  const bool matrix = what.kind == Kind::alltoall;
  if (item.rows.size() != what.tensors.size()) damaged();
  for (size_t t = 0; t < item.rows.size(); ++t) {
    const auto& rows = item.rows[t];
    if (rows.size() != (matrix ? n * n : n)) damaged();
    int64_t sum = 0, elements;
    for (int64_t each : rows)
      if (each < 0 || each > kMostRows || (sum += each) > kMostRows) damaged();
    const Shape& shape = what.tensors[t].shape;
    if (shape.empty() || __builtin_mul_overflow(sum, count_of(Shape(shape.begin() + 1, shape.end())), &elements) ||
        elements > kMostRows)
      damaged();
    for (size_t i = 0; i < (matrix ? n : 1); ++i) {
      const int64_t own = absent ? 0 : matrix ? what.splits[t * n + i] : shape[0];
      if (rows[matrix ? me * n + i : me] != own) damaged();
    }
  }
}

}  // namespace lightcc
