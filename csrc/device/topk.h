// Top-K selection with error feedback: of the sum of a gradient and of what earlier steps have left behind, the k
// elements largest in magnitude are sent and the rest is left behind for later steps. For one piece, a rank's shard of
// one tensor.
//
//   acc = residual + scale * gradient
//   selected: the k largest by the bits of |acc| as integers (NaN > infinity > finite), of equal ones the first
//   residual = acc, and 0 where an element is selected; with float16 values what rounding has left of it
//
// 1. The result depends on the piece alone: not on the instruction set, the warm start, or what has run before.
// 2. A sum that is not finite is always selected, and then the residual is what it was before: a gradient scaler will
//    skip the step. For that the old residual goes where the gradient was. That is exact, needs no memory, and was
//    the cheapest that is exact (1.13 of adding in place; 1.26 a second residual past the cache, 2 a pass that looks
//    first): the line is in the cache and is written back while the loop waits for what it reads.
// 3. Nothing but the selected elements changes hands: value + residual is acc, exactly for float32, and for float16
//    wherever |acc| is not beyond its largest finite number; there that number is sent and the rest, rounded, stays.
//
// How: one pass adds up and keeps as candidates all elements from a guessed threshold on; the k-th largest of the
// candidates is found by counting, and the others are put back. The guess is a little below the last step's threshold,
// or a quantile of a sample. If it was too high, another pass reads the sums with a lower one, in the end 0. If it was
// too low, the room for candidates fills up, all but the k largest so far are put back, and the pass goes on with those
// as its bound.
#pragma once
#include <memory>

#include "device/codec.h"
#include "device/cpu.h"

namespace lightcc {

namespace kernels {
struct TopKLoops;
}

// What a caller keeps for a piece from step to step. Only speed depends on it: any bits may be in it.
struct TopKWarmStart {
  float threshold = 0;  // of the last step; 0: not known
  float gap = 0.1f;     // how far below it, relatively, the guess lies: it follows how much thresholds change
};

struct TopKPiece {
  float* gradient;  // is overwritten
  float* residual;
  size_t count;
  size_t k;  // 1 to count
  float scale = 1;
  DType values = DType::float32;  // as which they will be sent: float32 or float16
};

// In ascending order of elements. Lies in the memory of the selection, until its next start().
struct TopKSelected {
  std::span<const uint32_t> counts;   // for each block of kCodecBlock elements how many of it are selected
  std::span<const uint16_t> indices;  // k, in their block
  std::span<const float> values;      // k sums; send_float16() rounds them
  bool finite = true;                 // all sums; if not, the residual has not changed
  // How it came about, for tests and benchmarks.
  bool warm = false;  // the first guess was the warm start's
  int passes = 0;     // over the piece: 1 when the first guess was low enough
  int prunes = 0;     // how often the room for candidates was full
};

// One piece at a time, any number one after another; its memory grows to 6 bytes a candidate, of which there is room
// for 2 k + 128 Ki or `count`, whichever is less, and 128 KiB for a sample. The piece and the warm start are the
// caller's until step() has returned false. One thread at a time.
class TopKSelection {
 public:
  explicit TopKSelection(Isa isa = best_isa());

  // Does no work yet.
  void start(const TopKPiece&, TopKWarmStart&);

  // Takes at most a block of the piece (reads 512 KiB, writes as much), 128 Ki candidates (reads 512 KiB of the own
  // memory), 16 Ki candidates with what they change in the residual, or the sample (2 Ki lines of both, 0.2 ms).
  // Returns whether there is more to do.
  bool step();

  const TopKSelected& selected() const { return selected_; }

 private:
  enum class Phase { guess, collect, probe, prune, roll_back, done };

  void guess();
  uint32_t guess_from_sample();
  void begin_pass(uint32_t least);
  void collect();
  void search();
  uint32_t next_probe();
  void probe();
  void begin_pruning(uint32_t cut, size_t ties);
  void prune();
  void pruned();
  void finish();
  void roll_back();
  size_t blocks() const { return counts_.size(); }
  size_t length_of(size_t block) const;

  const kernels::TopKLoops* loops_;
  TopKPiece piece_{};
  TopKWarmStart* warm_ = nullptr;
  TopKSelected selected_;
  Phase phase_ = Phase::done;
  bool sampled_ = false;
  float gap_ = 0;  // the warm start's, if it makes sense, and then the next step's

  // Candidates: of the blocks so far all elements whose bits are at least least_, or after pruning at least floor_ and
  // among the k largest of their time. In the residual stands what is left behind if they are sent.
  std::unique_ptr<float[]> values_;
  std::unique_ptr<uint16_t[]> indices_;
  std::vector<uint32_t> counts_;  // of each block
  size_t candidates_ = 0;
  size_t room_ = 0;       // for so many
  size_t allocated_ = 0;  // at least room_
  size_t block_ = 0;  // the next to collect, prune or restore
  uint32_t least_ = 0, floor_ = 0;

  // Searching the cut: low_count_ candidates have bits of at least low_, more than k; high_count_ < k at least high_.
  uint32_t low_ = 0, high_ = 0, probe_ = 0;
  size_t low_count_ = 0, high_count_ = 0;
  size_t probe_at_ = 0, probe_count_ = 0;  // of the candidates before probe_at_ so many are at least probe_
  int probes_ = 0;

  // Pruning blocks before end_: kept are candidates from cut_ on, and the first ties_ of those just below.
  uint32_t cut_ = 0;
  size_t ties_ = 0, end_ = 0;
  size_t read_ = 0, kept_ = 0;             // so many candidates
  size_t block_at_ = 0, block_kept_ = 0;  // of block_

  std::vector<float> sample_;
};

}  // namespace lightcc
