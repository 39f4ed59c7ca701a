// The network interfaces of this host, and which of them a user allows.
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "base/text.h"
#include "base/virtual_interfaces.h"
#include "net/address.h"

namespace lightcc {
namespace {

bool is_link_local(const Address& address) {
  if (address.family() == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr.s_addr) >> 16 == 0xa9fe;  // 169.254/16
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr);
}

int preference(const Interface& interface) {
  if (interface.name == "lo" || interface.address.is_loopback()) return 2;
  return is_virtual_interface(interface.name) ? 1 : 0;
}

std::vector<std::string_view> names_in(std::string_view list) {
  constexpr std::string_view kBetween = ", ";
  std::vector<std::string_view> names;
  for (size_t at = list.find_first_not_of(kBetween); at != list.npos;) {
    const size_t end = std::min(list.find_first_of(kBetween, at), list.size());
    names.push_back(list.substr(at, end - at));
    at = list.find_first_not_of(kBetween, end);
  }
  return names;
}

std::string text_of(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& interface : interfaces)
    text += (text.empty() ? "" : ", ") + interface.name + " " + interface.address.text();
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<Interface> by_preference(std::vector<Interface> interfaces) {
  std::stable_sort(interfaces.begin(), interfaces.end(),
                   [](const Interface& a, const Interface& b) { return preference(a) < preference(b); });
  return interfaces;
}

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw system_error("listing the network interfaces of this host");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Interface> found;
  for (; list; list = list->ifa_next) {
    constexpr unsigned kUp = IFF_UP | IFF_RUNNING;  // running: the cable is in
    if (!list->ifa_addr || (list->ifa_flags & kUp) != kUp) continue;
    const int family = list->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const Address address(list->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (!is_link_local(address)) found.push_back({list->ifa_name, address});
  }
  return by_preference(std::move(found));
}

std::vector<Interface> chosen(const std::vector<Interface>& interfaces, std::string_view list) {
  const std::string_view whole = list;
  if (list.empty()) return interfaces;
  const bool but = list.starts_with('^');
  if (but) list.remove_prefix(1);
  const bool exactly = list.starts_with('=');
  if (exactly) list.remove_prefix(1);
  const auto names = names_in(list);
  const auto matches = [&](const Interface& interface, std::string_view name) {
    return exactly ? interface.name == name : interface.name.starts_with(name);
  };

  std::vector<Interface> left;
  if (but) {
    for (const Interface& interface : interfaces)
      if (std::none_of(names.begin(), names.end(), [&](auto name) { return matches(interface, name); }))
        left.push_back(interface);
  } else {
    for (size_t i = 0; i < names.size(); ++i)
      for (const Interface& interface : interfaces) {
        const auto before = names.begin() + ptrdiff_t(i);
        const bool there = std::any_of(names.begin(), before, [&](auto name) { return matches(interface, name); });
        if (!there && matches(interface, names[i])) left.push_back(interface);
      }
  }
  if (left.empty())
    throw Error(
        Code::invalid_argument,
        "'" + shown(whole) + "' allows no network interface of this host; there are " + text_of(interfaces));
  return left;
}

std::vector<Address> link_addresses(std::vector<Interface> allowed, std::string_view list) {
  if (allowed.empty()) return {};
  if (list.empty() || list.starts_with('^')) return {allowed[0].address};
  const bool exactly = list.starts_with('=');
  std::vector<Interface> nics;
  for (const std::string_view name : names_in(exactly ? list.substr(1) : list)) {
    const auto is_it = [&](const Interface& interface) { return interface.name == name; };
    const bool is_there = std::any_of(allowed.begin(), allowed.end(), is_it);
    std::vector<Interface> named;
    for (const Interface& interface : allowed)
      if (is_there ? is_it(interface) : !exactly && interface.name.starts_with(name)) named.push_back(interface);
    std::stable_sort(named.begin(), named.end(), [](const Interface& a, const Interface& b) {
      return std::pair(a.name.size(), a.name) < std::pair(b.name.size(), b.name);  // eth2 before eth10
    });
    for (const Interface& interface : named) {
      const auto same = [&](const Interface& nic) { return nic.name == interface.name; };
      const bool fits = nics.empty() || (interface.address.family() == nics[0].address.family() &&
                                         interface.address.is_loopback() == nics[0].address.is_loopback());
      if (fits && std::none_of(nics.begin(), nics.end(), same)) nics.push_back(interface);
    }
  }
  std::vector<Address> addresses;
  for (const Interface& nic : nics) addresses.push_back(nic.address);
  return addresses;
}

}  // namespace lightcc
