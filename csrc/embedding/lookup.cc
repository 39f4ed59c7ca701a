// Lookups: keys to their owners, and rows back.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

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

// Whether each key is read as it comes, repeated or not: an evaluation with one rank is no slower for it.
bool reads_plainly(const Call& call, const Table& table) {
  return call.group.size() == 1 && !(call.flags & LIGHTCC_EMBEDDING_TRAINING) && !table.shard->layout().checked;
}

// Different keys, owner by owner.
void take_by_owner(Wanted& w, std::span<const int64_t> keys, Group& group) {
  const uint16_t* owners = w.table->owners.data();
  w.counts.assign(size_t(group.size()), 0);
  group.places.resize(keys.size());
  KeyPlace* place = group.places.data();
  group.dedup.begin(keys.size());
  group.dedup.add(keys, w.keys.data(), w.inverse.data(), [&](uint64_t hash, size_t) {
    const uint32_t owner = owners[bucket_of(hash)];
    *place++ = {owner, uint32_t(w.counts[owner]++)};
  });
  w.keys.resize(size_t(group.dedup.count()));
  w.sort_by_owner({group.places.data(), w.keys.size()}, group.keys);
}

Wanted taken(Call& call, const lightcc_embedding_wanted& from) {
  Wanted w;
  if (!call.group.spare.empty()) {
    w = std::move(call.group.spare.back());
    call.group.spare.pop_back();
  }
  w.table = from.table;
  const std::span<const int64_t> keys(from.keys, size_t(from.count));
  w.keys.resize(keys.size());
  w.inverse.resize(keys.size());
  if (reads_plainly(call, *w.table)) {
    std::copy(keys.begin(), keys.end(), w.keys.begin());
    std::iota(w.inverse.begin(), w.inverse.end(), 0);
  } else if (call.group.size() == 1) {
    w.keys.resize(size_t(call.group.dedup.run(keys, w.keys.data(), w.inverse.data())));
  } else {
    take_by_owner(w, keys, call.group);
  }
  w.plain = w.keys.size() == w.inverse.size() && call.group.size() == 1;
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
    w.rows_then = shard.index().size();
    const uint32_t* checks = w.checks.empty() ? nullptr : w.checks.data();
    shard.find_and_read(w.keys, checks, w.found.data(), w.rows.data());
    clear_padding(w);
  }
  call.stage = Call::Stage::done;
}

// Rows of a table to how they travel, and back. All are aligned as their numbers are.
template <class Number> void pack_as(int32_t wire, std::byte* to, const std::byte* rows, int64_t count) {
  const auto* numbers = reinterpret_cast<const Number*>(rows);
  if (wire == LIGHTCC_FLOAT16) convert(numbers, reinterpret_cast<Float16*>(to), count);
  else convert(numbers, reinterpret_cast<BFloat16*>(to), count);
}
template <class Number> void unpack_as(int32_t wire, std::byte* rows, const std::byte* from, int64_t count) {
  auto* numbers = reinterpret_cast<Number*>(rows);
  if (wire == LIGHTCC_FLOAT16) convert(reinterpret_cast<const Float16*>(from), numbers, count);
  else if (wire == LIGHTCC_BFLOAT16) convert(reinterpret_cast<const BFloat16*>(from), numbers, count);
  else std::memcpy(rows, from, size_t(count) * sizeof(Number));
}

void pack(const Table& table, std::byte* to, const std::byte* rows, int64_t count) {
  const RecordLayout& layout = table.shard->layout();
  layout.number_bytes == 8 ? pack_as<double>(table.wire, to, rows, count * layout.dim)
                           : pack_as<float>(table.wire, to, rows, count * layout.dim);
}
void unpack(const Table& table, std::byte* rows, const std::byte* from, int64_t count) {
  const RecordLayout& layout = table.shard->layout();
  layout.number_bytes == 8 ? unpack_as<double>(table.wire, rows, from, count * layout.dim)
                           : unpack_as<float>(table.wire, rows, from, count * layout.dim);
}

// What all ranks want of one table.
struct Answer {
  Asked asked;
  std::vector<AskedKeys> parts;        // by rank
  std::vector<Shard::Record> records;  // of each key as it came; there when the ranks' rows are read, or before
  void collect(const Table& table, Dedup& dedup) { asked.owned.collect(table, parts, records, dedup); }
};

// Strings of one hash are compared, with each other and with the table's, before any rank gets an answer.
Answer begin_answer(Call& call, size_t index) {
  const Table& table = *call.wanted[index].table;
  Answer answer;
  answer.asked.call = call.number;
  int64_t count = 0;
  for (const RankSegment& segment : call.calls) {
    const bool serves = index >= segment.tables.size();
    answer.parts.push_back(serves ? AskedKeys{} : AskedKeys{segment.tables[index].keys, segment.tables[index].checks});
    answer.asked.first.push_back(count);
    count += int64_t(answer.parts.back().keys.size());
  }
  answer.asked.first.push_back(count);
  answer.records.resize(size_t(count));
  if (!table.shard->layout().checked) return answer;
  for (size_t rank = 0; rank < answer.parts.size(); ++rank)
    table.shard->find(answer.parts[rank].keys, answer.parts[rank].checks,
                      answer.records.data() + answer.asked.first[rank]);
  answer.collect(table, call.group.dedup);
  return answer;
}

// Whether rows that a rank asks itself for are read to where it wants them. On the wire they may lose bits, as all do.
bool reads_own(const Table& table) { return !table.wire; }

// The caller's rows of one owner, among those of all.
std::byte* rows_of(const Wanted& w, int owner) {
  const auto first = std::accumulate(w.counts.begin(), w.counts.begin() + owner, int64_t(0));
  return w.rows.data() + size_t(first) * w.table->row_bytes();
}

// A rank's rows, from the records to where they leave from.
void read_for(int rank, const Table& table, Answer& answer, std::byte* to) {
  Shard& shard = *table.shard;
  const std::span<const int64_t> keys = answer.parts[size_t(rank)].keys;
  Shard::Record* records = answer.records.data() + answer.asked.first[size_t(rank)];
  const auto read = [&](std::byte* rows) {
    if (shard.layout().checked) shard.read(keys, records, rows);
    else shard.find_and_read(keys, nullptr, records, rows);
  };
  if (!table.wire) return read(to);
  std::vector<std::byte> rows(keys.size() * table.row_bytes());
  read(rows.data());
  pack(table, to, rows.data(), int64_t(keys.size()));
}

void keep(Table& table, Asked asked) {
  constexpr size_t kKept = 16;
  table.asked.push_back(std::move(asked));
  if (table.asked.size() > kKept) table.asked.erase(table.asked.begin());
}

// While the others' rows are on their way.
void end_answer(const Call& call, const Wanted& w, Answer& answer) {
  const int own = call.group.rank();
  if (reads_own(*w.table)) read_for(own, *w.table, answer, rows_of(w, own));
  if (!(call.flags & LIGHTCC_EMBEDDING_TRAINING)) return;
  if (!w.table->shard->layout().checked) answer.collect(*w.table, call.group.dedup);
  keep(*w.table, std::move(answer.asked));
}

std::vector<RankSegment> answer_heads(const Call& call, const CallHeader& head) {
  std::vector<RankSegment> to_ranks(size_t(call.group.size()));
  for (size_t rank = 0; rank < to_ranks.size(); ++rank) {
    to_ranks[rank].head = head;
    const std::vector<TablePart>& asked = call.calls[rank].tables;
    for (size_t i = 0; !head.status && i < asked.size(); ++i) {
      TableHeader table;
      const bool stays = int(rank) == call.group.rank() && reads_own(*call.wanted[i].table);
      table.value_bytes = stays ? 0 : asked[i].head.keys * int64_t(call.wanted[i].table->wire_bytes());
      to_ranks[rank].tables.push_back({table, {}, nullptr, nullptr});
    }
  }
  return to_ranks;
}

}  // namespace

void OwnedKeys::collect(const Table& table, std::span<const AskedKeys> parts, std::span<const Shard::Record> came,
                        Dedup& dedup) {
  size_t count = 0;
  for (const AskedKeys& part : parts) count += part.keys.size();
  const bool checked = table.shard->layout().checked;
  keys.resize(count);
  inverse.resize(count);
  found.reserve(came.empty() ? 0 : count);
  dedup.begin(count);
  size_t first = 0;
  for (const AskedKeys& part : parts) {
    dedup.add(part.keys, keys.data(), inverse.data() + first, [&](uint64_t, size_t i) {
      if (checked) checks.push_back(part.checks[i]);
      if (!came.empty()) found.push_back(came[first + i]);
    });
    for (size_t i = 0; checked && i < part.keys.size(); ++i)
      if (checks[size_t(inverse[first + i])] != part.checks[i])
        throw Error(Code::invalid_argument,
                    table.about("two strings have the same 64-bit hash " + std::to_string(part.keys[i])));
    first += part.keys.size();
  }
  keys.resize(size_t(dedup.count()));
  generation = table.shard->generation();
  rows = table.shard->index().size();
}

void Partition::make(const Table& table, std::span<const int64_t> keys) {
  std::vector<uint16_t> owner(keys.size());
  counts.assign(size_t(table.group.size()), 0);
  for (size_t i = 0; i < keys.size(); ++i) ++counts[owner[i] = uint16_t(owner_of(table.owners, keys[i]))];
  std::vector<int64_t> at(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), at.begin(), int64_t(0));
  order.resize(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[size_t(at[owner[i]]++)] = int64_t(i);
}

void Wanted::sort_by_owner(std::span<KeyPlace> places, std::vector<int64_t>& memory) {
  std::vector<int64_t> first(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), first.begin(), int64_t(0));
  memory.resize(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) memory[places[i].place += uint32_t(first[places[i].owner])] = keys[i];
  keys.swap(memory);
  for (int64_t& at : inverse) at = places[size_t(at)].place;
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
    if (call.flags & LIGHTCC_EMBEDDING_TRAINING) w.call = call.number;
    TableHeader head = w.table->header();
    for (size_t rank = 0; rank < to_ranks.size(); ++rank) {
      head.keys = w.counts[rank];
      to_ranks[rank].tables.push_back({head, {}, nullptr, nullptr});
    }
  }
  std::vector<size_t> at(call.wanted.size(), 0);
  send(call, "call", to_ranks, [&](int rank, std::vector<PartPlaces>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Wanted& w = call.wanted[i];
      const auto count = size_t(w.counts[size_t(rank)]);
      std::copy_n(w.keys.data() + at[i], count, parts[i].keys);
      if (parts[i].checks) std::copy_n(w.checks.data() + at[i], count, parts[i].checks);
      at[i] += count;
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
    for (size_t i = 0; !head.status && i < call.wanted.size(); ++i) answers.push_back(begin_answer(call, i));
  } catch (const Error& error) {
    head.refuse(int(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    head.refuse(int(Code::internal), "memory does not suffice to answer a lookup");
  }
  std::vector<RankSegment> to_ranks = answer_heads(call, head);
  send(call, "rows", to_ranks, [&](int rank, std::vector<PartPlaces>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Table& table = *call.wanted[i].table;
      if (rank != call.group.rank() || !reads_own(table)) read_for(rank, table, answers[i], parts[i].values);
    }
  });
  for (size_t i = 0; !head.status && i < answers.size(); ++i) end_answer(call, call.wanted[i], answers[i]);
  call.stage = Call::Stage::second_message;
}

void take_rows(Call& call) {
  for (int rank = 0; rank < call.group.size(); ++rank) {
    const RankSegment answer = parse(call.message->from(rank), rank);
    if (answer.head.status)
      throw Error(Code(answer.head.status), "rank " + std::to_string(rank) + ": " + answer.head.text);
    if (answer.tables.size() > call.wanted.size())  // a rank that serves gets none
      throw Error(Code::internal, "rank " + std::to_string(rank) + " sent rows of other tables than were asked for");
    for (size_t i = 0; i < answer.tables.size(); ++i) {
      Wanted& w = call.wanted[i];
      const int64_t count = w.counts[size_t(rank)];
      const bool stayed = rank == call.group.rank() && reads_own(*w.table);
      if (answer.tables[i].head.value_bytes != (stayed ? 0 : count * int64_t(w.table->wire_bytes())))
        throw Error(Code::internal,
                    w.table->about("rank " + std::to_string(rank) + " sent other rows than were asked for"));
      if (!stayed) unpack(*w.table, rows_of(w, rank), answer.tables[i].values, count);
    }
  }
  for (Wanted& w : call.wanted)
    if (w.rows.data()) clear_padding(w);
  call.first.reset();
}

}  // namespace lightcc::embedding
