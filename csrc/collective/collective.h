// What one fused collective is, and the interface of whatever can run it.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"

namespace lightcc {

class Residual;

struct TensorPlace { int64_t offset, count; };

// One collective over one Group, as rank `index` of `size` sees it. Sizes and offsets are in elements.
// Who fills what:
//   allreduce      input, output: `count` elements each; may be the same memory.
//   broadcast      output: `count`; on the root the data lies in it already.
//   allgather      input: counts[index]; output: sum(counts), rank r's part at sum(counts[0..r)). The input may lie in
//                  this rank's part.
//   reducescatter  input: sum(counts); output: counts[index] (the part of rank index; it may lie in that part of the
//                  input).
//   alltoall       input: sum(send); output: sum(counts), where send[r] goes to rank r and counts[r] comes from it.
//   barrier        nothing.
struct Collective {
  Kind kind;
  int index, size;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;         // never average: the engine folds 1/size into post
  double pre = 1.0, post = 1.0;
  DeviceKind device = DeviceKind::cpu; // whose memory input and output are
  int root = 0;                        // index in the group
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;
  std::vector<int64_t> counts, send;
  bool timed = false;                  // the Work notes when its phases were: a timeline runs
  std::vector<TensorPlace> tensors;    // Adasum, codec: where each lies in input and output, by offset; no more counts
  Codec codec;                         // a backend may compress the tensors so, each with its residual ...
  std::vector<std::shared_ptr<Residual>> residuals;  // ... of these
};

inline bool is_adasum(const Collective& c) { return c.kind == Kind::allreduce && c.op == ReduceOp::adasum; }

// A part of a collective in flight, by the clock of base/clock.h. Phases may overlap.
struct TimedPhase {
  const char* name;                    // of static life
  uint64_t begin_ns = 0, end_ns = 0;   // end 0: it is not over
};

// A member had no memory on its GPU for what compression leaves behind of a tensor (its place in Collective::tensors).
struct NoMemory {
  int member;
  size_t tensor, bytes;
};

// A collective in flight. step() never blocks and does a bounded piece of work (about 512 KiB);
// it returns whether anything moved. After done() nothing reads the input or writes the output any more,
// on this rank or any other. When step() returns false, waiting_for() names a member (index in the
// group) without whom it cannot go on.
struct Work {
  virtual ~Work() = default;
  virtual bool step() = 0;
  virtual bool done() const = 0;
  virtual int waiting_for() const = 0;
  // The phases that have begun, if the collective is timed and has phases.
  virtual std::span<const TimedPhase> phases() const { return {}; }
  // Why it has no result, once it is done, as all members find; the next collective works.
  virtual std::optional<NoMemory> no_memory() const { return std::nullopt; }
};

struct Algorithm;

// A way to run collectives of one group. To add one: implement this, hand it to the group's Selector, and write its
// rows into the rules (selector.h).
struct Backend {
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual bool accepts(const Collective&) const = 0;  // by what all members know alike
  // Members start the same collectives in the same order. algorithm: that of the row, nullptr where it names none.
  virtual std::unique_ptr<Work> start(const Collective&, const Algorithm* algorithm) = 0;
};

}  // namespace lightcc
