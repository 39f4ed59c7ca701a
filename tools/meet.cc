// Do the ranks of a launcher find each other? Starts no collectives: `mpirun -np 4 build/cmake/meet [EPOCHS]` prints,
// for each rank, how they met and who came from where.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "base/clock.h"
#include "base/error.h"
#include "net/launchers.h"

using namespace lightcc;

namespace {

void meet(const World& world, const Config& config, const Environment& env, int epoch) {
  const uint64_t began = now_ns(), deadline = began + uint64_t(config.start_timeout_s * 1e9);
  std::ostringstream line;
  line << "epoch " << epoch << ": rank " << world.rank << " of " << world.size << " on host " << world.host << ", "
       << world.launcher << ", step '" << meeting_step(world, config, env) << "'";
  auto meeting = find_meeting(world, config, env, epoch, deadline);
  if (!meeting) {
    line << ": all ranks on one host";
  } else {
    const uint64_t found = now_ns();
    const Terms terms{meeting->job, "tool", meeting->secret, epoch};
    auto store = open_store(world.rank, world.size, terms, meeting->places, std::move(meeting->listener));
    const auto notes = store->exchange("rank " + std::to_string(world.rank) + " on " + world.host, deadline);
    const auto seen = store->exchange(store->own_address().text(), deadline);
    const uint64_t met = now_ns();
    line << ": " << describe(*meeting, *store) << " in " << (found - began) / 1000 << " + " << (met - found) / 1000
         << " us:";
    for (size_t rank = 0; rank < notes.size() && rank < 8; ++rank)
      line << " " << notes[rank] << " (" << seen[rank] << ")";
  }
  std::cout << line.str() + "\n" << std::flush;
}

}  // namespace

// Arguments: epochs, and ranks that shall be a world of their own.
int main(int count, char** arguments) {
  try {
    const Environment env = [](const char* name) -> const char* { return std::getenv(name); };
    Config config = read_config(env);
    World world = find_world(env);
    std::vector<int> ranks;
    for (int i = 2; i < count; ++i) ranks.push_back(std::atoi(arguments[i]));
    if (!ranks.empty()) world = subset(world, ranks);
    // To try the way of several hosts on one.
    if (env("LIGHTCC_MEET_APART")) world.local_rank = 0, world.local_size = world.size > 1 ? 0 : 1;
    for (int epoch = 0; epoch < (count > 1 ? std::atoi(arguments[1]) : 1); ++epoch) meet(world, config, env, epoch);
  } catch (const Error& error) {
    std::cerr << std::string("error: ") + error.what() + "\n";
    return 1;
  }
}
