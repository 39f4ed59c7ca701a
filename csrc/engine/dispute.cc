// The engine's part in disputes: whom it tells, what it answers, and what it does when one is proven.
#include "engine/dispute.h"

#include <algorithm>

#include "engine/engine.h"

namespace lightcc {
namespace {

const std::string kProcessSetsDiffer = "ranks disagree on the process set: ";

}  // namespace

// A rank that belongs to one process set only can be in no dispute.
void Engine::look_for_dispute(const Request& request) {
  if (disputes_.blocked() || request.what.kind == Kind::join) return;
  if (baton_.exchange(true, std::memory_order_seq_cst)) return;
  auto channel = channels_.find(request.group);
  if (channels_.size() > 1 && channel != channels_.end() &&
      channel->second->announced(request.what.kind, request.automatic, request.key))
    disputes_.block(request);
  baton_.store(false, std::memory_order_seq_cst);
}

void Engine::judge(const Message& message) {
  if (auto* stuck = std::get_if<Stuck>(&message)) judge_.hear(*stuck);
  if (auto* plea = std::get_if<Plea>(&message)) judge_.hear(*plea);
}

bool Engine::go_on_with_disputes() {
  Channel& world = *channels_.at(0);
  bool moved = false;
  if (auto news = disputes_.news(); news && !world.courier().cut_off()) world.courier().say(*news), moved = true;
  for (const Accuse& one : disputes_.accusations()) answer(one), moved = true;
  for (const Accuse& one : judge_.take()) world.courier().tell(one), moved = true;
  return moved;
}

void Engine::answer(const Accuse& accuse) {
  auto has = [](const std::vector<int>& ranks, int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  if (accuse.proven) {
    auto& plead = disputes_.pleaded();
    if (plead && plead->accuse.other == accuse.other && plead->accuse.group == accuse.group) stay_away();
    return;
  }
  if (!disputes_.blocked(accuse.state)) return;  // it has gone on, and has said so
  auto own = channels_.find(disputes_.group()), other = channels_.find(accuse.group);
  const bool guilty = own != other && own != channels_.end() && other != channels_.end() &&
                      has(own->second->members().ranks, accuse.other) &&
                      has(other->second->members().ranks, accuse.other) &&
                      !other->second->announced(disputes_.kind(), disputes_.automatic(), disputes_.key());
  if (guilty) disputes_.plead(accuse);
  channels_.at(0)->courier().say(Plea{world_.rank, accuse.state, accuse.other, accuse.group, guilty});
}

// It is proven: this rank tells the other's process set that it will not come, and the other does likewise. Each says
// so before anything that it does afterwards, so nobody takes its next request for this one.
void Engine::stay_away() {
  const Disputes::Plead plead = *std::exchange(disputes_.pleaded(), std::nullopt);
  auto other = channels_.find(plead.accuse.group);
  if (other == channels_.end() || other->second->announced(plead.own.kind, plead.automatic, plead.own.key)) return;
  auto side = [&](int rank, int group) {
    return "rank " + std::to_string(rank) + " gave it to process set " + std::to_string(group) + " (ranks " +
           text_of(group_ranks(group)) + ")";
  };
  std::string ours = side(world_.rank, plead.own.group), theirs = side(plead.accuse.other, plead.accuse.group);
  if (plead.accuse.other < world_.rank) std::swap(ours, theirs);
  skip_name(plead.accuse.group, plead.accuse.key);
  other->second->stay_away(plead.accuse.key, kProcessSetsDiffer + ours + ", " + theirs);
}

// The request at issue may fail before this rank hears why.
void Engine::finish_dispute(const Request& request, Code code, const std::string& text) {
  auto& plead = disputes_.pleaded();
  if (!plead || !plead->is_of(request)) return;
  if (code == Code::mismatch && text.find(kProcessSetsDiffer) != std::string::npos) return stay_away();
  plead.reset();
}

}  // namespace lightcc
