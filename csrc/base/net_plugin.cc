#include "base/net_plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <climits>
#include <type_traits>

#include "base/error.h"

namespace lightcc {
namespace {

constexpr int kVersions[] = {12, 11, 10, 9, 8};

std::string symbol_of(int version) { return "ncclNetPlugin_v" + std::to_string(version); }

template <class Net>
constexpr bool has_context = std::is_same_v<Net, nccl::NetV11*> || std::is_same_v<Net, nccl::NetV12*>;

void* load_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(Code::invalid_argument, std::string("loading a plugin: ") + dlerror());
  return library;
}

}  // namespace

std::vector<int> NetPlugin::versions(const std::string& path) {
  void* library = load_library(path);
  std::vector<int> found;
  for (int version : kVersions) {
    if (dlsym(library, symbol_of(version).c_str())) found.push_back(version);
  }
  dlclose(library);
  return found;
}

// Calls use(net) with what the plugin exports, as the type that its version has.
template <class Use>
auto NetPlugin::with(Use&& use) const {
  switch (version_) {
    case 12: return use(static_cast<nccl::NetV12*>(symbol_));
    case 11: return use(static_cast<nccl::NetV11*>(symbol_));
    case 10: return use(static_cast<nccl::NetV10*>(symbol_));
    case 9: return use(static_cast<nccl::NetV9*>(symbol_));
    default: return use(static_cast<nccl::NetV8*>(symbol_));
  }
}

NetPlugin::NetPlugin(const std::string& path, int version, nccl::Logger log) : library_(load_library(path)), log_(log) {
  for (int candidate : kVersions) {
    if (version != 0 && version != candidate) continue;
    symbol_ = dlsym(library_, symbol_of(candidate).c_str());
    version_ = candidate;
    if (symbol_) break;
  }
  if (symbol_) return;
  dlclose(library_);
  const std::string wanted = version ? symbol_of(version) : symbol_of(8) + " to _v12";
  throw Error(Code::invalid_argument, "loading a plugin: " + path + " has no " + wanted);
}

NetPlugin::~NetPlugin() { dlclose(library_); }

const char* NetPlugin::name() const {
  return with([](auto* net) { return net->name; });
}

// ---- what each version has in its own way

nccl::Result NetPlugin::init(void** context, uint64_t communicator) {
  nccl::CommunicatorConfig config{nccl::kUndefined};
  return with([&](auto* net) {
    if constexpr (has_context<decltype(net)>) {
      return net->init(context, communicator, &config, log_, nullptr);
    } else {
      *context = nullptr;
      if (initialized_) return nccl::kSuccess;
      nccl::Result result;
      if constexpr (std::is_same_v<decltype(net), nccl::NetV10*>)
        result = net->init(log_, nullptr);
      else
        result = net->init(log_);
      initialized_ = result == nccl::kSuccess;
      return result;
    }
  });
}

nccl::Result NetPlugin::finalize(void* context) {
  return with([&](auto* net) {
    if constexpr (has_context<decltype(net)>) {
      return net->finalize(context);
    } else {
      return nccl::kSuccess;
    }
  });
}

nccl::Result NetPlugin::properties(int device, nccl::PropertiesV12* properties) {
  *properties = {};
  properties->max_multi_request = 1;
  properties->rail = properties->plane = nccl::kUndefined;
  properties->max_p2p_bytes = properties->max_collective_bytes = INT_MAX;
  const auto take_common = [&](const auto& old) {
    properties->name = old.name;
    properties->pci_path = old.pci_path;
    properties->guid = old.guid;
    properties->pointer_support = old.pointer_support;
    properties->registration_is_global = old.registration_is_global;
    properties->speed = old.speed;
    properties->port = old.port;
    properties->latency = old.latency;
    properties->max_communicators = old.max_communicators;
    properties->max_receives = old.max_receives;
    properties->device_type = old.device_type;
    properties->device_version = old.device_version;
  };
  const auto take = [&](const nccl::PropertiesV10& old) {
    take_common(old);
    properties->force_flush = old.force_flush;
    properties->virtual_device.count = old.virtual_device.count;
    std::copy(std::begin(old.virtual_device.devices), std::end(old.virtual_device.devices),
              properties->virtual_device.devices);
    properties->max_p2p_bytes = old.max_p2p_bytes;
    properties->max_collective_bytes = old.max_collective_bytes;
  };
  return with([&](auto* net) {
    if constexpr (std::is_same_v<decltype(net), nccl::NetV12*>) {
      return net->get_properties(device, properties);
    } else if constexpr (std::is_same_v<decltype(net), nccl::NetV11*>) {
      nccl::PropertiesV11 old{};
      old.max_multi_request = 1;
      const nccl::Result result = net->get_properties(device, &old);
      take(old.v10);
      properties->max_multi_request = old.max_multi_request;
      return result;
    } else if constexpr (std::is_same_v<decltype(net), nccl::NetV8*>) {
      nccl::PropertiesV8 old{};
      const nccl::Result result = net->get_properties(device, &old);
      return take_common(old), result;
    } else {
      nccl::PropertiesV10 old{};
      const nccl::Result result = net->get_properties(device, &old);
      return take(old), result;
    }
  });
}

nccl::Result NetPlugin::listen(void* context, int device, void* handle, void** listener) {
  return with([&](auto* net) {
    if constexpr (has_context<decltype(net)>)
      return net->listen(context, device, handle, listener);
    else
      return net->listen(device, handle, listener);
  });
}

nccl::Result NetPlugin::connect(void* context, int device, void* handle, void** communicator) {
  nccl::CommunicatorConfig config{nccl::kUndefined};
  void* on_device = nullptr;  // NCCL always says where to put it
  return with([&](auto* net) {
    if constexpr (has_context<decltype(net)>)
      return net->connect(context, device, handle, communicator, &on_device);
    else if constexpr (std::is_same_v<decltype(net), nccl::NetV10*>)
      return net->connect(device, &config, handle, communicator, &on_device);
    else
      return net->connect(device, handle, communicator, &on_device);
  });
}

nccl::Result NetPlugin::isend(void* communicator, void* data, size_t bytes, int tag, void* memory, void** request) {
  return with([&](auto* net) {
    if constexpr (std::is_same_v<decltype(net->path), nccl::DataPath>)
      return net->path.isend(communicator, data, bytes, tag, memory, nullptr, request);
    else if constexpr (std::is_same_v<decltype(net), nccl::NetV9*>)
      return net->path.isend(communicator, data, bytes, tag, memory, request);
    else
      return net->path.isend(communicator, data, static_cast<int>(bytes), tag, memory, request);
  });
}

nccl::Result NetPlugin::irecv(void* communicator, int n, void** data, size_t* bytes, int* tags, void** memory,
                              void** request) {
  return with([&](auto* net) {
    if constexpr (std::is_same_v<decltype(net->path), nccl::DataPath>) {
      std::array<void*, nccl::kMostReceives> phandles{};
      return net->path.irecv(communicator, n, data, bytes, tags, memory, phandles.data(), request);
    } else if constexpr (std::is_same_v<decltype(net), nccl::NetV9*>) {
      return net->path.irecv(communicator, n, data, bytes, tags, memory, request);
    } else {
      std::array<int, nccl::kMostReceives> sizes{};
      std::transform(bytes, bytes + n, sizes.begin(), [](size_t size) { return static_cast<int>(size); });
      return net->path.irecv(communicator, n, data, sizes.data(), tags, memory, request);
    }
  });
}

// ---- what all have alike

nccl::Result NetPlugin::devices(int* count) {
  return with([&](auto* net) { return net->devices(count); });
}

nccl::Result NetPlugin::accept(void* listener, void** communicator) {
  void* on_device = nullptr;
  return with([&](auto* net) { return net->accept(listener, communicator, &on_device); });
}

nccl::Result NetPlugin::reg_mr(void* communicator, void* data, size_t bytes, int pointer, void** memory) {
  return with([&](auto* net) { return net->path.reg_mr(communicator, data, bytes, pointer, memory); });
}

nccl::Result NetPlugin::dereg_mr(void* communicator, void* memory) {
  return with([&](auto* net) { return net->path.dereg_mr(communicator, memory); });
}

nccl::Result NetPlugin::test(void* request, int* done, int* bytes) {
  return with([&](auto* net) { return net->path.test(request, done, bytes); });
}

nccl::Result NetPlugin::close_send(void* communicator) {
  return with([&](auto* net) { return net->path.close_send(communicator); });
}

nccl::Result NetPlugin::close_recv(void* communicator) {
  return with([&](auto* net) { return net->path.close_recv(communicator); });
}

nccl::Result NetPlugin::close_listen(void* listener) {
  return with([&](auto* net) { return net->path.close_listen(listener); });
}

}  // namespace lightcc
