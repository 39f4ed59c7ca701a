// harp-plugtest: whether a network plugin of NCCL's does what NCCL needs of it.
//
//   harp-plugtest PLUGIN.so [version=12] [seed=N] [only=NAME[,NAME]...]
//   harp-plugtest PLUGIN.so peer listen|connect [KEY=VALUE]...      (tools/plugtest/peer.h)
//
// Prints a line for each case, with all versions that the file has or the one that is named; ends with 1 if one failed.
// What the plugin itself reads of the environment holds, so a test of HARP sets HARP_PORT, HARP_IFNAME and
// HARP_CONNECT_TIMEOUT_MS.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl_abi/net_plugin.h"
#include "harp_plugin/tools/plugtest/cases.h"
#include "harp_plugin/tools/plugtest/peer.h"

namespace {

using harp::plugtest::Case;

bool chosen(const std::string& only, const char* name) {
  return only.empty() || ("," + only + ",").find(std::string(",") + name + ",") != std::string::npos;
}

// How many failed, or -1: none was chosen.
int run(const harp::plugtest::PlugtestSettings& settings, const std::string& only) {
  int ran = 0, failed = 0;
  printf("version %d\n", settings.version);
  for (const auto* cases : {&harp::plugtest::message_cases(), &harp::plugtest::connection_cases(),
                            &harp::plugtest::pattern_cases()}) {
    for (const Case& one : *cases) {
      if (!chosen(only, one.name)) continue;
      ++ran;
      try {
        one.run(settings);
        printf("ok      %s\n", one.name);
      } catch (const std::exception& error) {
        ++failed;
        printf("FAILED  %s: %s\n", one.name, error.what());
      }
      fflush(stdout);
    }
  }
  return ran ? failed : -1;
}

int usage() {
  fprintf(stderr, "usage: harp-plugtest PLUGIN.so [version=N] [seed=N] [only=NAME,...] | peer listen|connect ...\n");
  return 2;
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) return usage();
  if (count > 2 && std::strcmp(words[2], "peer") == 0)
    return harp::plugtest::run_peer(words[1], {words + 3, words + count});
  harp::plugtest::PlugtestSettings settings{.path = words[1]};
  std::string only;
  for (int i = 2; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = std::min(word.find('='), word.size());
    const std::string key = word.substr(0, equals), value = word.substr(std::min(equals + 1, word.size()));
    if (key == "version") settings.version = std::atoi(value.c_str());
    else if (key == "seed") settings.seed = std::strtoull(value.c_str(), nullptr, 10);
    else if (key == "only") only = value;
    else return usage();
  }
  printf("seed %llu\n", static_cast<unsigned long long>(settings.seed));
  auto versions = std::vector<int>{settings.version};
  try {
    if (!settings.version) versions = lightcc::NetPlugin::versions(settings.path);
    if (versions.empty()) throw std::runtime_error(settings.path + " has no version from 6 to 12");
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  int all_failed = 0;
  for (int version : versions) {
    settings.version = version;
    const int failed = run(settings, only);
    if (failed < 0) return usage();
    all_failed += failed;
  }
  return all_failed ? 1 : 0;
}
