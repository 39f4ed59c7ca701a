// The tuner: of two candidates for all-reduces, the first and the second row of the selector's table that fits
// (AutotuneChoices in collective/selector.h), it keeps the one that has proven quicker. Pure: no I/O, no clock; whoever
// uses it says what has run and how long that took. A class is a size class, all-reduces of 2^k to 2^(k+1) - 1 bytes.
// Invariants:
// 1. A sample is so many all-reduces of one class under one candidate. What ran under the other, because it was agreed
//    on before the last change of choices(), is in no sample.
// 2. The samples of a class take the two candidates in turn. The first few are thrown away; those that count come in
//    pairs, one of each candidate, in orders by which classes do not change in step: where all-reduces of two classes
//    overlap, one would be blamed for the other.
// 3. What has settled, by samples or by settle(), never changes again, and is measured no more.
// 4. A class depends on no other, and takes its first candidate until something of it has been noted.
// 5. The second candidate wins only if it is quicker by kLeastGain; else the first stays.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "collective/selector.h"

namespace lightcc {

// Smaller all-reduces are not tuned: they take some tens of microseconds, of which most is the waking of threads, so
// samples differ more by that than by the candidate.
inline constexpr int64_t kLeastTunedBytes = 16 << 10;
inline constexpr double kLeastGain = 0.05;  // less is noise, and results then depend on it
inline constexpr int kFewestSamples = 3;    // of each candidate, unless there may not be so many

struct TunerLimits {
  int warmup_samples = 3;     // of a class, thrown away: connections are made, memory is touched for the first time
  int steps_per_sample = 10;
  int most_samples = 20;      // of a class; then it settles
};

class Tuner {
 public:
  struct Sample {
    int size_class;
    bool second;              // its candidate
    double bytes_per_s;
  };
  struct Decision {
    int size_class;
    bool second;              // the candidate that is kept
    double first_bytes_per_s, second_bytes_per_s;  // medians; 0: it has no sample
  };
  struct Noted {              // what has come to its end by an all-reduce, if anything has
    std::optional<Sample> sample;
    std::optional<Decision> decision;
  };

  explicit Tuner(TunerLimits limits) : limits_(limits) {}

  // An all-reduce of so many bytes, for which there are two candidates, has run under these choices.
  Noted note(int64_t bytes, double seconds, AutotuneChoices in_force);
  void settle(int size_class, bool second);  // found by an earlier run
  AutotuneChoices choices() const;             // what shall be in force from now on

 private:
  struct Class {
    bool settled = false, second = false;    // second: the candidate of the sample that is taken, then what is kept
    int warmups = 0;                         // samples thrown away
    int steps = 0;                           // of the sample that is taken, with what they were
    double bytes = 0, seconds = 0;
    std::vector<double> samples[2];          // bytes a second, by candidate
  };
  std::optional<bool> verdict(const Class&) const;  // is it the second? nullopt: more samples are needed

  TunerLimits limits_;
  std::array<Class, 64> classes_;
};

}  // namespace lightcc
