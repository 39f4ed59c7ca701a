// What Slurm writes in short: lists of hosts and of counts.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace lightcc {

// "node[01-03,7],x" as the names it stands for: node01, node02, node03, node7, x; also with several brackets in a name.
// Throws Error{invalid_argument} if it is no such list or stands for more than 100,000.
std::vector<std::string> expand_hosts(std::string_view list);

// "2(x3),1": 2, 2, 2, 1. Throws as above.
std::vector<int> tasks_per_node(std::string_view list);

}  // namespace lightcc
