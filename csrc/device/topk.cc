// The phases of TopKSelection; its loops are in topk_kernels.h.
#include "device/topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "device/topk_kernels.h"

namespace lightcc {

using namespace kernels;

namespace {

constexpr uint32_t kInfinity = 0x7f800000u, kBeyondAll = 0x80000000u;  // as bits of a magnitude
constexpr size_t kProbeStep = size_t(128) << 10;                       // candidates
constexpr size_t kPruneStep = size_t(16) << 10;                        // candidates; each may touch a line

// The sample: whole lines, one in each of as many equal parts, of an eighth of the piece at most.
constexpr size_t kSampleLines = 2048, kLeastSampleLines = 32, kSampleShare = 8;
constexpr size_t kLineFloats = kLine / sizeof(float);
constexpr double kDeviations = 4;      // so many standard deviations more than k are expected from the guess on
constexpr uint32_t kCoarse = 1 << 13;  // bits of a float: a thousandth of it

// The gap between the guess and the last threshold narrows while there are more candidates than this, by k; else it
// widens. Error feedback makes many elements lie just below the threshold, so gaps of less than a hundredth are usual.
// A candidate beyond k costs ten ns, a miss another pass: so a miss undoes 14 steps of narrowing.
constexpr double kCandidates = 1.25;
constexpr float kLeastGap = 1.0f / 4096, kMostGap = 0.5f, kNarrower = 0.95f, kWider = 1.05f, kMissed = 2;

constexpr uint32_t kFirstStride = 1 << 12;  // of the search, in bits of a float: half a thousandth of it

// The k-th largest magnitude of a sample, or a little less.
uint32_t quantile(const TopKLoops& loops, std::span<const float> sample, size_t k) {
  uint32_t low = 0, high = kBeyondAll;
  while (high - low > kCoarse) {
    const uint32_t middle = low + (high - low) / 2;
    (loops.count_from(sample.data(), sample.size(), middle) >= k ? low : high) = middle;
  }
  return low;
}

}  // namespace

TopKSelection::TopKSelection(Isa isa) : loops_(&topk_loops(isa)) {}

void TopKSelection::start(const TopKPiece& piece, TopKWarmStart& warm) {
  if (piece.k < 1 || piece.k > piece.count) {
    throw Error(Code::internal, "top-k: cannot select " + std::to_string(piece.k) + " of " +
                                    std::to_string(piece.count) + " elements");
  }
  topk_message_bytes(piece.count, piece.k, piece.values);  // throws if they cannot be sent
  piece_ = piece;
  warm_ = &warm;
  selected_ = {};
  sampled_ = false;
  // Without the second part of the room each element of a small piece would cost a search.
  room_ = std::min(piece.count, 2 * piece.k + 2 * kCodecBlock);
  if (allocated_ < room_) {
    values_ = std::make_unique_for_overwrite<float[]>(room_ + kLanes);
    indices_ = std::make_unique_for_overwrite<uint16_t[]>(room_ + kLanes);
    allocated_ = room_;
  }
  counts_.assign((piece.count + kCodecBlock - 1) / kCodecBlock, 0);
  gap_ = warm.gap >= kLeastGap && warm.gap <= kMostGap ? warm.gap : TopKWarmStart{}.gap;
  phase_ = Phase::guess;
}

bool TopKSelection::step() {
  switch (phase_) {
    case Phase::guess: guess(); break;
    case Phase::collect: collect(); break;
    case Phase::probe: probe(); break;
    case Phase::prune: prune(); break;
    case Phase::roll_back: roll_back(); break;
    case Phase::done: break;
  }
  return phase_ != Phase::done;
}

size_t TopKSelection::length_of(size_t block) const {
  return std::min(kCodecBlock, piece_.count - block * kCodecBlock);
}

// ---- the guess

void TopKSelection::guess() {
  const float guessed = warm_->threshold * (1 - gap_);
  const bool known = guessed > 0 && std::isfinite(guessed);
  if (selected_.passes == 0) selected_.warm = known;
  if (selected_.passes == 0 && known) begin_pass(magnitude_of(guessed));
  else if (!sampled_) begin_pass(guess_from_sample());
  else begin_pass(0);
}

uint32_t TopKSelection::guess_from_sample() {
  sampled_ = true;
  const size_t lines = std::min(kSampleLines, piece_.count / kLineFloats / kSampleShare);
  if (lines < kLeastSampleLines) return 0;
  const size_t part = piece_.count / lines;
  sample_.resize(kSampleLines * kLineFloats);
  uint32_t random = 1;
  for (size_t line = 0; line < lines; ++line) {
    random = random * 1664525u + 1013904223u;  // so that it falls into step with no row of a matrix
    const size_t at = line * part + (random >> 8) % (part - kLineFloats);
    const float* r = piece_.residual + at;
    const float* g = piece_.gradient + at;
    float* to = sample_.data() + line * kLineFloats;
    for (size_t i = 0; i < kLineFloats; ++i) to[i] = selected_.passes > 0 ? r[i] : r[i] + piece_.scale * g[i];
  }
  const std::span<const float> sample(sample_.data(), lines * kLineFloats);
  const double expected = static_cast<double>(piece_.k) * static_cast<double>(sample.size()) /
                          static_cast<double>(piece_.count);
  const double k = expected + kDeviations * std::sqrt(expected) + 2 * kDeviations;
  return k < static_cast<double>(sample.size()) ? quantile(*loops_, sample, static_cast<size_t>(k)) : 0;
}

// ---- a pass

void TopKSelection::begin_pass(uint32_t least) {
  ++selected_.passes;
  least_ = floor_ = least;
  candidates_ = 0;
  block_ = 0;
  phase_ = Phase::collect;
}

void TopKSelection::collect() {
  const size_t at = block_ * kCodecBlock;
  const CollectTask task{.residual = piece_.residual + at,
                         .gradient = piece_.gradient + at,
                         .scale = piece_.scale,
                         .count = length_of(block_),
                         .least = least_,
                         .values = &values_[candidates_],
                         .indices = &indices_[candidates_]};
  const bool half = piece_.values == DType::float16, add = selected_.passes == 1;
  const size_t found = loops_->collect[half][add](task);
  // What is not finite is larger than all else, so it will be selected.
  if (loops_->count_from(&values_[candidates_], found, kInfinity) > 0) selected_.finite = false;
  counts_[block_++] = static_cast<uint32_t>(found);
  candidates_ += found;
  if (block_ < blocks()) {
    if (candidates_ + length_of(block_) <= room_) return;
    ++selected_.prunes;
    search();
  } else if (candidates_ < piece_.k) {  // a miss: all go back
    if (selected_.warm && selected_.passes == 1) gap_ = std::min(kMostGap, gap_ * kMissed);
    begin_pruning(kBeyondAll, 0);
  } else {
    if (selected_.warm && selected_.passes == 1) {
      const bool many =
          selected_.prunes > 0 || static_cast<double>(candidates_) > kCandidates * static_cast<double>(piece_.k);
      gap_ = std::clamp(gap_ * (many ? kNarrower : kWider), kLeastGap, kMostGap);
    }
    search();
  }
}

// ---- the k-th largest candidate

void TopKSelection::search() {
  if (candidates_ == piece_.k) {
    cut_ = floor_;
    return pruned();
  }
  low_ = floor_;
  low_count_ = candidates_;
  high_ = kBeyondAll;
  high_count_ = 0;
  probes_ = 0;
  phase_ = Phase::probe;
  probe_ = next_probe();
  probe_at_ = probe_count_ = 0;
}

// The cut is usually a little above low_. So first in growing strides; once it lies between two counts, where a
// straight line between them has k, and the middle at each third time, which bounds their number.
uint32_t TopKSelection::next_probe() {
  const uint32_t span = high_ - low_;
  ++probes_;
  if (high_count_ == 0 && high_ == kBeyondAll) {
    const uint32_t stride = kFirstStride << std::min(2 * probes_ - 2, 16);
    return low_ + std::min(stride, std::max(span / 2, 1u));
  }
  if (probes_ % 3 == 0) return low_ + span / 2;
  const double part = static_cast<double>(low_count_ - piece_.k) / static_cast<double>(low_count_ - high_count_);
  return low_ + std::clamp(static_cast<uint32_t>(part * span), 1u, span - 1);
}

void TopKSelection::probe() {
  const size_t n = std::min(kProbeStep, candidates_ - probe_at_);
  probe_count_ += loops_->count_from(&values_[probe_at_], n, probe_);
  probe_at_ += n;
  if (probe_at_ < candidates_) return;
  if (probe_count_ == piece_.k) return begin_pruning(probe_, 0);
  if (probe_count_ > piece_.k) low_ = probe_, low_count_ = probe_count_;
  else high_ = probe_, high_count_ = probe_count_;
  if (high_ - low_ == 1) return begin_pruning(high_, piece_.k - high_count_);
  probe_ = next_probe();
  probe_at_ = probe_count_ = 0;
}

// ---- all but the k largest go back

void TopKSelection::begin_pruning(uint32_t cut, size_t ties) {
  cut_ = cut;
  floor_ = ties > 0 ? cut - 1 : cut;
  ties_ = ties;
  end_ = block_;
  block_ = block_at_ = block_kept_ = read_ = kept_ = 0;
  phase_ = Phase::prune;
}

void TopKSelection::prune() {
  for (size_t left = kPruneStep; block_ < end_ && left > 0;) {
    const size_t n = std::min(left, counts_[block_] - block_at_);
    const PruneTask task{.residual = piece_.residual + block_ * kCodecBlock,
                         .values = &values_[read_],
                         .indices = &indices_[read_],
                         .count = n,
                         .cut = cut_,
                         .kept_values = &values_[kept_],
                         .kept_indices = &indices_[kept_]};
    const size_t kept = loops_->prune(task, ties_);
    left -= n;
    read_ += n;
    kept_ += kept;
    block_at_ += n;
    block_kept_ += kept;
    if (block_at_ < counts_[block_]) continue;
    counts_[block_++] = static_cast<uint32_t>(block_kept_);
    block_at_ = block_kept_ = 0;
  }
  if (block_ < end_) return;
  candidates_ = kept_;
  pruned();
}

void TopKSelection::pruned() {
  if (candidates_ < piece_.k) {
    phase_ = Phase::guess;
  } else if (block_ < blocks()) {
    least_ = cut_;  // what comes later and is no larger than the k-th is not selected: it has a higher index
    phase_ = Phase::collect;
  } else {
    finish();
  }
}

// ---- the end

void TopKSelection::finish() {
  selected_.counts = counts_;
  selected_.indices = {indices_.get(), piece_.k};
  selected_.values = {values_.get(), piece_.k};
  block_ = 0;
  phase_ = selected_.finite ? Phase::done : Phase::roll_back;
  if (!selected_.finite) return;  // a step that will be skipped teaches nothing
  warm_->threshold = std::bit_cast<float>(cut_);
  warm_->gap = gap_;
}

void TopKSelection::roll_back() {
  const size_t at = block_ * kCodecBlock;
  std::memcpy(piece_.residual + at, piece_.gradient + at, length_of(block_) * sizeof(float));
  if (++block_ == blocks()) phase_ = Phase::done;
}

}  // namespace lightcc
