// The learned fusion plan, as pure functions. Requests of a set (lightcc_request.set) are submitted in each step in
// much the same order and at much the same times. Once that has been seen, each is assigned to a bucket for good: what
// is in a bucket travels as one collective, which begins when its last request is there. Invariants:
// 1. A step is the time in which each request of the set becomes ready once. It ends when all that the last steps had
//    have come, or when one comes again.
// 2. Every request is in exactly one bucket, and those of a bucket may run as one (fusion.h).
// 3. Buckets stand in the order in which they can begin.
#pragma once
#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/negotiate/control/fusion.h"

namespace lightcc {

// ---- what is seen

// After so many equal steps a plan is made. If it had to be left before it had served for kServedSteps, the next one
// takes twice as many, up to kMostCaution times as many: programs whose steps differ shall not pay for plans.
inline constexpr int kEqualSteps = 3;
inline constexpr uint64_t kServedSteps = 4;
inline constexpr int kMostCaution = 256;

// The steps of one set, as the coordinator sees them.
class StepRecord {
 public:
  struct Item {
    std::string key;
    uint64_t ready_ns;  // when all ranks had announced it
  };

  // A request has become ready. True: with it a step has ended, and enough steps were equal; the plan is to be made of
  // step().
  bool ready(const std::string& key, uint64_t now_ns);
  const std::vector<Item>& step() const { return last_; }  // in the order in which its requests became ready

  // The plan was left after so many steps, or (0) could not be made: it begins anew, with the next step. rest: what is
  // still to come of the present one. So when a plan of a, b and c ends behind a, these are b and c.
  void start_over(uint64_t served_steps, std::set<std::string> rest = {});
  // What was taken for the end of a step was not: the longest pause in it is where a step ended.
  void realign();

 private:
  using Keys = std::set<std::string>;
  void end_step();

  std::vector<Item> now_, last_;
  Keys now_keys_, rest_;
  std::deque<Keys> steps_;  // the last kEqualSteps, the last one in front
  Keys known_;              // all of their keys
  int equal_ = 0, caution_ = 1;
};

// What collectives have cost so far: start_s + byte_s * bytes, of those that have run here.
struct PlanCosts {
  double start_s, byte_s;
};
class MeasuredCosts {
 public:
  explicit MeasuredCosts(PlanCosts before_any) : costs_(before_any) {}
  void note(int64_t bytes, double seconds);
  PlanCosts costs() const;

 private:
  PlanCosts costs_;
  std::deque<double> starts_, bytes_;  // seconds of small collectives; seconds a byte of large ones
};

// ---- what is made of it

struct PlanRequest {
  ReadyRequest request;
  double ready_s;
};

// Buckets, as indices of requests, so that the last ends early: its end is when it and all before it are ready and
// through. An optimum by dynamic programming over the order of readiness, which weighs the start of each bucket and,
// where tensors do not lie side by side, the copying. Source: the pipeline of gradient buckets of Shi, Chu and Li,
// MG-WFBP (INFOCOM 2019), with a price for each bucket, as its start takes time from the computation.
std::vector<Bucket> plan_buckets(std::span<const PlanRequest>, PlanCosts, FusionLimits);

}  // namespace lightcc
