// An owner's side of an update: what came from the ranks becomes one gradient a key, and then a step of the shard.
#include <algorithm>
#include <cstring>
#include <utility>

#include "embedding/handles.h"
#include "embedding/pool.h"

namespace lightcc::embedding {
namespace {

// One rank's part of an update: keys that came with it, or those of a lookup.
struct GradientPart {
  const TablePart* came = nullptr;  // nullptr: the rank serves
  const Asked* asked = nullptr;
  const std::byte* values = nullptr;
  const std::byte* occurrences = nullptr;
  int rank = 0;
  int64_t count() const { return asked ? asked->count(rank) : came ? came->head.keys : 0; }
};

std::vector<GradientPart> parts_of(const Table& table, const std::vector<RankSegment>& calls, size_t index,
                           const OwnGradients& own, const std::vector<Asked>& asked) {
  std::vector<GradientPart> parts(calls.size());
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    GradientPart& part = parts[rank];
    part.rank = int(rank);
    if (index >= calls[rank].tables.size()) continue;
    part.came = &calls[rank].tables[index];
    const int64_t number = part.came->head.lookup;
    for (const Asked& one : asked)
      if (number >= 0 && one.call == number) part.asked = &one;
    if (number >= 0 && !part.asked)
      throw Error(Code::internal, table.about("gradients came of a lookup that was not answered here"));
    const bool stayed = int(rank) == table.group.rank() && own.values;
    if (part.came->head.value_bytes != (stayed ? 0 : part.count() * int64_t(table.gradient_bytes())))
      throw Error(Code::internal, table.about("gradients came that are not as many as their keys"));
    part.values = stayed ? own.values : part.came->values;
    part.occurrences = stayed ? reinterpret_cast<const std::byte*>(own.occurrences.data())
                              : part.values + size_t(part.count()) * table.row_bytes();
  }
  return parts;
}

// How often each key occurred on a rank.
void add_occurrences(const GradientPart& part, const int64_t* inverse, std::vector<uint32_t>& occurrences) {
  const std::byte* counts = part.occurrences;
  for (int64_t i = 0; i < part.count(); ++i, counts += sizeof(uint32_t)) {
    uint32_t more;
    std::memcpy(&more, counts, sizeof more);
    occurrences[size_t(inverse[i])] += more;
  }
}

// The ranks refer to different lookups, or some to none: their keys are collected anew.
OwnedKeys merged(const Table& table, const std::vector<GradientPart>& parts, Dedup& dedup) {
  std::vector<std::vector<int64_t>> keys(parts.size());
  std::vector<std::vector<uint32_t>> checks(parts.size());
  std::vector<AskedKeys> asked(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const GradientPart& part = parts[i];
    if (!part.asked) {
      if (part.came) asked[i] = {part.came->keys, part.came->checks};
      continue;
    }
    const OwnedKeys& owned = part.asked->owned;
    for (int64_t n = part.asked->first[i]; n < part.asked->first[i + 1]; ++n) {
      const auto place = size_t(owned.inverse[size_t(n)]);
      keys[i].push_back(owned.keys[place]);
      if (!owned.checks.empty()) checks[i].push_back(owned.checks[place]);
    }
    asked[i] = {keys[i], checks[i].empty() ? nullptr : checks[i].data()};
  }
  OwnedKeys all;
  all.collect(table, asked, {}, dedup);
  return all;
}

}  // namespace

void OwnGradients::keep() {
  if (!values) return;
  std::memcpy(memory.reserve(bytes + 1), values, bytes);
  values = memory.data();
}

void OwnedStep::collect(const std::vector<RankSegment>& calls, size_t index, const OwnGradients& own,
                        std::vector<Asked>& asked, double divisor, Dedup& dedup) {
  const std::vector<GradientPart> parts = parts_of(*table, calls, index, own, asked);
  const bool one_lookup = asked.size() == 1 && std::all_of(parts.begin(), parts.end(), [&](const GradientPart& part) {
                            return part.asked || (asked[0].count(part.rank) == 0 && part.count() == 0);
                          });
  std::vector<int64_t> first(parts.size(), 0);  // of each rank's keys in owned.inverse
  if (one_lookup) {
    first = asked[0].first;
    owned = std::move(asked[0].owned);
  } else {
    owned = merged(*table, parts, dedup);
    for (size_t i = 1; i < parts.size(); ++i) first[i] = first[i - 1] + parts[i - 1].count();
  }
  memory = std::move(table->sums);
  gradients = memory.reserve(bytes() + 1);
  std::vector<uint32_t> occurrences(table->admission.counts() ? owned.keys.size() : 0, 0);
  with_number(*table, [&](auto number) {
    using T = decltype(number);
    RowSums<T> sums(table->shard->layout().dim, int64_t(owned.keys.size()), reinterpret_cast<T*>(memory.data()));
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].came) continue;
      numbers = parts[i].came->head.numbers;
      const int64_t* inverse = owned.inverse.data() + first[i];
      sums.add(reinterpret_cast<const T*>(parts[i].values), inverse, parts[i].count());
      if (!occurrences.empty()) add_occurrences(parts[i], inverse, occurrences);
    }
  });
  if (divisor != 1) scale(1 / divisor);
  find();
  admit(occurrences);
}

void OwnedStep::scale(double factor) {
  if (gradients != memory.data()) {  // they are the caller's
    std::memcpy(memory.reserve(bytes() + 1), gradients, bytes());
    gradients = memory.data();
  }
  with_number(*table, [&](auto number) {
    using T = decltype(number);
    T* g = reinterpret_cast<T*>(memory.data());
    for (size_t i = 0; i < bytes() / sizeof(T); ++i) g[i] *= T(factor);
  });
}

void OwnedStep::find() {
  const Shard& shard = *table->shard;
  const bool are_valid = owned.found.size() == owned.keys.size() && owned.generation == shard.generation();
  if (are_valid && owned.rows == shard.index().size()) return;
  owned.found.resize(owned.keys.size());
  shard.find(owned.keys, owned.checks_or_null(), owned.found.data());
  owned.generation = shard.generation();
  owned.rows = shard.index().size();
}

int64_t OwnedStep::rows_after() const {
  return int64_t(table->shard->index().size()) + std::count(owned.found.begin(), owned.found.end(), nullptr);
}

bool OwnedStep::reserve() {
  const auto born = size_t(std::count(owned.found.begin(), owned.found.end(), nullptr));
  table->shard->steps().reserve_next();
  table->shard->reserve_logs(owned.keys.size());
  reserved_at = table->shard->index().size();
  return table->admission.reserve(counted) && table->shard->reserve(born);
}

void OwnedStep::apply() {
  Shard& shard = *table->shard;
  find();
  if (reserved_at != shard.index().size() && !reserve())  // rows that were imported since
    throw Error(Code::internal, table->about("memory does not suffice any more for the rows of a held update"));
  shard.update(owned.keys, owned.checks_or_null(), owned.found.data(), gradients, numbers);
  table->admission.apply(counted);
  for (size_t i = 0; table->eviction.active() && i < owned.keys.size(); ++i)
    if (!owned.found[i]) table->eviction.born(shard, shard.row_of(owned.keys[i]));
  table->total_rows = total_rows;
  table->after_step();
}

double OwnedStep::squares() const {
  double sum = 0;
  with_number(*table, [&](auto number) {
    using T = decltype(number);
    const T* g = reinterpret_cast<const T*>(gradients);
    const int64_t dim = table->shard->layout().dim;
    for (size_t i = 0; i < owned.keys.size(); ++i, g += dim) sum += double(sum_of_squares(g, dim));
  });
  return sum;
}

}  // namespace lightcc::embedding
