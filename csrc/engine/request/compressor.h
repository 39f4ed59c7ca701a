// A codec that a caller has registered, and what is left behind of the tensors that it was used for. It belongs to an
// optimizer or a tape, needs no epoch and outlives epochs. Any thread may call it.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/residual.h"

namespace lightcc {

using Residuals = std::vector<std::shared_ptr<Residual>>;  // by tensor of a request

class Compressor {
 public:
  // warmup_steps: so many exchanges of each tensor go from dense to codec.ratio in five stages, each sending the same
  // share of what the one before sent (Lin et al. 2018, whose 0.1 % began so at 25 %).
  // Throws Error{invalid_argument}.
  Compressor(const Codec&, int64_t warmup_steps);

  bool is_like(const Compressor& other) const {
    return codec_ == other.codec_ && warmup_steps_ == other.warmup_steps_;
  }
  std::shared_ptr<Compressor> without_residuals() const { return std::make_shared<Compressor>(codec_, warmup_steps_); }

  // The residuals of a request, by group and name without kind; they are made when they are first asked for.
  Residuals residuals(int group, const std::string& name, size_t tensors);
  // The same of one tensor; nullptr if there is none.
  std::shared_ptr<Residual> find(int group, const std::string& name, size_t tensor) const;
  // What the next exchange of these announces.
  Codec codec_for(const Residuals&) const;
  void forget(const std::function<bool(int group)>& ended);  // what belongs to process sets that are no more
  void set_dense(const std::string& why);         // why values travel dense; "": they do not
  // As JSON; see lightcc_codec_state.
  std::string state() const;

 private:
  const Codec codec_;
  const int64_t warmup_steps_;
  mutable std::mutex mutex_;
  std::string dense_;
  std::map<std::pair<int, std::string>, Residuals> residuals_;
};

// Holds a residual as soon as whoever has it lets go: within a step of the engine. Throws Error{timeout} after seconds.
class HeldResidual {
 public:
  explicit HeldResidual(std::shared_ptr<Residual>);
  ~HeldResidual() { residual_->let_go(); }
  HeldResidual(const HeldResidual&) = delete;
  HeldResidual& operator=(const HeldResidual&) = delete;
  Residual* operator->() const { return residual_.get(); }

 private:
  const std::shared_ptr<Residual> residual_;
};

// The values of a piece, or their velocity, of a residual that the caller holds. What a device has is copied into
// `room`, which the caller waits for: a minute at most, then it is an Error{timeout}.
const std::vector<float>& values_of(const ResidualPiece&, bool velocity, std::vector<float>* room);

}  // namespace lightcc
