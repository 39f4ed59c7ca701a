#include "harp_plugin/tools/bench/usage.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include "base/clock.h"
#include "base/error.h"

namespace harp::bench {
namespace {

uint64_t ns_of(const timeval& t) { return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_usec) * 1'000; }

}  // namespace

Usage usage_now() {
  Usage usage;
  rusage own;
  if (getrusage(RUSAGE_SELF, &own) != 0) throw lightcc::system_error("getrusage");
  usage.user_ns = ns_of(own.ru_utime);
  usage.system_ns = ns_of(own.ru_stime);
  std::ifstream stat("/proc/stat");
  std::string cpu;
  uint64_t user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, softirq = 0;
  if (!(stat >> cpu >> user >> nice >> system >> idle >> wait >> irq >> softirq))
    throw lightcc::Error(lightcc::Code::internal, "cannot read /proc/stat");
  const uint64_t tick_ns = 1'000'000'000 / uint64_t(sysconf(_SC_CLK_TCK));
  usage.machine_busy_ns = (user + nice + system + irq + softirq) * tick_ns;
  usage.machine_softirq_ns = softirq * tick_ns;
  usage.at_ns = lightcc::now_ns();
  return usage;
}

Usage operator-(const Usage& end, const Usage& begin) {
  return {end.at_ns - begin.at_ns, end.user_ns - begin.user_ns, end.system_ns - begin.system_ns,
          end.machine_busy_ns - begin.machine_busy_ns, end.machine_softirq_ns - begin.machine_softirq_ns};
}

lightcc::JsonObject json_of(const Usage& used, uint64_t bytes) {
  const double seconds = double(used.at_ns) * 1e-9, cpu_ns = double(used.user_ns + used.system_ns);
  lightcc::JsonObject object;
  object.add("seconds", seconds).add("user_s", double(used.user_ns) * 1e-9);
  object.add("system_s", double(used.system_ns) * 1e-9).add("cores", cpu_ns * 1e-9 / seconds);
  object.add("machine_busy_s", double(used.machine_busy_ns) * 1e-9);
  object.add("machine_softirq_s", double(used.machine_softirq_ns) * 1e-9);
  if (bytes == 0) return object;
  object.add("bytes", bytes).add("bytes_per_s", double(bytes) / seconds).add("ns_per_byte", cpu_ns / double(bytes));
  return object.add("machine_ns_per_byte", double(used.machine_busy_ns) / double(bytes));
}

}  // namespace harp::bench
