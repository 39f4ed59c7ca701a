#include "engine/negotiate/tuner.h"

#include <algorithm>

namespace lightcc {
namespace {

struct Spread {
  double low, median, high;  // quartiles, the outer ones rounded outwards: of few samples all count
};
Spread spread_of(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::ranges::sort(samples);
  const size_t last = samples.size() - 1, quarter = last / 4;
  return {samples[quarter], (samples[last / 2] + samples[(last + 1) / 2]) / 2, samples[last - quarter]};
}

// The candidate of a class's sample, of those that count. Every class begins with the first one. The orders are the
// rows of a Hadamard matrix: of any four classes side by side, two have the same order in half of the pairs.
bool takes_second(int size_class, size_t sample) {
  constexpr unsigned kSwapped[] = {0b0000, 0b1010, 0b1100, 0b0110};  // bit p: pairs p, p + 4 ... are second, first
  return (sample % 2 != 0) != ((kSwapped[size_class % 4] >> sample / 2 % 4 & 1) != 0);
}

}  // namespace

Tuner::Noted Tuner::note(int64_t bytes, double seconds, AutotuneChoices in_force) {
  if (bytes < kLeastTunedBytes || !(seconds > 0)) return {};
  const int k = size_class(bytes);
  Class& c = classes_[size_t(k)];
  if (c.settled || (in_force >> k & 1) != AutotuneChoices(c.second)) return {};
  c.bytes += double(bytes);
  c.seconds += seconds;
  if (++c.steps < limits_.steps_per_sample) return {};
  const Sample sample{k, c.second, c.bytes / c.seconds};
  c.steps = 0;
  c.bytes = c.seconds = 0;
  if (c.warmups < limits_.warmup_samples) {
    c.second = ++c.warmups < limits_.warmup_samples && !c.second;
    return {};
  }
  c.samples[sample.second].push_back(sample.bytes_per_s);
  c.second = takes_second(k, c.samples[0].size() + c.samples[1].size());
  const std::optional<bool> second = verdict(c);
  if (!second) return {sample, {}};
  settle(k, *second);
  return {sample, Decision{k, *second, spread_of(c.samples[0]).median, spread_of(c.samples[1]).median}};
}

std::optional<bool> Tuner::verdict(const Class& c) const {
  const size_t firsts = c.samples[0].size(), seconds = c.samples[1].size();
  const Spread first = spread_of(c.samples[0]), second = spread_of(c.samples[1]);
  const bool gains = firsts > 0 && second.median > first.median * (1 + kLeastGain);
  if (firsts + seconds >= size_t(limits_.most_samples)) return gains;
  if (std::min(firsts, seconds) < size_t(kFewestSamples)) return std::nullopt;
  if (gains && second.low > first.high) return true;
  if (first.low > second.high) return false;
  return std::nullopt;
}

void Tuner::settle(int size_class, bool second) {
  Class& c = classes_.at(size_t(size_class));
  if (c.settled) return;
  c.settled = true;
  c.second = second;
}

AutotuneChoices Tuner::choices() const {
  AutotuneChoices choices = 0;
  for (size_t k = 0; k < classes_.size(); ++k) choices |= AutotuneChoices(classes_[k].second) << k;
  return choices;
}

}  // namespace lightcc
