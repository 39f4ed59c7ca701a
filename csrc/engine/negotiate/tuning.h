// The tuner at work, on the coordinator of the world's group: which batches it is told of, the message by which all
// members learn its choices, the log of its samples (HOROVOD_AUTOTUNE_LOG), and what later runs need not find out
// again. Only whoever holds the engine's progress lock calls it.
#pragma once
#include <array>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "base/cache_file.h"
#include "base/config.h"
#include "engine/negotiate/control/message.h"
#include "engine/negotiate/tuner.h"
#include "engine/run/batch_execution.h"

namespace lightcc {

class Tuning {
 public:
  // The selector, of a group of so many members, outlives it. What the file says of a class settles it at once, if that
  // is still one of its candidates.
  Tuning(const Config&, const Selector&, int members, CacheFile);

  // The selector has other rows: what is known of the last ones is forgotten.
  void restart();
  // A batch has run, in this time. It counts if it was one all-reduce, of all members, that was neither compressed nor
  // Adasum, and that has a second candidate.
  void note(const BatchExecution&, double seconds);
  // What all members are to be told before the next batch; nullopt: they know.
  std::optional<Tuned> message();

 private:
  struct Candidates {
    const Row *first = nullptr, *second = nullptr;
    bool operator==(const Candidates&) const = default;
  };
  Candidates candidates(const Collective&) const;  // none: it is not tuned
  void recall(const std::string& kept);
  void tell(const Tuner::Sample&, const Tuner::Decision*);
  void keep(const Tuner::Decision&);
  const Row& row(int size_class, bool second) const;

  const Selector& selector_;
  const int members_;
  const TunerLimits limits_;
  Tuner tuner_{limits_};
  AutotuneChoices sent_ = 0;
  std::array<Candidates, 64> candidates_;  // of each class: those of its first all-reduce
  const CacheFile file_;
  const std::string name_;                 // in the file
  std::map<int, std::string> kept_;        // there: by class, the row's name
  std::ofstream log_;
};

}  // namespace lightcc
