// What messages about ranks that wait for each other say of one.
#pragma once
#include <memory>
#include <string>

#include "engine/negotiate/surroundings.h"

namespace lightcc {

// group: nullptr if it has been removed meanwhile.
std::string process_set_text(int id, const std::shared_ptr<const Group>& group);

// What the rank is blocked on, in words; "": it is not, or this rank does not know.
std::string blocked_text(const Surroundings&, int rank);

}  // namespace lightcc
