// The C API of one table: this rank's shard, its owners and its steps.
#include "embedding/table.h"

#include <algorithm>
#include <cstring>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace {

thread_local std::string last_error;

void expect(bool holds, const std::string& text) {
  if (!holds) throw Error(Code::invalid_argument, text);
}

// A struct of this or a later version whose further fields this version cannot know.
void expect_size(uint32_t size, size_t own, const char* name) {
  expect(size == own,
         std::string(name) + ": its size is " + std::to_string(size) + ", and here " + std::to_string(own));
}

bool is_wire(int32_t wire) { return wire == 0 || wire == LIGHTCC_FLOAT16 || wire == LIGHTCC_BFLOAT16; }

void expect_options(const lightcc_embedding_options& o) {
  expect(o.name && *o.name, "a table needs a name");
  const std::string table = std::string("table '") + o.name + "': ";
  expect(o.dim >= 1 && o.dim <= 1 << 20, table + "dim is " + std::to_string(o.dim) + ", which must be 1 to 1048576");
  expect(o.dtype == LIGHTCC_FLOAT32 || o.dtype == LIGHTCC_FLOAT64, table + "weights are float32 or float64");
  expect(o.init >= 0 && o.init <= LIGHTCC_EMBEDDING_NORMAL, table + "there is no such init");
  expect(is_wire(o.wire), table + "rows travel as float16, bfloat16 or as they are");
  expect(o.limit_bytes >= 0, table + "limit_bytes is negative");
  expect(o.max_rows >= 0, table + "max_rows is negative");
}

std::span<const int64_t> keys_of(const int64_t* keys, int64_t count) { return {keys, size_t(count)}; }

std::vector<Shard::Record> records_of(const Shard& shard, std::span<const int64_t> keys, const uint32_t* checks) {
  std::vector<Shard::Record> found(keys.size());
  shard.find(keys, checks, found.data());
  return found;
}

// The bytes of a slot in one row; slot -1: the weights.
size_t column_bytes(const RecordLayout& layout, int slot) {
  return size_t(slot < 0 ? layout.dim : slot_width(layout.rule, slot, layout.dim)) * layout.number_bytes;
}

void import_row(Shard& shard, const lightcc_embedding_rows& rows, int64_t i) {
  const RecordLayout& layout = shard.layout();
  const Shard::Record record = shard.insert(rows.keys[i], rows.checks ? rows.checks[i] : 0);
  auto* header = reinterpret_cast<RowHeader*>(record);
  header->count = std::min(rows.counts ? rows.counts[i] : 0, RowHeader::kMostUpdates);
  shard.records().set_changed(record);
  header->last = rows.lasts ? rows.lasts[i] : 0;
  for (int slot = -1; slot < 4; ++slot) {
    const void* column = slot < 0 ? rows.weights : rows.slots[slot];
    const size_t bytes = column_bytes(layout, slot);
    const auto* from = static_cast<const std::byte*>(column) + size_t(i) * bytes;
    if (bytes) std::memcpy(record + layout.slot_offset(slot), from, bytes);
  }
}

void expect_columns(const lightcc_embedding_table& table, const lightcc_embedding_rows& rows) {
  expect(rows.count >= 0 && rows.keys && rows.weights, table.about("import needs keys and weights"));
  expect(!table.shard->layout().checked || rows.checks, table.about("import needs the checks of its keys"));
  for (int slot = 0; slot < 4; ++slot)
    expect(rows.slots[slot] || !slot_width(table.shard->layout().rule, slot, table.shard->layout().dim),
           table.about("import lacks a slot of its optimizer"));
}

}  // namespace

namespace lightcc::embedding {

void set_last_error(const char* text) { last_error = text; }

void export_record(const RecordLayout& layout, const std::byte* record, lightcc_embedding_rows& rows) {
  const auto* header = reinterpret_cast<const RowHeader*>(record);
  const int64_t i = rows.count++;
  // A column that is not wanted is passed over.
  if (rows.keys) rows.keys[i] = header->key;
  if (rows.counts) rows.counts[i] = header->count;
  if (rows.lasts) rows.lasts[i] = header->last;
  if (rows.checks && layout.checked) std::memcpy(rows.checks + i, record + layout.check_offset(), sizeof(uint32_t));
  for (int slot = -1; slot < 4; ++slot) {
    void* column = slot < 0 ? rows.weights : rows.slots[slot];
    const size_t bytes = column_bytes(layout, slot);
    auto* to = static_cast<std::byte*>(column) + size_t(i) * bytes;
    if (column && bytes) std::memcpy(to, record + layout.slot_offset(slot), bytes);
  }
}

}  // namespace lightcc::embedding

extern "C" {

const char* lightcc_embedding_error(void) { return last_error.c_str(); }

int lightcc_embedding_create(lightcc_embedding_group* group, const lightcc_embedding_options* o,
                             lightcc_embedding_table** table) {
  return guard([&] {
    expect_size(o->size, sizeof *o, "lightcc_embedding_options");
    expect_options(*o);
    expect(!group->find(o->name), std::string("there is a table '") + o->name + "' already");
    *table = group->add(std::make_unique<lightcc_embedding_table>(*group, *o));
    return 0;
  });
}

int lightcc_embedding_free(lightcc_embedding_table* table) {
  return guard([&] {
    Group& group = table->group;
    group.remove(table);
    delete_if_over(group);
    return 0;
  });
}

int lightcc_embedding_attach(lightcc_embedding_table* table, const lightcc_embedding_rule* rule) {
  return guard([&] {
    expect_size(rule->size, sizeof *rule, "lightcc_embedding_rule");
    expect(rule->kind >= 0 && rule->kind < kRules, table->about("there is no such optimizer"));
    expect(rule->terms >= 0 && rule->initial >= 0, table->about("terms and initial must be at least 0"));
    expect(rule->kind != LIGHTCC_EMBEDDING_GROUP_ADAGRAD || rule->initial > 0,
           table->about("GroupAdagrad's initial accumulator must be above 0"));
    table->attach({RuleKind(rule->kind), rule->initial, rule->terms});
    return 0;
  });
}

int lightcc_embedding_slots(const lightcc_embedding_table* table, int64_t* widths) {
  const RecordLayout& layout = table->shard->layout();
  for (int slot = 0; slot < 4; ++slot) widths[slot] = slot_width(layout.rule, slot, layout.dim);
  return 0;
}

int lightcc_embedding_get_stats(const lightcc_embedding_table* table, lightcc_embedding_stats* stats) {
  return guard([&] {
    expect_size(stats->size, sizeof *stats, "lightcc_embedding_stats");
    const Shard& shard = *table->shard;
    stats->slabs = shard.records().mapped();
    stats->rows = int64_t(shard.index().size());
    stats->steps = shard.steps().now();
    stats->record_bytes = int64_t(shard.records().record_bytes());
    stats->index_bytes = int64_t(shard.index().bytes());
    stats->bytes = int64_t(shard.records().bytes()) + stats->index_bytes;
    stats->index_growing = shard.index().growing();
    const uint16_t rank = uint16_t(table->group.rank());
    const bool filters = table->admission.filter.active();  // for it alone the owners, who are many, are counted
    stats->candidates =
        table->admission.size(filters ? std::count(table->owners.begin(), table->owners.end(), rank) : 0);
    stats->candidate_bytes = int64_t(table->admission.bytes());
    stats->bytes += stats->candidate_bytes;
    stats->admitted = table->admission.admitted;
    stats->evicted = table->evicted;
    stats->total_rows = table->total_rows;
    stats->updates = shard.updates();
    return 0;
  });
}

int lightcc_embedding_contains(const lightcc_embedding_table* table, const int64_t* keys, int64_t count,
                               uint8_t* found) {
  return guard([&] {
    const auto records = records_of(*table->shard, keys_of(keys, count), nullptr);
    for (size_t i = 0; i < records.size(); ++i) found[i] = records[i] != nullptr;
    return 0;
  });
}

int lightcc_embedding_erase(lightcc_embedding_table* table, const int64_t* keys, int64_t count) {
  return guard([&] {
    table->erase(keys_of(keys, count));
    table->eviction.forget();
    return 0;
  });
}

int lightcc_embedding_read(lightcc_embedding_table* table, const int64_t* keys, const uint32_t* checks, int64_t count,
                           void* rows) {
  return guard([&] {
    table->found.resize(size_t(count));
    table->shard->find_and_read(keys_of(keys, count), checks, table->found.data(), rows);
    return 0;
  });
}

int lightcc_embedding_first(const lightcc_embedding_table* table, const int64_t* keys, int64_t count, void* rows) {
  return guard([&] {
    const Shard& shard = *table->shard;
    for (int64_t i = 0; i < count; ++i) shard.fill_first(keys[i], i, rows);
    return 0;
  });
}

int lightcc_embedding_clear(lightcc_embedding_table* table) {
  return guard([&] {
    table->shard->clear();
    table->eviction.forget();
    table->admission.clear();
    for (Changes& changes : table->changes) changes = {};
    return 0;
  });
}

int lightcc_embedding_export(const lightcc_embedding_table* table, lightcc_embedding_rows* rows) {
  return guard([&] {
    expect_size(rows->size, sizeof *rows, "lightcc_embedding_rows");
    expect(rows->cursor >= 0 && rows->capacity >= 0, table->about("export: a negative cursor or capacity"));
    const Slabs& records = table->shard->records();
    const int readers = readers_of(*rows);
    rows->count = 0;
    while (rows->count < rows->capacity && rows->cursor < Slabs::kNone) {
      const auto from = uint32_t(rows->cursor);
      const uint32_t number = readers ? records.next_changed(from, readers) : records.next_taken(from);
      if (number == Slabs::kNone) break;
      rows->cursor = int64_t(number) + 1;
      RowHeader& header = *records.header(number);
      if (!wants(*rows, header)) continue;
      if (rows->changed & LIGHTCC_EMBEDDING_TAKE) {
        if (table->shard->log(Shard::of_checkpoint).has(header.key)) continue;
        header.changed &= ~LIGHTCC_EMBEDDING_OF_CHECKPOINTS;
      }
      export_record(table->shard->layout(), records.at(number), *rows);
    }
    return 0;
  });
}

int lightcc_embedding_import(lightcc_embedding_table* table, lightcc_embedding_rows* rows) {
  return guard([&] {
    expect_size(rows->size, sizeof *rows, "lightcc_embedding_rows");
    expect_columns(*table, *rows);
    expect(table->shard->reserve(size_t(rows->count)), table->about("import: memory does not suffice"));
    rows->taken = 0;
    table->eviction.forget();
    for (int64_t i = 0; i < rows->count; ++i) {
      if (owner_of(table->owners, rows->keys[i]) != table->group.rank()) continue;
      import_row(*table->shard, *rows, i);
      table->admission.forget(rows->keys[i]);
      ++rows->taken;
    }
    return 0;
  });
}

int lightcc_embedding_alphas(const lightcc_embedding_table* table, int64_t first, int64_t capacity, double* alphas) {
  return guard([&] {
    const std::vector<double>& all = table->shard->steps().alphas();
    expect(first >= 1, table->about("steps are counted from 1"));
    for (int64_t i = first - 1; i < first - 1 + capacity && i < int64_t(all.size()); ++i) *alphas++ = all[size_t(i)];
    return 0;
  });
}

int lightcc_embedding_set_alphas(lightcc_embedding_table* table, const double* alphas, int64_t steps) {
  return guard([&] {
    expect(steps >= 0 && steps < int64_t(Slabs::kNone), table->about("set_alphas: no such number of steps"));
    table->shard->set_alphas({alphas, alphas + steps});
    return 0;
  });
}

int lightcc_embedding_numbers(const lightcc_embedding_table* table, double* numbers) {
  const Numbers& n = table->shard->numbers();
  const double all[] = {n.lr, n.beta1, n.beta2, n.eps, n.l1, n.l2, n.l21};
  std::copy(std::begin(all), std::end(all), numbers);
  return 0;
}

int lightcc_embedding_set_numbers(lightcc_embedding_table* table, const double* numbers) {
  table->shard->numbers() = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]};
  return 0;
}
}
