#include "nccl_abi/net_plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <type_traits>

#include "base/error.h"

namespace lightcc {
namespace {

constexpr int kVersions[] = {12, 11, 10, 9, 8, 7, 6};

std::string symbol_of(int version) { return "ncclNetPlugin_v" + std::to_string(version); }

template <class Net>
constexpr bool has_context = std::is_same_v<Net, nccl::NetV11*> || std::is_same_v<Net, nccl::NetV12*>;
template <class Net>
constexpr bool has_int_registrations = std::is_same_v<Net, nccl::NetV6*> || std::is_same_v<Net, nccl::NetV7*>;
template <class Net>
constexpr bool has_int_messages = has_int_registrations<Net> || std::is_same_v<Net, nccl::NetV8*>;

template <class Old>
void take(const Old& old, nccl::PropertiesV12& properties) {
  properties.name = old.name;
  properties.pci_path = old.pci_path;
  properties.guid = old.guid;
  properties.pointer_support = old.pointer_support;
  properties.speed = old.speed;
  properties.port = old.port;
  properties.latency = old.latency;
  properties.max_communicators = old.max_communicators;
  properties.max_receives = old.max_receives;
  if constexpr (requires { old.device_type; }) {
    properties.device_type = old.device_type;
    properties.device_version = old.device_version;
  }
  if constexpr (requires { old.registration_is_global; })
    properties.registration_is_global = old.registration_is_global;
  if constexpr (requires { old.force_flush; }) {
    properties.force_flush = old.force_flush;
    properties.virtual_device.count = old.virtual_device.count;
    std::copy(std::begin(old.virtual_device.devices), std::end(old.virtual_device.devices),
              properties.virtual_device.devices);
    properties.max_p2p_bytes = old.max_p2p_bytes;
    properties.max_collective_bytes = old.max_collective_bytes;
  }
}

void take(const nccl::PropertiesV11& old, nccl::PropertiesV12& properties) {
  take(old.v10, properties);
  if (old.max_multi_request > 0) properties.max_multi_request = old.max_multi_request;
}

template <class Old>
nccl::Result ask(nccl::Result (*plugin)(int device, Old*), int device, nccl::PropertiesV12& properties) {
  Old old{};
  const nccl::Result result = plugin(device, &old);
  take(old, properties);
  return result;
}

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
    case 8: return use(static_cast<nccl::NetV8*>(symbol_));
    case 7: return use(static_cast<nccl::NetV7*>(symbol_));
    default: return use(static_cast<nccl::NetV6*>(symbol_));
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
  const std::string wanted = version ? symbol_of(version) : symbol_of(6) + " to _v12";
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
      if (initialized_in_ == getpid()) return nccl::kSuccess;
      nccl::Result result;
      if constexpr (std::is_same_v<decltype(net), nccl::NetV10*>)
        result = net->init(log_, nullptr);
      else
        result = net->init(log_);
      if (result == nccl::kSuccess) initialized_in_ = getpid();
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
  properties->virtual_device.count = 1;
  properties->virtual_device.devices[0] = device;
  return with([&](auto* net) {
    if constexpr (std::is_same_v<decltype(net), nccl::NetV12*>)
      return net->get_properties(device, properties);
    else
      return ask(net->get_properties, device, *properties);
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
    else if constexpr (std::is_same_v<decltype(net), nccl::NetV6*>)
      return net->connect(device, handle, communicator);
    else
      return net->connect(device, handle, communicator, &on_device);
  });
}

nccl::Result NetPlugin::accept(void* listener, void** communicator) {
  void* on_device = nullptr;
  return with([&](auto* net) {
    if constexpr (std::is_same_v<decltype(net), nccl::NetV6*>)
      return net->accept(listener, communicator);
    else
      return net->accept(listener, communicator, &on_device);
  });
}

nccl::Result NetPlugin::reg_mr(void* communicator, void* data, size_t bytes, int pointer, void** memory) {
  return with([&](auto* net) {
    if constexpr (has_int_registrations<decltype(net)>) {
      if (bytes > INT_MAX) return refuse("memory to register", bytes);
      return net->path.reg_mr(communicator, data, static_cast<int>(bytes), pointer, memory);
    } else {
      return net->path.reg_mr(communicator, data, bytes, pointer, memory);
    }
  });
}

nccl::Result NetPlugin::isend(void* communicator, void* data, size_t bytes, int tag, void* memory, void** request) {
  return with([&](auto* net) {
    if constexpr (has_int_messages<decltype(net)>) {
      if (bytes > INT_MAX) return refuse("a message", bytes);
      return net->path.isend(communicator, data, static_cast<int>(bytes), tag, memory, request);
    } else if constexpr (std::is_same_v<decltype(net), nccl::NetV9*>) {
      return net->path.isend(communicator, data, bytes, tag, memory, request);
    } else {
      return net->path.isend(communicator, data, bytes, tag, memory, nullptr, request);
    }
  });
}

nccl::Result NetPlugin::irecv(void* communicator, int n, void** data, size_t* bytes, int* tags, void** memory,
                              void** request) {
  return with([&](auto* net) {
    if constexpr (has_int_messages<decltype(net)>) {
      std::array<int, nccl::kMostReceives> sizes{};
      for (int i = 0; i < n; ++i) {
        if (bytes[i] > INT_MAX) return refuse("a buffer to receive into", bytes[i]);
        sizes[size_t(i)] = static_cast<int>(bytes[i]);
      }
      return net->path.irecv(communicator, n, data, sizes.data(), tags, memory, request);
    } else if constexpr (std::is_same_v<decltype(net), nccl::NetV9*>) {
      return net->path.irecv(communicator, n, data, bytes, tags, memory, request);
    } else {
      std::array<void*, nccl::kMostReceives> phandles{};
      return net->path.irecv(communicator, n, data, bytes, tags, memory, phandles.data(), request);
    }
  });
}

// Sizes are int in versions up to 8, of registered memory up to 7.
nccl::Result NetPlugin::refuse(const char* what, size_t bytes) const {
  const std::string text = std::string(what) + " has " + std::to_string(bytes) + " bytes: in version " +
                           std::to_string(version_) + " of the interface it has at most " + std::to_string(INT_MAX);
  log_(nccl::kLogWarn, nccl::kLogNet, __FILE__, __LINE__, "%s", text.c_str());
  return nccl::kInvalidArgument;
}

// ---- what all have alike

nccl::Result NetPlugin::devices(int* count) {
  return with([&](auto* net) { return net->devices(count); });
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
