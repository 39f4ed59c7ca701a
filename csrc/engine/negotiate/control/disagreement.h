// What members of a group that announced one request do not agree on.
#pragma once
#include <string>
#include <vector>

#include "engine/negotiate/control/message.h"

namespace lightcc {

// "" or what differs and who has what: "ranks disagree on shape: ranks 0, 2 have [2, 3], rank 1 has [3, 2]".
// All three by member: what it announced, whether it has, and its world rank.
std::string disagreement(const std::vector<Announcement>& what, const std::vector<char>& announced,
                         const std::vector<int>& rank_of);

}  // namespace lightcc
