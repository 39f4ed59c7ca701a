#include "harp_plugin/nccl/devices.h"

#include <limits.h>
#include <net/if.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "harp_plugin/engine/control.h"
#include "harp_plugin/engine/fork.h"
#include "harp_plugin/nccl/log.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;

constexpr char kPeerTimeout[] = "HARP_PEER_TIMEOUT_MS", kPeerTimeoutMs[] = "10000";

struct OpenDevices {
  int users = 0;
  uint32_t forks = 0;
  Config config;
  std::vector<Device> devices;
};

// Never destroyed: at the end of a process that did not finalize, threads of the engines still run.
Guarded<OpenDevices>& state() {
  static auto* const only = new Guarded<OpenDevices>;
  return *only;
}

// A training step may keep a peer from its network for longer than HARP's own default.
const char* environment(const char* name) {
  const char* set = process_environment(name);
  return (set && *set) || std::strcmp(name, kPeerTimeout) != 0 ? set : kPeerTimeoutMs;
}

uint64_t guid_of(const std::string& name) {
  std::ifstream file("/sys/class/net/" + name + "/address");
  uint64_t mac = 0;
  for (std::string byte; std::getline(file, byte, ':');) mac = mac << 8 | std::strtoul(byte.c_str(), nullptr, 16);
  return mac ? mac : if_nametoindex(name.c_str());
}

std::string pci_path_of(const std::string& name) {
  char path[PATH_MAX];
  return realpath(("/sys/class/net/" + name + "/device").c_str(), path) ? path : "";
}

std::vector<Device> find_devices(const Config& config) {
  std::vector<Device> found;
  if (config.port != "udp") {
    found.emplace_back().interface.name = config.port;
    return found;
  }
  for (const Interface& interface : choose_interfaces(config.interface)) {
    const auto same = [&](const Device& device) { return device.interface.name == interface.name; };
    if (std::any_of(found.begin(), found.end(), same)) continue;  // its first address is enough
    found.push_back({interface, pci_path_of(interface.name), guid_of(interface.name)});
  }
  return found;
}

// After fork() the parent's engines do not run here, so its contexts are left as they are.
void leave_behind(OpenDevices& state) {
  new std::vector<Device>(std::move(state.devices));
  state = OpenDevices();
  state.forks = forks();
}

Device& at(OpenDevices& state, int index) {
  if (index < 0 || size_t(index) >= state.devices.size())
    throw Error(Code::invalid_argument, "there is no device " + std::to_string(index) + ", only " +
                                            std::to_string(state.devices.size()) + " in all");
  return state.devices[size_t(index)];
}

// On this device: what the environment says, but for the interface and the time-out.
SharedContext open_context(const Config& config, const Device& device) {
  harp_options options{};
  options.size = sizeof options;
  options.port = config.port.c_str();
  options.interface = device.interface.address.c_str();
  options.peer_timeout_ms = static_cast<uint32_t>(config.peer_timeout_ms);
  harp_context* context = nullptr;
  if (harp_open(&options, &context) != HARP_OK) throw Error(Code::internal, harp_error());
  return SharedContext(context, harp_close_context);
}

}  // namespace

void Devices::initialize() {
  state().with([](OpenDevices& state) {
    if (state.forks != forks()) leave_behind(state);
    if (state.users == 0) {
      state.config = read_config(nullptr, environment);
      auto devices = find_devices(state.config);
      devices[0].context = open_context(state.config, devices[0]);  // what does not work is said now
      state.devices = std::move(devices);
      for (const Device& device : state.devices)
        inform("device " + device.interface.name + " " + device.interface.address + ", port " + state.config.port);
    }
    ++state.users;
  });
}

void Devices::finalize() {
  std::vector<SharedContext> closed;  // after the lock is let go: closing says goodbye to peers
  state().with([&](OpenDevices& state) {
    if (state.forks != forks() || state.users == 0 || --state.users > 0) return;
    for (Device& device : state.devices) closed.push_back(std::move(device.context));
  });
}

int Devices::count() {
  return state().with([](OpenDevices& state) { return static_cast<int>(state.devices.size()); });
}

Device Devices::get(int index) {
  return state().with([&](OpenDevices& state) { return at(state, index); });
}

SharedContext Devices::open(int index) {
  return state().with([&](OpenDevices& state) {
    Device& device = at(state, index);
    if (!device.context) device.context = open_context(state.config, device);
    return device.context;
  });
}

Config Devices::config() {
  return state().with([](OpenDevices& state) { return state.config; });
}

}  // namespace harp
