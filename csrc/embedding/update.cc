// Updates: gradients to the owners of their keys, who say whether they can take the step, and then take it.
#include <cmath>
#include <cstring>
#include <utility>

#include "embedding/handles.h"
#include "embedding/pool.h"

namespace lightcc::embedding {
namespace {

// One table's gradients on this rank, each key once.
struct Local {
  Table* table = nullptr;
  Numbers numbers;
  std::vector<int64_t> keys;
  std::vector<uint32_t> checks;
  const std::byte* values = nullptr;
  std::vector<double> memory;  // of values, if they were added up
  const Wanted* from = nullptr;  // the only lookup they are of
};

struct Given { std::span<const int64_t> keys; const uint32_t* checks; const std::byte* values; const Wanted* from; };

Given given(const lightcc_embedding_gradient& g, const Table& table) {
  const auto* values = static_cast<const std::byte*>(g.values);
  if (!g.lookup) return {{g.keys, size_t(g.count)}, g.checks, values, nullptr};
  if (g.index < 0 || size_t(g.index) >= g.lookup->wanted.size())
    throw Error(Code::invalid_argument, table.about("a gradient is of no table of its lookup"));
  const Wanted& w = g.lookup->wanted[size_t(g.index)];
  if (w.table != &table) throw Error(Code::invalid_argument, table.about("a gradient is of another table's lookup"));
  return {w.keys, w.checks.empty() ? nullptr : w.checks.data(), values, &w};
}

template <class Body> void with_number(const Table& table, Body body) {
  if (table.shard->layout().number_bytes == sizeof(double)) body(double());
  else body(float());
}

void add_up(Local& local, const std::vector<Given>& parts, Dedup& dedup) {
  std::vector<int64_t> all, inverse;
  for (const Given& part : parts) all.insert(all.end(), part.keys.begin(), part.keys.end());
  inverse.resize(all.size());
  local.keys.resize(all.size());
  local.keys.resize(size_t(dedup.run(all, local.keys.data(), inverse.data())));
  if (local.table->shard->layout().checked) local.checks.resize(local.keys.size());
  local.memory.assign(local.keys.size() * local.table->row_bytes() / sizeof(double) + 1, 0);
  size_t at = 0;
  for (const Given& part : parts) {
    with_number(*local.table, [&](auto number) {
      using T = decltype(number);
      add_by_row(local.table->shard->layout().dim, reinterpret_cast<const T*>(part.values), inverse.data() + at,
                 int64_t(part.keys.size()), reinterpret_cast<T*>(local.memory.data()));
    });
    for (size_t i = 0; part.checks && i < part.keys.size(); ++i) local.checks[size_t(inverse[at + i])] = part.checks[i];
    at += part.keys.size();
  }
  local.values = reinterpret_cast<const std::byte*>(local.memory.data());
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
  if (parts.size() != 1) {
    add_up(local, parts, call.group.dedup);
    return local;
  }
  local.keys.assign(parts[0].keys.begin(), parts[0].keys.end());
  if (parts[0].checks) local.checks.assign(parts[0].checks, parts[0].checks + local.keys.size());
  local.values = parts[0].values;
  local.from = parts[0].from;
  return local;
}

// The first key whose gradient has a number that is not finite; -1: none. x - x is zero for finite ones alone.
int64_t not_finite(const Local& local) {
  int64_t bad = -1;
  with_number(*local.table, [&](auto number) {
    using T = decltype(number);
    const int64_t dim = local.table->shard->layout().dim;
    const T* g = reinterpret_cast<const T*>(local.values);
    for (size_t i = 0; i < local.keys.size() && bad < 0; ++i, g += dim) {
      T any = 0;
      for (int64_t k = 0; k < dim; ++k) any += g[k] * 0;
      if (any != 0) bad = int64_t(i);
    }
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

double squares(const OwnedStep& step) {
  double sum = 0;
  with_number(*step.table, [&](auto number) {
    using T = decltype(number);
    const T* g = reinterpret_cast<const T*>(step.gradients);
    const int64_t dim = step.table->shard->layout().dim;
    for (size_t i = 0; i < step.owned.keys.size(); ++i, g += dim) sum += double(sum_of_squares(g, dim));
  });
  return sum;
}

void take_step(Call& call, std::vector<OwnedStep>& steps) {
  call.group.held = std::move(steps);
  if (!(call.flags & LIGHTCC_EMBEDDING_HOLD)) apply_held(call.group, 1);
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
    step.owned.keys = std::move(local.keys);
    step.owned.checks = std::move(local.checks);
    step.gradients = local.values;
    step.memory = std::move(local.memory);
    step.generation = local.table->shard->generation();
    if (local.from && local.from->found.size() == step.owned.keys.size() && local.from->generation == step.generation) {
      step.owned.found = local.from->found;
    } else {
      step.owned.found.resize(step.owned.keys.size());
      local.table->shard->find(step.owned.keys, step.owned.checks_or_null(), step.owned.found.data());
    }
    if (!step.reserve()) throw Error(Code::internal, step.table->about("memory does not suffice; nothing was applied"));
    if (call.flags & LIGHTCC_EMBEDDING_HOLD) call.sums.push_back(step.sum = squares(step));
  }
  take_step(call, steps);
  call.stage = Call::Stage::done;
}

void send_gradients(Call& call, const std::vector<Local>& locals) {
  std::vector<RankSegment> to_ranks(size_t(call.group.size()));
  std::vector<Partition> partitions(locals.size());
  const bool empty = call.head.status || (call.flags & LIGHTCC_EMBEDDING_SKIP);
  for (RankSegment& segment : to_ranks) segment.head = call.head;
  for (size_t i = 0; i < locals.size(); ++i) {
    const Table& table = *locals[i].table;
    partitions[i].make(table, empty ? std::span<const int64_t>() : std::span<const int64_t>(locals[i].keys));
    TableHeader head = table.header();
    head.numbers = locals[i].numbers;
    for (size_t rank = 0; rank < to_ranks.size(); ++rank) {
      head.keys = partitions[i].counts[rank];
      head.value_bytes = head.keys * int64_t(table.row_bytes());
      to_ranks[rank].tables.push_back({head, {}, nullptr, nullptr});
    }
  }
  std::vector<size_t> at(locals.size(), 0);
  send(call, "call", to_ranks, [&](int rank, std::vector<PartPlaces>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Local& local = locals[i];
      const size_t bytes = local.table->row_bytes();
      for (int64_t n = 0; n < partitions[i].counts[size_t(rank)]; ++n) {
        const size_t place = size_t(partitions[i].order[at[i]++]);
        parts[i].keys[n] = local.keys[place];
        if (parts[i].checks) parts[i].checks[n] = local.checks[place];
        std::memcpy(parts[i].values + size_t(n) * bytes, local.values + place * bytes, bytes);
      }
    }
  });
}

bool anybody_skips(const Call& call) {
  for (const RankSegment& segment : call.calls)
    if (segment.head.flags & LIGHTCC_EMBEDDING_SKIP && segment.head.op == Op::update) return true;
  return false;
}

std::vector<OwnedStep> collected(Call& call) {
  const double divisor = call.flags & LIGHTCC_EMBEDDING_AVERAGE ? call.group.size() : 1;
  std::vector<OwnedStep> steps(call.wanted.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].table = call.wanted[i].table;
    steps[i].collect(call.calls, i, divisor, call.group.dedup);
    steps[i].sum = squares(steps[i]);
    if (!steps[i].reserve())
      throw Error(Code::internal, steps[i].table->about("memory does not suffice; nothing was applied"));
  }
  return steps;
}

}  // namespace

void OwnedStep::collect(const std::vector<RankSegment>& calls, size_t index, double divisor, Dedup& dedup) {
  owned.collect(*table, calls, index, dedup);
  generation = table->shard->generation();
  memory.assign(owned.keys.size() * table->row_bytes() / sizeof(double) + 1, 0);
  gradients = reinterpret_cast<const std::byte*>(memory.data());
  size_t at = 0;
  for (const RankSegment& call : calls) {
    if (index >= call.tables.size()) continue;
    const TablePart& part = call.tables[index];
    numbers = part.head.numbers;
    if (part.head.value_bytes != part.head.keys * int64_t(table->row_bytes()))
      throw Error(Code::internal, table->about("gradients came that are not as many as their keys"));
    with_number(*table, [&](auto number) {
      using T = decltype(number);
      add_by_row(table->shard->layout().dim, reinterpret_cast<const T*>(part.values), owned.inverse.data() + at,
                 part.head.keys, reinterpret_cast<T*>(memory.data()));
    });
    at += part.keys.size();
  }
  if (divisor != 1) scale(1 / divisor);
}

void OwnedStep::scale(double factor) {
  const size_t count = owned.keys.size() * size_t(table->shard->layout().dim);
  with_number(*table, [&](auto number) {
    using T = decltype(number);
    if (memory.empty()) {  // they are the caller's
      memory.resize(count * sizeof(T) / sizeof(double) + 1);
      std::memcpy(memory.data(), gradients, count * sizeof(T));
      gradients = reinterpret_cast<const std::byte*>(memory.data());
    }
    T* g = reinterpret_cast<T*>(memory.data());
    for (size_t i = 0; i < count; ++i) g[i] *= T(factor);
  });
}

bool OwnedStep::reserve() {
  size_t born = 0;
  for (Shard::Record record : owned.found) born += record == nullptr;
  table->shard->steps().reserve_next();
  return table->shard->reserve(born);
}

void OwnedStep::apply() {
  Shard& shard = *table->shard;
  if (generation != shard.generation()) shard.find(owned.keys, owned.checks_or_null(), owned.found.data());
  shard.update(owned.keys, owned.checks_or_null(), owned.found.data(), gradients, numbers);
}

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
    return send_gradients(call, locals);
  }
  call.skipped = call.flags & LIGHTCC_EMBEDDING_SKIP;
  if (!call.skipped) return update_here(call, locals);
  ++call.group.updates;
  call.stage = Call::Stage::done;
}

void collect_update(Call& call) {
  if (anybody_skips(call)) {
    call.skipped = true;
    ++call.group.updates;
    call.stage = Call::Stage::done;
    return;
  }
  RankSegment said;
  said.head.op = Op::agree;
  try {
    if (call.head.status) throw Error(Code(call.head.status), std::string(call.head.text));
    call.group.held = collected(call);
    for (const OwnedStep& step : call.group.held) {
      TablePart part;
      part.head.sum = step.sum;
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
  std::vector<OwnedStep> steps = std::exchange(call.group.held, {});
  call.sums.assign(steps.size(), 0);
  for (int rank = 0; rank < call.group.size(); ++rank) {
    const RankSegment said = parse(call.message->from(rank), rank);
    if (said.head.status) throw Error(Code(said.head.status), "rank " + std::to_string(rank) + ": " + said.head.text);
    for (size_t i = 0; i < said.tables.size() && i < steps.size(); ++i) call.sums[i] += said.tables[i].head.sum;
  }
  call.first.reset();
  take_step(call, steps);
}

void apply_held(Group& group, double scale) {
  std::vector<OwnedStep> steps = std::exchange(group.held, {});
  for (OwnedStep& step : steps) {
    if (scale < 0) continue;
    if (scale != 1) step.scale(scale);
    step.apply();
  }
  ++group.updates;
}

}  // namespace lightcc::embedding
