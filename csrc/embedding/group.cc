// Groups and their tables.
#include <algorithm>
#include <cstring>

#include "embedding/handles.h"

using namespace lightcc;
using namespace lightcc::embedding;

namespace {

uint64_t fingerprint(const void* data, size_t bytes, uint64_t before) {
  return mix(before ^ hash_of(static_cast<const char*>(data), bytes).key);
}

}  // namespace

lightcc_embedding_table::lightcc_embedding_table(lightcc_embedding_group& group, const lightcc_embedding_options& o)
    : group(group), name(o.name), wire(o.wire), limit_bytes(size_t(o.limit_bytes)),
      max_rows(o.max_rows), owners(first_owners(group.size())) {
  const RecordLayout layout{o.dim, o.dtype == LIGHTCC_FLOAT64 ? sizeof(double) : sizeof(float), {}, o.checked != 0};
  shard = std::make_unique<Shard>(layout, FirstValues(Init(o.init), o.a, o.b, o.seed, name), limit_bytes);
}

void lightcc_embedding_table::attach(const SparseRule& rule) {
  RecordLayout layout = shard->layout();
  if (has_rule && layout.rule == rule) return;
  if (has_rule) throw Error(Code::invalid_argument, about("it has another optimizer already"));
  if (shard->index().size()) throw Error(Code::invalid_argument, about("it has rows already, without an optimizer"));
  layout.rule = rule;
  shard = std::make_unique<Shard>(layout, shard->first_values(), limit_bytes);
  settle_absent();
  has_rule = true;
}

TableHeader lightcc_embedding_table::header() const {
  const RecordLayout& layout = shard->layout();
  const FirstValues& first = shard->first_values();
  const double numbers[] = {double(layout.dim), double(layout.number_bytes), double(layout.checked), double(wire),
                            double(has_rule), double(layout.rule.kind), layout.rule.initial, double(layout.rule.terms),
                            double(first.init), first.a, first.b, double(admission.min_count),
                            admission.absent, double(eviction.rule().kind), eviction.rule().a, eviction.rule().b,
                            double(eviction.rule().every), double(max_rows), double(admission.filter.shape().lines),
                            double(admission.filter.shape().hashes)};
  TableHeader head;
  head.id = hash_of(name.data(), name.size()).key;
  const uint64_t values_print = fingerprint(&first.stream, sizeof first.stream, owners_print);
  head.fingerprint = fingerprint(numbers, sizeof numbers, values_print);
  head.checked = layout.checked;
  std::strncpy(head.name, name.c_str(), sizeof head.name - 1);
  return head;
}

void lightcc_embedding_table::settle_absent() {
  const FirstValues zeros(Init::constant, admission.absent, 0, 0, name);
  shard->set_absent(admission.counts() ? zeros : shard->first_values());
}

void lightcc_embedding_table::set_owners(Owners map) {
  owners = std::move(map);
  asked.clear();  // of other owners: their keys travel again
  owners_print = fingerprint(owners.data(), owners.size() * sizeof(uint16_t), 0);
}

lightcc_embedding_table* lightcc_embedding_group::find(const std::string& name) const {
  auto it = tables_.find(name);
  return it == tables_.end() ? nullptr : it->second.get();
}

lightcc_embedding_table* lightcc_embedding_group::find(uint64_t id) const {
  for (auto& [name, table] : tables_)
    if (hash_of(name.data(), name.size()).key == id) return table.get();
  return nullptr;
}

lightcc_embedding_table* lightcc_embedding_group::add(std::unique_ptr<lightcc_embedding_table> table) {
  const std::string name = table->name;
  return (tables_[name] = std::move(table)).get();
}

void lightcc_embedding_group::remove(lightcc_embedding_table* table) {
  held.clear();
  for (lightcc_embedding_call* call : updates) call->steps.clear();
  const std::string name = table->name;
  tables_.erase(name);
}

extern "C" {

int lightcc_embedding_open(int group, int rank, int size, lightcc_embedding_group** opened) {
  return guard([&] {
    if (size < 1 || size > 65535 || rank < 0 || rank >= size)
      throw Error(Code::invalid_argument,
                  "a group of " + std::to_string(size) + " ranks has no rank " + std::to_string(rank));
    *opened = new lightcc_embedding_group(rank, size, size > 1 ? lightcc_transport(group, size) : nullptr);
    return 0;
  });
}

int lightcc_embedding_close(lightcc_embedding_group* group) {
  return guard([&] {
    group->closed = true;
    group->background.clear();
    delete_if_over(*group);
    return 0;
  });
}
}
