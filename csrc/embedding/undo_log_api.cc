// The C API of logs, and how a table goes from one group to the next.
#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace {

Shard::Log log_of(const lightcc_embedding_table& table, int log) {
  if (log != LIGHTCC_EMBEDDING_OF_COMMIT && log != LIGHTCC_EMBEDDING_OF_CHECKPOINT)
    throw Error(Code::invalid_argument, table.about("there is no such log"));
  return Shard::Log(log);
}

// Whether all that adopt cannot change is equal.
bool are_alike(const lightcc_embedding_table& a, const lightcc_embedding_table& b) {
  const RecordLayout &one = a.shard->layout(), &other = b.shard->layout();
  const FirstValues &first = a.shard->first_values(), &second = b.shard->first_values();
  return a.name == b.name && one.dim == other.dim && one.number_bytes == other.number_bytes &&
         one.checked == other.checked && first.init == second.init && first.a == second.a && first.b == second.b &&
         first.stream == second.stream && a.limit_bytes == b.limit_bytes;
}

}  // namespace

extern "C" {

int lightcc_embedding_begin_log(lightcc_embedding_table* table, int log) {
  return guard([&] {
    table->shard->begin_log(log_of(*table, log));
    table->admission.begin_log(log);
    return 0;
  });
}

int lightcc_embedding_end_log(lightcc_embedding_table* table, int log) {
  return guard([&] {
    table->shard->end_log(log_of(*table, log));
    table->admission.end_log(log);
    return 0;
  });
}

int lightcc_embedding_go_back(lightcc_embedding_table* table) {
  return guard([&] {
    if (!table->admission.reserve_back(LIGHTCC_EMBEDDING_OF_COMMIT))
      throw Error(Code::internal, table->about("memory does not suffice to go back"));
    table->shard->go_back();
    table->admission.go_back(LIGHTCC_EMBEDDING_OF_COMMIT);
    table->eviction.forget();
    return 0;
  });
}

int lightcc_embedding_logged(const lightcc_embedding_table* table, int log, const int64_t* keys, int64_t count,
                             uint8_t* found) {
  return guard([&] {
    const UndoLog& of = table->shard->log(log_of(*table, log));
    for (int64_t i = 0; i < count; ++i) found[i] = of.has(keys[i]);
    return 0;
  });
}

int lightcc_embedding_export_log(const lightcc_embedding_table* table, int log, lightcc_embedding_rows* rows) {
  return guard([&] {
    const UndoLog& of = table->shard->log(log_of(*table, log));
    if (rows->size != sizeof *rows || rows->cursor < 0)
      throw Error(Code::invalid_argument, table->about("export_log: another size, or a negative cursor"));
    rows->count = 0;
    while (rows->count < rows->capacity) {
      const size_t i = of.next_record(size_t(rows->cursor));
      if (i == UndoLog::kBorn) break;
      rows->cursor = int64_t(i) + 1;
      if (wants(*rows, *reinterpret_cast<const RowHeader*>(of.record(i))))
        export_record(table->shard->layout(), of.record(i), *rows);
    }
    return 0;
  });
}

int lightcc_embedding_log_stats(const lightcc_embedding_table* table, int log, int64_t* keys, int64_t* records,
                                int64_t* bytes) {
  return guard([&] {
    const UndoLog& of = table->shard->log(log_of(*table, log));
    *keys = int64_t(of.keys());
    *records = int64_t(of.records());
    *bytes = int64_t(of.bytes() + table->admission.logs[log].cells.bytes());
    return 0;
  });
}

int lightcc_embedding_adopt(lightcc_embedding_table* table, lightcc_embedding_table* from) {
  return guard([&] {
    if (table == from || !are_alike(*table, *from) || table->shard->index().size())
      throw Error(Code::invalid_argument, table->about("adopt: it has rows, or the other table is another one"));
    std::swap(table->shard, from->shard);
    std::swap(table->owners, from->owners);
    std::swap(table->owners_print, from->owners_print);
    std::swap(table->has_rule, from->has_rule);
    std::swap(table->admission, from->admission);
    std::swap(table->evicted, from->evicted);
    table->eviction.forget();
    return 0;
  });
}
}
