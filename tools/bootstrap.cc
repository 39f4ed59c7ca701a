// Do the ranks of a launcher find each other? Starts no collectives: `mpirun -np 4 build/cmake/bootstrap [EPOCHS]`
// prints, for each rank, how they bootstrap and who came from where.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "base/clock.h"
#include "base/error.h"
#include "net/bootstrap/launchers.h"

using namespace lightcc;

namespace {

void bootstrap_and_print(const World& world, const Config& config, const Environment& env, int epoch) {
  const uint64_t began = now_ns(), deadline = began + uint64_t(config.start_timeout_s * 1e9);
  std::ostringstream line;
  line << "epoch " << epoch << ": rank " << world.rank << " of " << world.size << " on host " << world.host << ", "
       << world.launcher << ", method '" << rendezvous_method(world, config, env) << "'";
  auto rendezvous = find_rendezvous(world, config, env, epoch, deadline);
  if (!rendezvous) {
    line << ": all ranks on one host";
  } else {
    const uint64_t found = now_ns();
    const JobCredentials credentials{rendezvous->job, "tool", rendezvous->secret, epoch};
    auto exchange =
        open_exchange(world.rank, world.size, credentials, rendezvous->endpoints, std::move(rendezvous->listener));
    const auto notes = exchange->exchange("rank " + std::to_string(world.rank) + " on " + world.host, deadline);
    const auto seen = exchange->exchange(exchange->own_address().text(), deadline);
    const uint64_t met = now_ns();
    line << ": " << describe(*rendezvous, *exchange) << " in " << (found - began) / 1000 << " + "
         << (met - found) / 1000 << " us:";
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
    for (int epoch = 0; epoch < (count > 1 ? std::atoi(arguments[1]) : 1); ++epoch)
      bootstrap_and_print(world, config, env, epoch);
  } catch (const Error& error) {
    std::cerr << std::string("error: ") + error.what() + "\n";
    return 1;
  }
}
