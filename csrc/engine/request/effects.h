// What a group's engine wants done outside of its group, as values. It calls nobody above it: it appends them, and the
// engine carries them out in their order, whenever it has called a group's engine (engine.cc).
// Invariants:
// 1. An effect is carried out once, also if the call that appended it has thrown. The epoch may end first: then effects
//    that only matter while it lasts do nothing.
// 2. Until it is carried out, the group's engine goes on as if it were, but for ChangeGroups and AwaitTurn, for which
//    its batch waits.
// 3. Launch turns must keep the order of the messages, and so are no effects (NcclRun::add_turn).
#pragma once
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/fifo.h"
#include "engine/lifecycle/epoch_state.h"
#include "engine/negotiate/control/message.h"
#include "engine/request/request.h"
#include "net/group.h"

namespace lightcc {

namespace effect {

struct Finish { RequestPtr request; Code code = Code::ok; std::string text; };
struct SkipName { int group; std::string key; };    // the other members have used this automatic name
struct ChangeGroups { RequestPtr request; };        // add_group, remove_group: all ranks are at this point
struct EndEpoch { EpochCause cause; };              // nobody can go on
struct RankLeft { int rank; std::string why; };     // of another host, in peace
struct AwaitTurn { std::shared_ptr<const Group> group; };  // nccl_launches.h; it will come, or the epoch ends
// This rank is blocked in a group on what these ranks have not announced.
struct WaitsFor { int group; std::string key; std::vector<int32_t> ranks; };

}  // namespace effect

// The messages are those of the world: between process sets, and what a rank reports.
using Effect = std::variant<effect::Finish, effect::SkipName, effect::ChangeGroups, effect::EndEpoch, effect::RankLeft,
                            effect::AwaitTurn, effect::WaitsFor, DeadlockProbe, RankReport>;
using Effects = Fifo<Effect>;

}  // namespace lightcc
