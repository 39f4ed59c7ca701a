#include "harp_plugin/port/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstring>
#include <fstream>
#include <memory>

#include "base/fd.h"
#include "base/virtual_interfaces.h"

namespace harp {

namespace {

constexpr std::string_view kLoopback = "=lo";

uint32_t mtu_of(const std::string& name) {
  const lightcc::Fd any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  if (!any || ioctl(any.get(), SIOCGIFMTU, &request) != 0)
    throw lightcc::system_error("HARP: asking for the MTU of " + name);
  return uint32_t(request.ifr_mtu);
}

uint64_t speed_of(const std::string& name) {
  int64_t mbit = 0;
  std::ifstream("/sys/class/net/" + name + "/speed") >> mbit;
  return mbit > 0 ? uint64_t(mbit) : 0;
}

bool is_address(const std::string& text) {
  in_addr ignored;
  return inet_pton(AF_INET, text.c_str(), &ignored) == 1;
}

}  // namespace

std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw lightcc::system_error("HARP: listing the interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(first, freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* i = first; i; i = i->ifa_next) {
    if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP)) continue;
    sockaddr_in ip;
    std::memcpy(&ip, i->ifa_addr, sizeof ip);
    char text[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &ip.sin_addr, text, sizeof text);
    const std::string name(i->ifa_name, std::strcspn(i->ifa_name, ":"));  // without a label: "eth0:1"
    found.push_back({name, text, mtu_of(name), speed_of(name)});
  }
  return found;
}

bool matches(std::string_view pattern, std::string_view name) {
  const bool except = pattern.starts_with('^');
  if (except) pattern.remove_prefix(1);
  const bool whole = pattern.starts_with('=');
  if (whole) pattern.remove_prefix(1);
  while (!pattern.empty()) {
    const std::string_view one = pattern.substr(0, pattern.find(','));
    if (!one.empty() && (whole ? name == one : name.starts_with(one))) return !except;
    pattern.remove_prefix(std::min(pattern.size(), one.size() + 1));
  }
  return except;
}

std::vector<Interface> choose_interfaces(const std::string& wanted) {
  const std::vector<Interface> all = interfaces();
  std::vector<Interface> chosen;
  std::string there;
  for (const Interface& interface : all) {
    there += (there.empty() ? "" : ", ") + interface.name + " (" + interface.address + ")";
    if (wanted.empty() ? !matches(kLoopback, interface.name) && !lightcc::is_virtual_interface(interface.name)
                       : interface.address == wanted || (!is_address(wanted) && matches(wanted, interface.name)))
      chosen.push_back(interface);
  }
  if (!chosen.empty()) return chosen;
  if (wanted.empty() && !all.empty()) return {all[0]};
  if (is_address(wanted) && wanted.starts_with("127.")) return {{"lo", wanted, mtu_of("lo"), 0}};
  throw lightcc::Error(lightcc::Code::invalid_argument,
                       "HARP: no interface that is up matches '" + wanted + "'; there is " +
                           (there.empty() ? "none with an IPv4 address" : there) + "; see HARP_IFNAME");
}

}  // namespace harp
