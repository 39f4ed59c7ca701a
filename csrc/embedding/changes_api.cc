// The C API of what has changed since a save or delta.
#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

void lightcc_embedding_table::erase(std::span<const int64_t> keys) {
  for (Changes& one : changes) one.note(keys, shard->index().size());
  shard->erase(keys);
  if (!admission.candidates.size()) return;
  for (int64_t key : keys) admission.forget(key);
}

namespace {

template <class TableOrConst> auto& of_reader(TableOrConst& table, int reader) {
  if (reader != LIGHTCC_EMBEDDING_OF_DELTAS && reader != LIGHTCC_EMBEDDING_OF_CHECKPOINTS)
    throw Error(Code::invalid_argument, table.about("nobody reads changes so"));
  return table.changes[reader == LIGHTCC_EMBEDDING_OF_CHECKPOINTS];
}

}  // namespace

extern "C" {

int lightcc_embedding_forget_changes(lightcc_embedding_table* table) {
  return guard([&] {
    table->shard->records().each_changed(LIGHTCC_EMBEDDING_OF_DELTAS, [](RowHeader& header) {
      header.changed &= ~LIGHTCC_EMBEDDING_OF_DELTAS;
      return false;
    });
    table->admission.has_read_all(LIGHTCC_EMBEDDING_OF_DELTAS);
    table->changes[0].begin();
    return 0;
  });
}

int lightcc_embedding_forget_gone(lightcc_embedding_table* table, int reader) {
  return guard([&] {
    of_reader(*table, reader).begin();
    return 0;
  });
}

int lightcc_embedding_changed(const lightcc_embedding_table* table, int reader, int64_t* count) {
  return guard([&] {
    *count = 0;
    table->shard->records().each_changed(reader, [&](const RowHeader& header) {
      const bool has = int(header.changed) & reader;
      *count += has;
      return has;
    });
    return 0;
  });
}

int lightcc_embedding_gone(const lightcc_embedding_table* table, int reader, int64_t capacity, int64_t* keys,
                           int64_t* count) {
  return guard([&] {
    const Changes& changes = of_reader(*table, reader);
    const std::vector<int64_t>& gone = changes.gone();
    *count = changes.known() ? int64_t(gone.size()) : -1;
    std::copy_n(gone.begin(), std::min(capacity, std::max<int64_t>(*count, 0)), keys);
    return 0;
  });
}
}
