#include "engine/run/tracing.h"

#include "base/clock.h"
#include "engine/run/batch_execution.h"

namespace lightcc {
namespace {

// "allreduce.w" of the world, "allreduce.w (process set 2)" of another group: they may be in flight side by side.
std::string row_of(int group, const std::string& key) {
  return group == 0 ? key : key + " (process set " + std::to_string(group) + ")";
}

std::string kind_of(const std::string& key) {  // "ALLREDUCE"
  std::string kind = key.substr(0, key.find('.'));
  for (char& c : kind) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return kind;
}

const char* name_of(Code code) {
  constexpr const char* kTexts[] = {"ok",        "pending",   "invalid_argument", "mismatch",
                                    "peer_lost", "shut_down", "timeout",          "internal"};
  return kTexts[int(code)];
}

JsonObject describe(const Announcement& what) {
  JsonObject args;
  std::string dtypes, shapes;
  int64_t bytes = 0;
  for (const TensorSpec& tensor : what.tensors) {
    bytes += count_of(tensor.shape) * int64_t(size_of(tensor.dtype));
    dtypes += (dtypes.empty() ? "" : ", ") + std::string(name_of(tensor.dtype));
    shapes += (shapes.empty() ? "" : ", ") + text_of(tensor.shape);
  }
  if (!what.tensors.empty()) args.add("dtype", dtypes).add("shape", shapes).add("bytes", bytes);
  if (what.kind == Kind::allreduce || what.kind == Kind::reducescatter) args.add("op", name_of(what.op));
  if (what.kind == Kind::broadcast) args.add("root_rank", what.root);
  return args;
}

}  // namespace

void Tracing::negotiate(const Request& request) {
  if (timeline_.by_bucket())
    return buckets_.submitted(row_of(request.group, request.key), bytes_of(request.what), request.submitted_ns);
  timeline_.phase(row_of(request.group, request.key), "NEGOTIATE_" + kind_of(request.key), request.submitted_ns);
}

void Tracing::begin_transfer(const Request& request) {
  if (timeline_.by_bucket()) return;
  timeline_.phase(row_of(request.group, request.key), kind_of(request.key), now_ns(),
                  describe(request.what).add("peer", request.what.root).add("tag", request.tag));
}

void Tracing::mark_plan(uint32_t plan, const std::string& text) {
  timeline_.mark("FUSION_PLAN", now_ns(), JsonObject().add("plan", int64_t(plan)).add("buckets", text));
}

void Tracing::tick(int group, const std::string& key, int rank) {
  if (timeline_.by_bucket()) return buckets_.ready(row_of(group, key), rank, now_ns());
  timeline_.tick(row_of(group, key), "NEGOTIATE_" + kind_of(key), std::to_string(rank), now_ns());
}

void Tracing::begin(const std::vector<BatchItem>& batch, bool waits) {
  const uint64_t now = now_ns();
  timeline_.mark("CYCLE_START", now, JsonObject().add("requests", int64_t(batch.size())));
  if (timeline_.by_bucket()) {
    std::vector<std::string> requests;
    int64_t bytes = 0;
    for (const BatchItem& item : batch) {
      requests.push_back(row_of(item.request->group, item.request->key));
      bytes += bytes_of(item.request->what);
    }
    JsonObject args;
    args.add("bytes", bytes).add("fused_requests", int64_t(batch.size()));
    if (const Announcement& what = batch[0].request->what; !what.tensors.empty())
      args.add("dtype", name_of(what.tensors[0].dtype)).add("op", name_of(what.op));
    return buckets_.agreed(requests, kind_of(batch[0].request->key), args, waits, now);
  }
  for (const BatchItem& item : batch) {
    const Request& request = *item.request;
    const std::string row = row_of(request.group, request.key);
    JsonObject args = describe(request.what);
    args.add("fused_requests", int64_t(batch.size()));
    timeline_.phase(row, kind_of(request.key), now, args);
    if (waits) timeline_.activity(row, "QUEUE", now);
  }
}

void Tracing::act(const std::vector<BatchItem>& batch, const std::string& name) {
  const uint64_t now = now_ns();
  if (timeline_.by_bucket())
    return buckets_.activity(row_of(batch[0].request->group, batch[0].request->key), name, now);
  for (const BatchItem& item : batch) timeline_.activity(row_of(item.request->group, item.request->key), name, now);
}

void Tracing::show(const std::vector<BatchItem>& batch, std::span<const TimedPhase> phases) {
  const Request& first = *batch[0].request;
  for (const TimedPhase& phase : phases) {
    const std::string row = row_of(first.group, phase.name);
    JsonObject args;
    args.add("request", first.key).add("fused_requests", int64_t(batch.size()));
    timeline_.phase(row, phase.name, phase.begin_ns, args);
    timeline_.end(row, phase.end_ns);
  }
}

void Tracing::end(int group, const std::string& key, Code code, const std::string& text) {
  JsonObject args;
  args.add("status", name_of(code));
  if (!text.empty()) args.add("error", text);
  if (timeline_.by_bucket()) return buckets_.finished(row_of(group, key), code != Code::ok, args, now_ns());
  timeline_.end(row_of(group, key), now_ns(), args, is_automatic(key));
}

}  // namespace lightcc
