// Lookups: keys to their owners, and rows back.
#include <algorithm>
#include <bit>
#include <cstring>

#include "embedding/half.h"
#include "embedding/handles.h"

namespace lightcc::embedding {
namespace {

// 2^k or 1.5 * 2^k.
int64_t padded_count(int64_t n) {
  const int64_t power = int64_t(std::bit_ceil(uint64_t(std::max<int64_t>(n, 1))));
  return power >= 4 && power / 4 * 3 >= n ? power / 4 * 3 : power;
}

void expect_wanted(const Call& call, std::span<const lightcc_embedding_wanted> wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Table* table = wanted[i].table;
    if (wanted[i].size != sizeof wanted[i])
      throw Error(Code::invalid_argument, "lightcc_embedding_wanted has another size");
    if (&table->group != &call.group) throw Error(Code::invalid_argument, table->about("it is of another group"));
    if (table->shard->layout().checked && wanted[i].count && !wanted[i].checks)
      throw Error(Code::invalid_argument, table->about("its keys are strings"));
    if (wanted[i].count < 0 || wanted[i].count > INT32_MAX)
      throw Error(Code::invalid_argument, table->about("too many keys"));
    for (size_t j = 0; j < i; ++j)
      if (wanted[j].table == table) throw Error(Code::invalid_argument, table->about("it is twice in a lookup"));
  }
}

// Two strings of one key in one batch are a clash too.
void take_checks(Wanted& w, const lightcc_embedding_wanted& from) {
  w.checks.resize(w.keys.size());
  std::vector<uint8_t> seen(w.keys.size(), 0);
  for (int64_t i = 0; i < from.count; ++i) {
    const size_t place = size_t(w.inverse[size_t(i)]);
    if (seen[place] && w.checks[place] != from.checks[i])
      throw Error(Code::invalid_argument, w.table->about("two strings have the same 64-bit hash " +
                                                         std::to_string(from.keys[i]) + ": write one otherwise"));
    seen[place] = 1;
    w.checks[place] = from.checks[i];
  }
}

Wanted taken(Call& call, const lightcc_embedding_wanted& from) {
  Wanted w;
  if (!call.group.spare.empty()) {
    w = std::move(call.group.spare.back());
    call.group.spare.pop_back();
  }
  w.table = from.table;
  w.keys.resize(size_t(from.count));
  w.inverse.resize(size_t(from.count));
  w.keys.resize(size_t(call.group.dedup.run({from.keys, size_t(from.count)}, w.keys.data(), w.inverse.data())));
  if (w.table->shard->layout().checked) take_checks(w, from);
  w.padded = padded_count(int64_t(w.keys.size()));
  w.rows.reserve(size_t(w.padded) * w.table->row_bytes());
  return w;
}

void clear_padding(Wanted& w) {
  const size_t used = w.keys.size() * w.table->row_bytes();
  std::memset(w.rows.data() + used, 0, size_t(w.padded) * w.table->row_bytes() - used);
}

// All is here: world of one.
void read_here(Call& call) {
  for (Wanted& w : call.wanted) {
    Shard& shard = *w.table->shard;
    w.found.resize(w.keys.size());
    w.generation = shard.generation();
    const uint32_t* checks = w.checks.empty() ? nullptr : w.checks.data();
    shard.find_and_read(w.keys, checks, call.flags & LIGHTCC_EMBEDDING_TRAINING, w.found.data(), w.rows.data());
    clear_padding(w);
  }
  call.stage = Call::Stage::done;
}

template <class To, class From> void convert(std::byte* to, const std::byte* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + size_t(i) * sizeof(From), sizeof value);
    const To converted = To(float(value));
    std::memcpy(to + size_t(i) * sizeof(To), &converted, sizeof converted);
  }
}

template <class Number> void pack_as(int32_t wire, std::byte* to, const std::byte* row, int64_t dim) {
  if (wire == LIGHTCC_FLOAT16) convert<Float16, Number>(to, row, dim);
  else if (wire == LIGHTCC_BFLOAT16) convert<BFloat16, Number>(to, row, dim);
  else std::memcpy(to, row, size_t(dim) * sizeof(Number));
}
template <class Number> void unpack_as(int32_t wire, std::byte* row, const std::byte* from, int64_t dim) {
  if (wire == LIGHTCC_FLOAT16) convert<Number, Float16>(row, from, dim);
  else if (wire == LIGHTCC_BFLOAT16) convert<Number, BFloat16>(row, from, dim);
  else std::memcpy(row, from, size_t(dim) * sizeof(Number));
}

void pack(const Table& table, std::byte* to, const std::byte* row) {
  const RecordLayout& layout = table.shard->layout();
  layout.number_bytes == 8 ? pack_as<double>(table.wire, to, row, layout.dim)
                           : pack_as<float>(table.wire, to, row, layout.dim);
}
void unpack(const Table& table, std::byte* row, const std::byte* from) {
  const RecordLayout& layout = table.shard->layout();
  layout.number_bytes == 8 ? unpack_as<double>(table.wire, row, from, layout.dim)
                           : unpack_as<float>(table.wire, row, from, layout.dim);
}

// What all ranks want of one table, read once.
struct Answer {
  OwnedKeys owned;
  Buffer rows;
};

std::vector<Answer> answers_of(Call& call) {
  std::vector<Answer> answers(call.wanted.size());
  for (size_t i = 0; i < answers.size(); ++i) {
    Table& table = *call.wanted[i].table;
    OwnedKeys& owned = answers[i].owned;
    owned.collect(table, call.calls, i, call.group.dedup);
    answers[i].rows.reserve(owned.keys.size() * table.row_bytes() + 1);
    table.shard->read(owned.keys, owned.found.data(), call.flags & LIGHTCC_EMBEDDING_TRAINING, answers[i].rows.data());
  }
  return answers;
}

std::vector<RankSegment> answer_heads(const Call& call, const CallHeader& head) {
  std::vector<RankSegment> to_ranks(size_t(call.group.size()));
  for (size_t rank = 0; rank < to_ranks.size(); ++rank) {
    to_ranks[rank].head = head;
    const std::vector<TablePart>& asked = call.calls[rank].tables;
    for (size_t i = 0; !head.status && i < asked.size(); ++i) {
      TableHeader table;
      table.value_bytes = asked[i].head.keys * int64_t(call.wanted[i].table->wire_bytes());
      to_ranks[rank].tables.push_back({table, {}, nullptr, nullptr});
    }
  }
  return to_ranks;
}

}  // namespace

void OwnedKeys::collect(const Table& table, const std::vector<RankSegment>& calls, size_t index, Dedup& dedup) {
  std::vector<int64_t> all;
  std::vector<uint32_t> all_checks;
  for (const RankSegment& call : calls) {
    if (index >= call.tables.size()) continue;  // that rank serves
    const TablePart& part = call.tables[index];
    all.insert(all.end(), part.keys.begin(), part.keys.end());
    if (part.checks) all_checks.insert(all_checks.end(), part.checks, part.checks + part.keys.size());
  }
  keys.resize(all.size());
  inverse.resize(all.size());
  keys.resize(size_t(dedup.run(all, keys.data(), inverse.data())));
  if (table.shard->layout().checked) checks.resize(keys.size());
  for (size_t i = all_checks.size(); i-- > 0;) checks[size_t(inverse[i])] = all_checks[i];
  for (size_t i = 0; i < all_checks.size(); ++i)
    if (checks[size_t(inverse[i])] != all_checks[i])
      throw Error(Code::invalid_argument,
                  table.about("two strings have the same 64-bit hash " + std::to_string(all[i])));
  found.resize(keys.size());
  table.shard->find(keys, checks_or_null(), found.data());
}

void Partition::make(const Table& table, std::span<const int64_t> keys) {
  std::vector<uint16_t> owner(keys.size());
  counts.assign(size_t(table.group.size()), 0);
  for (size_t i = 0; i < keys.size(); ++i) ++counts[owner[i] = uint16_t(owner_of(table.owners, keys[i]))];
  std::vector<int64_t> at(counts.size(), 0);
  for (size_t rank = 1; rank < at.size(); ++rank) at[rank] = at[rank - 1] + counts[rank - 1];
  order.resize(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) order[size_t(at[owner[i]]++)] = int64_t(i);
}

void begin_lookup(Call& call, std::span<const lightcc_embedding_wanted> wanted) {
  expect_wanted(call, wanted);
  for (const lightcc_embedding_wanted& one : wanted) call.wanted.push_back(taken(call, one));
  if (call.group.size() == 1) {
    if (!(call.flags & LIGHTCC_EMBEDDING_PREFETCH)) read_here(call);
    return;
  }
  call.number = call.group.calls++;
  std::vector<RankSegment> to_ranks(size_t(call.group.size()));
  for (RankSegment& segment : to_ranks) segment.head.op = Op::lookup, segment.head.flags = call.flags;
  for (Wanted& w : call.wanted) {
    w.partition.make(*w.table, w.keys);
    TableHeader head = w.table->header();
    for (size_t rank = 0; rank < to_ranks.size(); ++rank) {
      head.keys = w.partition.counts[rank];
      to_ranks[rank].tables.push_back({head, {}, nullptr, nullptr});
    }
  }
  std::vector<size_t> at(call.wanted.size(), 0);
  send(call, "call", to_ranks, [&](int rank, std::vector<PartPlaces>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Wanted& w = call.wanted[i];
      for (int64_t n = 0; n < w.partition.counts[size_t(rank)]; ++n) {
        const size_t place = size_t(w.partition.order[at[i]++]);
        parts[i].keys[n] = w.keys[place];
        if (parts[i].checks) parts[i].checks[n] = w.checks[place];
      }
    }
  });
}

// A failure here goes to all ranks as the answer: they wait for it.
void answer_lookup(Call& call) {
  if (call.group.size() == 1) return read_here(call);
  CallHeader head = call.head.status ? call.head : CallHeader();
  head.op = Op::rows;
  std::vector<Answer> answers;
  try {
    if (!head.status) answers = answers_of(call);
  } catch (const Error& error) {
    head.refuse(int(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    head.refuse(int(Code::internal), "memory does not suffice to answer a lookup");
  }
  std::vector<RankSegment> to_ranks = answer_heads(call, head);
  std::vector<size_t> at(call.wanted.size(), 0);
  send(call, "rows", to_ranks, [&](int rank, std::vector<PartPlaces>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Table& table = *call.wanted[i].table;
      for (int64_t n = 0; n < call.calls[size_t(rank)].tables[i].head.keys; ++n) {
        const size_t row = size_t(answers[i].owned.inverse[at[i]++]);
        pack(table, parts[i].values + size_t(n) * table.wire_bytes(), answers[i].rows.data() + row * table.row_bytes());
      }
    }
  });
  call.stage = Call::Stage::second_message;
}

void take_rows(Call& call) {
  std::vector<size_t> at(call.wanted.size(), 0);
  for (int rank = 0; rank < call.group.size(); ++rank) {
    const RankSegment answer = parse(call.message->from(rank), rank);
    if (answer.head.status)
      throw Error(Code(answer.head.status), "rank " + std::to_string(rank) + ": " + answer.head.text);
    if (answer.tables.size() > call.wanted.size())  // a rank that serves gets none
      throw Error(Code::internal, "rank " + std::to_string(rank) + " sent rows of other tables than were asked for");
    for (size_t i = 0; i < answer.tables.size(); ++i) {
      Wanted& w = call.wanted[i];
      const int64_t count = w.partition.counts[size_t(rank)];
      if (answer.tables[i].head.value_bytes != count * int64_t(w.table->wire_bytes()))
        throw Error(Code::internal,
                    w.table->about("rank " + std::to_string(rank) + " sent other rows than were asked for"));
      for (int64_t n = 0; n < count; ++n) {
        const size_t place = size_t(w.partition.order[at[i]++]);
        unpack(*w.table, w.rows.data() + place * w.table->row_bytes(),
               answer.tables[i].values + size_t(n) * w.table->wire_bytes());
      }
    }
  }
  for (Wanted& w : call.wanted)
    if (w.rows.data()) clear_padding(w);
  call.first.reset();
}

}  // namespace lightcc::embedding
