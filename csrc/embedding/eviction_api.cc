// How a table's rows go after a step, and the C API of that.
#include <cmath>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

void lightcc_embedding_table::evict(std::span<const int64_t> keys) {
  erase(keys);
  evicted += int64_t(keys.size());
}

void lightcc_embedding_table::after_step() {
  const std::vector<int64_t> gone = eviction.after_step(*shard);
  evict(gone);
}

namespace {

void expect_rule(const lightcc_embedding_table& table, const EvictionRule& rule) {
  auto expect = [&](bool holds, const char* text) {
    if (!holds) throw Error(Code::invalid_argument, table.about(text));
  };
  expect(rule.kind >= EvictionKind::none && rule.kind <= EvictionKind::asked, "there is no such eviction");
  if (rule.kind == EvictionKind::ttl)
    expect(rule.a >= 1 && rule.a < 2147483648.0, "a Ttl is at least 1 step and below 2^31");
  if (rule.kind == EvictionKind::count)
    expect(rule.a > 0 && std::isfinite(rule.a) && rule.b > 0 && rule.b < 1,
           "Count needs a threshold above 0 and a decay above 0 and below 1");
  if (rule.kind == EvictionKind::l2) expect(rule.a > 0 && std::isfinite(rule.a), "L2 needs a threshold above 0");
  expect(rule.every >= 1 && rule.every < 1u << 31, "rows are looked at every so many steps, at least 1");
}

}  // namespace

extern "C" {

int lightcc_embedding_set_eviction(lightcc_embedding_table* table, int kind, double a, double b, int64_t every) {
  return guard([&] {
    const EvictionRule rule{EvictionKind(kind), a, b, uint32_t(std::clamp<int64_t>(every, 0, 1u << 31))};
    expect_rule(*table, rule);
    table->eviction.set_rule(rule);
    return 0;
  });
}

int lightcc_embedding_due(const lightcc_embedding_table* table, int64_t capacity, int64_t* keys, uint32_t* counts,
                          uint32_t* lasts, double* norms, int64_t* count) {
  return guard([&] {
    const std::vector<uint32_t>& due = table->eviction.due();
    *count = int64_t(due.size());
    for (int64_t i = 0; i < *count && i < capacity; ++i) {
      const RowHeader& header = *table->shard->records().header(due[size_t(i)]);
      keys[i] = header.key;
      counts[i] = header.count;
      lasts[i] = header.last;
      if (norms) norms[i] = table->shard->norm(due[size_t(i)]);
    }
    return 0;
  });
}

int lightcc_embedding_answer_due(lightcc_embedding_table* table, const uint8_t* go, int64_t count) {
  return guard([&] {
    if (count != int64_t(table->eviction.due().size()))
      throw Error(Code::invalid_argument, table->about(std::to_string(count) + " answers came for " +
                                                       std::to_string(table->eviction.due().size()) + " rows"));
    table->evict(table->eviction.answer(*table->shard, go));
    return 0;
  });
}

int lightcc_embedding_evict(lightcc_embedding_table* table, const int64_t* keys, int64_t count) {
  return guard([&] {
    table->evict({keys, size_t(count)});
    table->eviction.forget();
    return 0;
  });
}
}
