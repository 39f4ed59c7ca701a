#include "engine/negotiate/tuning.h"

#include <charconv>
#include <cstdio>
#include <sstream>

#include "base/log.h"

namespace lightcc {
namespace {

// Nodes that are pieces of a host are other nodes than the hosts.
std::string name_in_file(const Config& config) {
  return config.intra_size > 0 ? "tuned.intra_size_" + std::to_string(config.intra_size) : "tuned";
}

std::string gigabytes(double bytes_per_s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g GB/s", bytes_per_s * 1e-9);
  return text;
}

}  // namespace

Tuning::Tuning(const Config& config, const Selector& selector, int members, CacheFile file)
    : selector_(selector),
      members_(members),
      limits_{config.autotune_warmup_samples, config.autotune_steps_per_sample, config.autotune_most_samples},
      file_(std::move(file)),
      name_(name_in_file(config)) {
  restart();
  if (config.autotune_log.empty()) return;
  log_.open(config.autotune_log, std::ios::trunc);
  log_ << "size_class_bytes,choice,bytes_per_s,settled" << std::endl;
  if (!log_) log(Level::warning, "HOROVOD_AUTOTUNE_LOG: " + config.autotune_log + " cannot be written");
}

void Tuning::restart() {
  tuner_ = Tuner(limits_);
  candidates_ = {};
  kept_.clear();
  if (const auto kept = file_.get(name_)) recall(*kept);
}

// "20:2d/ring 22:links/ring". Whatever has another form, or names no candidate, is found out anew.
void Tuning::recall(const std::string& kept) {
  std::istringstream entries(kept);
  for (std::string entry; entries >> entry;) {
    int k = 0;
    const auto [colon, error] = std::from_chars(entry.data(), entry.data() + entry.size(), k);
    if (error != std::errc() || k < size_class(kLeastTunedBytes) || k > 62 || *colon != ':') continue;
    const std::string name(colon + 1);
    kept_[k] = name;
    Collective c{};
    c.kind = Kind::allreduce;
    c.size = members_;
    c.dtype = DType::uint8;
    for (const int64_t bytes : {int64_t(1) << k, (int64_t(1) << k) + 1}) {  // rules may end at the class's first size
      c.count = bytes;
      const auto [first, second] = candidates(c);
      if (first && (name == text_of(*first) || name == text_of(*second))) tuner_.settle(k, name == text_of(*second));
    }
  }
}

Tuning::Candidates Tuning::candidates(const Collective& c) const {
  const Row &first = selector_.choose(c), &second = selector_.choose(c, ~AutotuneChoices(0));
  if (&first == &second || first.forced) return {};  // what is forced stays
  return {&first, &second};
}

void Tuning::note(const BatchExecution& batch, double seconds) {
  const Collective* const c = batch.only_collective();
  const BatchItem& item = batch.items()[0];
  if (!c || c->kind != Kind::allreduce || item.absent > 0) return;
  const Candidates found = candidates(*c);
  if (!found.first) return;
  Candidates& of_class = candidates_[size_t(size_class(bytes_of(*c)))];
  if (!of_class.first) of_class = found;
  if (of_class != found) return;  // at the class's first size it may have others
  const auto [sample, decision] = tuner_.note(bytes_of(*c), seconds, item.second);
  if (sample) tell(*sample, decision ? &*decision : nullptr);
  if (decision) keep(*decision);
}

std::optional<Tuned> Tuning::message() {
  if (std::exchange(sent_, tuner_.choices()) == tuner_.choices()) return std::nullopt;
  return Tuned{sent_};
}

const Row& Tuning::row(int size_class, bool second) const {
  const Candidates& of_class = candidates_[size_t(size_class)];
  return second ? *of_class.second : *of_class.first;
}

void Tuning::tell(const Tuner::Sample& sample, const Tuner::Decision* decision) {
  if (!log_.is_open()) return;
  log_ << (int64_t(1) << sample.size_class) << ',' << text_of(row(sample.size_class, sample.second)) << ','
       << int64_t(sample.bytes_per_s) << ','
       << (decision ? text_of(row(decision->size_class, decision->second)) : "") << std::endl;
}

void Tuning::keep(const Tuner::Decision& decision) {
  const int k = decision.size_class;
  log(Level::info, "all-reduces of " + std::to_string(int64_t(1) << k) + " bytes and up to twice as many use " +
                       text_of(row(k, decision.second)) + ": " + text_of(row(k, false)) + " has " +
                       gigabytes(decision.first_bytes_per_s) + ", " + text_of(row(k, true)) + " " +
                       gigabytes(decision.second_bytes_per_s));
  kept_[k] = text_of(row(k, decision.second));
  std::string kept;
  for (const auto& [size_class, name] : kept_)
    kept += (kept.empty() ? "" : " ") + std::to_string(size_class) + ":" + name;
  file_.put(name_, kept);
}

}  // namespace lightcc
