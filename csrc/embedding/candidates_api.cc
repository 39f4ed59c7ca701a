// The C API of candidates: for checkpoints, and for ranks to which they move.
#include <algorithm>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace {

const NotedKeys& log_of(const lightcc_embedding_table& table, int log) {
  if (log < 0 || log >= Admission::kLogs) throw Error(Code::invalid_argument, table.about("there is no such log"));
  return table.admission.logs[log].cells;
}

}  // namespace

extern "C" {

int lightcc_embedding_export_candidates(lightcc_embedding_table* table, int part, int changed, int64_t capacity,
                                        int64_t* keys, uint32_t* counts, int64_t* count) {
  return guard([&] {
    if (part < 0 || part >= Admission::kParts)
      throw Error(Code::invalid_argument, table->about("candidates have no part " + std::to_string(part)));
    Admission& admission = table->admission;
    const bool takes = changed & LIGHTCC_EMBEDDING_TAKE;
    const NotedKeys& logged = log_of(*table, LIGHTCC_EMBEDDING_OF_CHECKPOINT);
    *count = 0;
    admission.each(part, changed & int(RowHeader::kChanged), [&](int64_t key, uint32_t seen) {
      if (takes && logged.has(key)) return;
      if (*count < capacity) keys[*count] = key, counts[*count] = seen;
      ++*count;
    });
    for (int64_t i = 0; takes && i < std::min(*count, capacity); ++i)
      admission.has_read(keys[i], LIGHTCC_EMBEDDING_OF_CHECKPOINTS);
    return 0;
  });
}

int lightcc_embedding_import_candidates(lightcc_embedding_table* table, const int64_t* keys, const uint32_t* counts,
                                        int64_t count) {
  return guard([&] {
    Admission& admission = table->admission;
    if (!admission.counts()) return 0;
    const auto is_own = [&](int64_t cell) {
      return table->owners[admission.bucket_of_cell(cell)] == table->group.rank();
    };
    std::vector<int64_t> own;
    for (int64_t i = 0; i < count; ++i) {
      if (!admission.is_cell(keys[i]))
        throw Error(Code::invalid_argument, table->about("its filter has no piece " + std::to_string(keys[i])));
      if (counts[i] && is_own(keys[i])) own.push_back(keys[i]);
    }
    if (!admission.reserve(own))
      throw Error(Code::internal, table->about("memory does not suffice for its candidates"));
    for (int64_t i = 0; i < count; ++i)
      if (is_own(keys[i])) admission.set(keys[i], counts[i]);
    return 0;
  });
}

int lightcc_embedding_export_candidate_log(const lightcc_embedding_table* table, int log, int64_t first,
                                           int64_t capacity, int64_t* keys, uint32_t* counts, int64_t* count) {
  return guard([&] {
    const NotedKeys& of = log_of(*table, log);
    if (first < 0) throw Error(Code::invalid_argument, table->about("a log begins at 0"));
    *count = std::max<int64_t>(int64_t(of.size()) - first, 0);
    for (int64_t i = 0; i < std::min(*count, capacity); ++i) {
      keys[i] = of.key(size_t(first + i));
      counts[i] = of.number(size_t(first + i));
    }
    return 0;
  });
}
}
