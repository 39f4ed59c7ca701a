// What the engine tells its timeline, in Horovod's words: a row for each request, in it NEGOTIATE_<KIND> with a tick
// for every rank that is ready, then <KIND>, and in that what was done to bring it about. By buckets it is a row for
// each batch on its way (bucket_rows.h). Only whoever holds the progress lock calls. While no timeline runs, a call is
// one look at a flag.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "collective/selector.h"
#include "engine/request/request.h"
#include "engine/timeline/bucket_rows.h"
#include "engine/timeline/trace.h"

namespace lightcc {

struct BatchItem;

class Tracing {
 public:
  explicit Tracing(Timeline& timeline) : timeline_(timeline) {}

  void step_begins(uint64_t now_ns) { if (timeline_.running() && timeline_.by_bucket()) buckets_.step(now_ns); }
  void submitted(const Request& request) { if (timeline_.running()) negotiate(request); }
  // A send or a receive: the peer's side of it is known.
  void begun(const Request& request) { if (timeline_.running()) begin_transfer(request); }
  // At the coordinator: this world rank has announced it.
  void ready(int group, const std::string& key, int rank) { if (timeline_.running()) tick(group, key, rank); }
  // A batch is to run; waits: once another one has.
  void agreed(const std::vector<BatchItem>& batch, bool waits) { if (timeline_.running()) begin(batch, waits); }
  // What is now being done for a batch that runs. "": nothing.
  void activity(const std::vector<BatchItem>& batch, const char* name) { if (timeline_.running()) act(batch, name); }
  void activity(const std::vector<BatchItem>& batch, const Row& way) {
    if (timeline_.running()) act(batch, text_of(way));
  }
  // Requests travel in such buckets from now on: those of all plans, this one among them.
  void planned(uint32_t plan, const std::string& text) { if (timeline_.running()) mark_plan(plan, text); }
  bool running() const { return timeline_.running(); }
  // What a collective of the batch, which is done, tells of its parts. They overlap, so each has a row of its own.
  void phases(const std::vector<BatchItem>& batch, std::span<const TimedPhase> phases) {
    if (!phases.empty() && timeline_.running()) show(batch, phases);
  }
  void finished(const Request& request, Code code, const std::string& text) {
    if (timeline_.running()) end(request.group, request.key, code, text);
  }
  // A request of other ranks has failed, which this rank has not submitted.
  void refused(int group, const std::string& key, Code code, const std::string& text) {
    if (timeline_.running()) end(group, key, code, text);
  }

 private:
  void negotiate(const Request&);
  void begin_transfer(const Request&);
  void tick(int group, const std::string& key, int rank);
  void begin(const std::vector<BatchItem>&, bool waits);
  void mark_plan(uint32_t plan, const std::string& text);
  void act(const std::vector<BatchItem>&, const std::string& name);
  void show(const std::vector<BatchItem>&, std::span<const TimedPhase>);
  void end(int group, const std::string& key, Code, const std::string& text);
  Timeline& timeline_;
  BucketRows buckets_{timeline_};
};

}  // namespace lightcc
