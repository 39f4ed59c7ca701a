// Updates: gradients to the owners of their keys, who say whether they can take the step, and then take it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "embedding/handles.h"
#include "embedding/pool.h"

namespace lightcc::embedding {
namespace {

// One table's gradients on this rank, each key once.
struct Local {
  Table* table = nullptr;
  Numbers numbers;
  std::span<const int64_t> keys;
  const uint32_t* checks = nullptr;
  std::vector<uint32_t> occurrences;  // of each key, if the table counts them
  const std::byte* values = nullptr;
  Wanted* from = nullptr;  // the only lookup they are of
  std::vector<int64_t> added_keys;       // where several were added up: what the above refers to
  std::vector<uint32_t> added_checks;
  Buffer memory;
};

struct Given { std::span<const int64_t> keys; const uint32_t* checks; const std::byte* values; Wanted* from; };

Given given(const lightcc_embedding_gradient& g, const Table& table) {
  const auto* values = static_cast<const std::byte*>(g.values);
  if (!g.lookup) return {{g.keys, size_t(g.count)}, g.checks, values, nullptr};
  if (g.index < 0 || size_t(g.index) >= g.lookup->wanted.size())
    throw Error(Code::invalid_argument, table.about("a gradient is of no table of its lookup"));
  Wanted& w = g.lookup->wanted[size_t(g.index)];
  if (w.table != &table) throw Error(Code::invalid_argument, table.about("a gradient is of another table's lookup"));
  return {w.keys, w.checks.empty() ? nullptr : w.checks.data(), values, &w};
}

// A lookup that was not for training, say before there was an optimizer, may have a key in several places.
bool may_repeat(const lightcc_embedding_gradient& g) {
  return g.lookup && !(g.lookup->flags & LIGHTCC_EMBEDDING_TRAINING);
}

std::vector<uint32_t> occurrences_of(const Given& part) {
  std::vector<uint32_t> own(part.keys.size(), part.from ? 0 : 1);
  if (part.from) count_occurrences(*part.from, own.data());
  return own;
}

void add_occurrences(const Given& part, const int64_t* inverse, std::vector<uint32_t>& occurrences) {
  const std::vector<uint32_t> own = occurrences_of(part);
  for (size_t i = 0; i < own.size(); ++i) occurrences[size_t(inverse[i])] += own[i];
}

void add_up(Local& local, const std::vector<Given>& parts, Dedup& dedup) {
  std::vector<int64_t> all, inverse;
  for (const Given& part : parts) all.insert(all.end(), part.keys.begin(), part.keys.end());
  inverse.resize(all.size());
  std::vector<int64_t>& keys = local.added_keys;
  keys.resize(all.size());
  keys.resize(size_t(dedup.run(all, keys.data(), inverse.data())));
  if (local.table->shard->layout().checked) local.added_checks.resize(keys.size());
  if (local.table->admission.counts()) local.occurrences.assign(keys.size(), 0);
  local.values = local.memory.reserve(keys.size() * local.table->row_bytes() + 1);
  with_number(*local.table, [&](auto number) {
    using T = decltype(number);
    RowSums<T> sums(local.table->shard->layout().dim, int64_t(keys.size()), reinterpret_cast<T*>(local.memory.data()));
    size_t at = 0;
    for (const Given& part : parts) {
      sums.add(reinterpret_cast<const T*>(part.values), inverse.data() + at, int64_t(part.keys.size()));
      for (size_t i = 0; part.checks && i < part.keys.size(); ++i)
        local.added_checks[size_t(inverse[at + i])] = part.checks[i];
      if (!local.occurrences.empty()) add_occurrences(part, inverse.data() + at, local.occurrences);
      at += part.keys.size();
    }
  });
  local.keys = keys;
  local.checks = local.added_checks.empty() ? nullptr : local.added_checks.data();
}

Local local_of(Call& call, const lightcc_embedding_step& step) {
  if (step.size != sizeof step) throw Error(Code::invalid_argument, "lightcc_embedding_step has another size");
  Local local;
  local.table = step.table;
  if (&step.table->group != &call.group)
    throw Error(Code::invalid_argument, step.table->about("it is of another group"));
  if (!step.table->has_rule) throw Error(Code::invalid_argument, step.table->about("it has no optimizer"));
  local.numbers = {step.lr, step.beta1, step.beta2, step.eps, step.l1, step.l2, step.l21};
  std::vector<Given> parts;
  for (int i = 0; i < step.gradient_count; ++i) parts.push_back(given(step.gradients[i], *step.table));
  if (parts.size() != 1 || may_repeat(step.gradients[0])) {
    add_up(local, parts, call.group.dedup);
    return local;
  }
  local.keys = parts[0].keys;
  local.checks = parts[0].checks;
  if (local.table->admission.counts()) local.occurrences = occurrences_of(parts[0]);
  local.values = parts[0].values;
  local.from = parts[0].from;
  return local;
}

// Whether all are finite: a number that is not has all bits of its exponent set.
template <class T> bool finite(const T* numbers, int64_t count) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  constexpr Bits kExponent = std::bit_cast<Bits>(std::numeric_limits<T>::infinity());
  Bits bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= Bits((std::bit_cast<Bits>(numbers[i]) & kExponent) == kExponent);
  return !bad;
}

// The first key whose gradient has a number that is not finite; -1: none.
int64_t not_finite(const Local& local) {
  int64_t bad = -1;
  with_number(*local.table, [&](auto number) {
    using T = decltype(number);
    const int64_t dim = local.table->shard->layout().dim, count = int64_t(local.keys.size());
    const T* g = reinterpret_cast<const T*>(local.values);
    if (finite(g, count * dim)) return;
    bad = 0;
    while (finite(g + bad * dim, dim)) ++bad;
  });
  return bad;
}

void refuse_what_is_not_finite(Call& call, const std::vector<Local>& locals) {
  if (call.flags & LIGHTCC_EMBEDDING_SKIP) return;
  for (const Local& local : locals) {
    const int64_t bad = not_finite(local);
    if (bad < 0) continue;
    call.head.refuse(int(Code::invalid_argument),
                     local.table->about("the gradient of key " + std::to_string(local.keys[size_t(bad)]) +
                                        " is not finite; nothing was applied"));
    return;
  }
}

void apply_steps(std::vector<OwnedStep> steps, double scale) {
  for (OwnedStep& step : steps) {
    if (scale >= 0 && scale != 1) step.scale(scale);
    if (scale >= 0) step.apply();
    step.table->sums = std::move(step.memory);
  }
}

void take_step(Call& call, std::vector<OwnedStep> steps) {
  if (call.flags & LIGHTCC_EMBEDDING_HOLD) call.group.held = std::move(steps);
  else apply_steps(std::move(steps), 1);
}

// World of one: the caller's gradients are the sums.
void update_here(Call& call, std::vector<Local>& locals) {
  if (call.head.status) throw Error(Code(call.head.status), call.head.text);
  std::vector<OwnedStep> steps(locals.size());
  for (size_t i = 0; i < locals.size(); ++i) {
    Local& local = locals[i];
    OwnedStep& step = steps[i];
    step.table = local.table;
    step.numbers = local.numbers;
    step.owned.keys.assign(local.keys.begin(), local.keys.end());
    if (local.checks) step.owned.checks.assign(local.checks, local.checks + local.keys.size());
    step.gradients = local.values;
    step.memory = std::move(local.memory);
    if (local.from) {
      step.owned.found = std::move(local.from->found);
      step.owned.generation = local.from->generation;
      step.owned.rows = local.from->rows_then;
    }
    step.find();
    step.admit(local.occurrences);
    if (!step.reserve()) throw Error(Code::internal, step.table->about("memory does not suffice; nothing was applied"));
    step.total_rows = step.rows_after();
    if (call.flags & LIGHTCC_EMBEDDING_HOLD) call.sums.push_back(step.sum = step.squares());
  }
  take_step(call, std::move(steps));
  call.stage = Call::Stage::done;
}

// The number of the lookup whose keys the owners still have; -1: the keys must travel. All ranks forget a lookup when
// an update that refers to it has come, so another update that is under way may be its end.
int64_t known_lookup(const Local& local) {
  constexpr ptrdiff_t kSafe = 8;  // owners keep twice as many, and so many calls at most are under way
  const Table& table = *local.table;
  if (!local.from || table.group.updates.size() > 1) return -1;
  const auto asked = std::find_if(table.asked.begin(), table.asked.end(),
                                  [&](const Asked& one) { return one.call == local.from->call; });
  return table.asked.end() - asked <= kSafe && asked != table.asked.end() ? asked->call : -1;
}

// The part of a lookup's gradients that is for this rank itself.
OwnGradients own_of(const Local& local, int rank) {
  const std::vector<int64_t>& counts = local.from->counts;
  const auto first = size_t(std::accumulate(counts.begin(), counts.begin() + rank, int64_t(0)));
  const auto count = size_t(counts[size_t(rank)]);
  OwnGradients own;
  own.values = local.values + first * local.table->row_bytes();
  own.bytes = count * local.table->row_bytes();
  if (!local.occurrences.empty()) {
    const auto begin = local.occurrences.begin() + ptrdiff_t(first);
    own.occurrences.assign(begin, begin + ptrdiff_t(count));
  }
  return own;
}

void send_gradients(Call& call, const std::vector<Local>& locals) {
  std::vector<RankSegment> to_ranks(size_t(call.group.size()));
  std::vector<Partition> partitions(locals.size());  // of those whose keys travel
  const bool empty = call.head.status || (call.flags & LIGHTCC_EMBEDDING_SKIP);
  for (RankSegment& segment : to_ranks) segment.head = call.head;
  for (size_t i = 0; i < locals.size(); ++i) {
    const Table& table = *locals[i].table;
    TableHeader head = table.header();
    head.numbers = locals[i].numbers;
    head.lookup = empty ? -1 : known_lookup(locals[i]);
    if (head.lookup < 0) partitions[i].make(table, empty ? std::span<const int64_t>() : locals[i].keys);
    for (size_t rank = 0; rank < to_ranks.size(); ++rank) {
      const int64_t count = head.lookup < 0 ? partitions[i].counts[rank] : locals[i].from->counts[rank];
      head.keys = head.lookup < 0 ? count : 0;
      const bool stays = head.lookup >= 0 && int(rank) == call.group.rank();
      head.value_bytes = stays ? 0 : count * int64_t(table.gradient_bytes());
      to_ranks[rank].tables.push_back({head, {}, nullptr, nullptr});
    }
    if (head.lookup >= 0) call.own[i] = own_of(locals[i], call.group.rank());
  }
  std::vector<size_t> at(locals.size(), 0);
  send(call, "call", to_ranks, [&](int rank, std::vector<PartPlaces>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Local& local = locals[i];
      const TableHeader& head = to_ranks[size_t(rank)].tables[i].head;
      const size_t bytes = local.table->row_bytes();
      if (head.lookup >= 0) {
        const auto count = size_t(local.from->counts[size_t(rank)]);
        at[i] += count;
        if (rank == call.group.rank()) continue;
        const size_t first = at[i] - count;
        std::memcpy(parts[i].values, local.values + first * bytes, count * bytes);
        if (!local.occurrences.empty())
          std::memcpy(parts[i].values + count * bytes, local.occurrences.data() + first, count * sizeof(uint32_t));
        continue;
      }
      for (int64_t n = 0; n < head.keys; ++n) {
        const size_t place = size_t(partitions[i].order[at[i]++]);
        parts[i].keys[n] = local.keys[place];
        if (parts[i].checks) parts[i].checks[n] = local.checks[place];
        std::memcpy(parts[i].values + size_t(n) * bytes, local.values + place * bytes, bytes);
        if (!local.occurrences.empty())
          std::memcpy(parts[i].values + size_t(head.keys) * bytes + size_t(n) * sizeof(uint32_t),
                      &local.occurrences[place], sizeof(uint32_t));
      }
    }
  });
}

// The lookups of a table that ranks refer to: they are forgotten with this.
std::vector<Asked> referred(Table& table, const std::vector<RankSegment>& calls, size_t index) {
  std::vector<Asked> taken;
  for (const RankSegment& call : calls) {
    const int64_t number = index < call.tables.size() ? call.tables[index].head.lookup : -1;
    const auto asked = std::find_if(table.asked.begin(), table.asked.end(),
                                    [&](const Asked& one) { return number >= 0 && one.call == number; });
    if (asked == table.asked.end()) continue;
    taken.push_back(std::move(*asked));
    table.asked.erase(asked);
  }
  return taken;
}

bool anybody_skips(const Call& call) {
  for (const RankSegment& segment : call.calls)
    if (segment.head.flags & LIGHTCC_EMBEDDING_SKIP && segment.head.op == Op::update) return true;
  return false;
}

std::vector<OwnedStep> collected(Call& call, std::vector<std::vector<Asked>>& asked) {
  const double divisor = call.flags & LIGHTCC_EMBEDDING_AVERAGE ? call.group.size() : 1;
  std::vector<OwnedStep> steps(call.wanted.size());
  call.own.resize(steps.size());  // none where this rank serves
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].table = call.wanted[i].table;
    steps[i].collect(call.calls, i, call.own[i], asked[i], divisor, call.group.dedup);
    if (call.flags & LIGHTCC_EMBEDDING_HOLD) steps[i].sum = steps[i].squares();
    if (!steps[i].reserve())
      throw Error(Code::internal, steps[i].table->about("memory does not suffice; nothing was applied"));
  }
  return steps;
}

}  // namespace

void begin_update(Call& call, std::span<const lightcc_embedding_step> steps) {
  std::vector<Local> locals;
  for (const lightcc_embedding_step& step : steps) {
    locals.push_back(local_of(call, step));
    for (size_t i = 0; i + 1 < locals.size(); ++i)
      if (locals[i].table == step.table)
        throw Error(Code::invalid_argument, step.table->about("it is twice in an update"));
    call.wanted.emplace_back().table = step.table;
  }
  call.head.op = Op::update;
  call.head.flags = call.flags;
  refuse_what_is_not_finite(call, locals);
  if (call.group.size() > 1) {
    call.number = call.group.calls++;
    call.group.updates.push_back(&call);
    call.own.resize(locals.size());
    return send_gradients(call, locals);
  }
  call.skipped = call.flags & LIGHTCC_EMBEDDING_SKIP;
  if (!call.skipped) return update_here(call, locals);
  call.stage = Call::Stage::done;
}

void collect_update(Call& call) {
  if (anybody_skips(call)) {
    call.skipped = true;
    call.stage = Call::Stage::done;
    return;
  }
  std::vector<std::vector<Asked>> asked;
  for (size_t i = 0; i < call.wanted.size(); ++i) asked.push_back(referred(*call.wanted[i].table, call.calls, i));
  RankSegment said;
  said.head.op = Op::agree;
  try {
    if (call.head.status) throw Error(Code(call.head.status), std::string(call.head.text));
    if (!call.group.held.empty()) throw Error(Code::invalid_argument, kHeld);
    call.steps = collected(call, asked);
    for (const OwnedStep& step : call.steps) {
      TablePart part;
      part.head.sum = step.sum;
      part.head.rows = step.rows_after();
      said.tables.push_back(part);
    }
  } catch (const Error& error) {
    said.head.refuse(int(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    said.head.refuse(int(Code::internal), "memory does not suffice for an update; nothing was applied");
  }
  std::vector<RankSegment> to_ranks(size_t(call.group.size()), said);
  send(call, "agree", to_ranks, [](int, auto&) {});
  call.stage = Call::Stage::second_message;
}

void end_update(Call& call) {
  std::vector<OwnedStep> steps = std::exchange(call.steps, {});
  call.sums.assign(steps.size(), 0);
  for (int rank = 0; rank < call.group.size(); ++rank) {
    const RankSegment said = parse(call.message->from(rank), rank);
    if (said.head.status) throw Error(Code(said.head.status), "rank " + std::to_string(rank) + ": " + said.head.text);
    for (size_t i = 0; i < said.tables.size() && i < steps.size(); ++i) {
      call.sums[i] += said.tables[i].head.sum;
      steps[i].total_rows += said.tables[i].head.rows;
    }
  }
  call.first.reset();
  call.own.clear();
  take_step(call, std::move(steps));
}

void apply_held(Group& group, double scale) { apply_steps(std::exchange(group.held, {}), scale); }

}  // namespace lightcc::embedding
