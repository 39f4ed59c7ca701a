// What the connections of this user's running processes have counted, from their stats pages; asks nobody.
//
//   harp-stat [--json] [PID]    a line a connection; as JSON, all counters
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/json.h"
#include "harp_plugin/api/stats_page.h"

namespace {

using harp::StatsOfConnection;

uint64_t counter(const StatsOfConnection& connection, const char* name) {
  for (size_t i = 0; i < harp::kCounters; ++i)
    if (std::strcmp(harp::kCounterNames[i], name) == 0) return connection.counters[i];
  std::fprintf(stderr, "harp-stat: there is no counter %s\n", name);
  std::exit(1);
}

uint64_t sum(const StatsOfConnection& connection, std::initializer_list<const char*> names) {
  return std::accumulate(names.begin(), names.end(), uint64_t(0),
                         [&](uint64_t total, const char* name) { return total + counter(connection, name); });
}

std::string json_of(const StatsOfConnection& connection) {
  lightcc::JsonObject object;
  object.add("pid", connection.pid).add("engine", connection.engine).add("peer", connection.peer);
  for (size_t i = 0; i < harp::kCounters; ++i) object.add(harp::kCounterNames[i], connection.counters[i]);
  return object.text();
}

void print_table(const std::vector<StatsOfConnection>& all) {
  std::printf("%8s %6s %-32s %12s %12s %9s %8s %8s %7s %8s\n", "PID", "ENGINE", "PEER", "SENT", "RECEIVED", "RESENT",
              "TIMEOUTS", "REFUSED", "WINDOW", "RTT/us");
  for (const StatsOfConnection& one : all)
    std::printf("%8llu %6llu %-32s %12llu %12llu %9llu %8llu %8llu %7llu %8.1f\n", (unsigned long long)one.pid,
                (unsigned long long)one.engine, one.peer.c_str(), (unsigned long long)counter(one, "bytes_sent"),
                (unsigned long long)counter(one, "bytes_received"), (unsigned long long)counter(one, "retransmitted"),
                (unsigned long long)counter(one, "timeouts"),
                (unsigned long long)sum(one, {"malformed", "unauthenticated", "out_of_window", "out_of_buffer"}),
                (unsigned long long)counter(one, "window_packets"), double(counter(one, "srtt_ns")) * 1e-3);
}

int usage(std::FILE* to, int code) {
  std::fprintf(to, "usage: harp-stat [--json] [PID]\n"
                   "What the connections of this user's running processes have counted; --json: all counters.\n");
  return code;
}

}  // namespace

int main(int count, char** arguments) {
  bool json = false;
  unsigned long long pid = 0;
  for (int i = 1; i < count; ++i) {
    char* end = nullptr;
    if (std::strcmp(arguments[i], "--help") == 0)
      return usage(stdout, 0);
    else if (std::strcmp(arguments[i], "--json") == 0)
      json = true;
    else if (pid = std::strtoull(arguments[i], &end, 10); pid == 0 || *end != '\0')
      return usage(stderr, 2);
  }
  std::vector<StatsOfConnection> all;
  bool found = false;
  for (const std::string& path : harp::stats_pages()) {
    const auto page = harp::read_stats(path);
    const std::string file = path.substr(path.rfind('/') + 1);  // PID-N
    const bool wanted = pid == 0 || std::strtoull(file.c_str(), nullptr, 10) == pid;
    if (!page || !wanted) continue;
    found = true;
    all.insert(all.end(), page->begin(), page->end());
  }
  if (pid != 0 && !found) {
    std::fprintf(stderr, "harp-stat: process %llu shows no counters: ended, another user's, or HARP_STATS=0\n", pid);
    return 1;
  }
  if (!json) {
    print_table(all);
    return 0;
  }
  std::string list;
  for (const StatsOfConnection& one : all) list += (list.empty() ? "" : ",\n ") + json_of(one);
  std::printf("[%s]\n", list.c_str());
  return 0;
}
