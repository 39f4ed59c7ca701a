#include "collective/pipeline.h"

#include <algorithm>

namespace lightcc {

Pipeline::Pipeline(std::vector<Stage> stages) {
  stages_.reserve(stages.size());
  for (Stage& stage : stages) stages_.push_back({std::move(stage)});
}

size_t Pipeline::ready(size_t stage) const {
  const Running& it = stages_[stage];
  if (it.stage.ready) return it.stage.ready();
  return stage == 0 ? it.stage.parts : left(stage - 1);
}

// The last stage first: what leaves it need not wait for those before.
bool Pipeline::step() {
  bool moved = false;
  for (size_t stage = stages_.size(); stage-- > 0;) moved |= step(stage);
  return moved;
}

bool Pipeline::step(size_t stage) {
  Running& it = stages_[stage];
  const bool has_turn = !it.stage.turn || *it.stage.turn == it.stage.number;
  while (has_turn && it.works.size() < it.stage.at_once && it.begun() < std::min(it.stage.parts, ready(stage)))
    it.works.push_back(it.stage.start(it.begun()));
  bool moved = false;
  for (const auto& work : it.works) moved |= !work->done() && work->step();
  const auto first_left = std::ranges::find_if(it.works, [](const auto& work) { return !work->done(); });
  if (const auto ended = size_t(first_left - it.works.begin())) {
    it.works.erase(it.works.begin(), first_left);
    it.left += ended;
    moved = true;
  }
  const size_t passed = it.stage.at_once > 1 ? it.begun() : it.left;
  if (it.stage.turn && has_turn && passed == it.stage.parts) ++*it.stage.turn;
  return moved;
}

int Pipeline::waiting_for() const {
  for (auto it = stages_.rbegin(); it != stages_.rend(); ++it)
    for (const auto& work : it->works) {
      const int whom = work->done() ? -1 : work->waiting_for();
      if (whom >= 0) return it->stage.members ? (*it->stage.members)[size_t(whom)] : whom;
    }
  return -1;
}

void Pipeline::note(PhaseTimes& times) const {
  for (const Running& it : stages_) times.note(it.stage.name, it.begun() > 0, it.left == it.stage.parts);
}

void Pipeline::clear() {
  for (Running& it : stages_) it.works.clear();
}

}  // namespace lightcc
