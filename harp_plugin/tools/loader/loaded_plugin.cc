#include "harp_plugin/tools/loader/loaded_plugin.h"

#include <dlfcn.h>

#include "base/error.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;

constexpr int kVersions[] = {12, 11, 10};

std::string symbol_of(int version) { return "ncclNetPlugin_v" + std::to_string(version); }

void* open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw Error(Code::invalid_argument, std::string("loading a plugin: ") + dlerror());
  return library;
}

}  // namespace

std::vector<int> LoadedPlugin::versions(const std::string& path) {
  void* library = open(path);
  std::vector<int> found;
  for (int version : kVersions) {
    if (dlsym(library, symbol_of(version).c_str())) found.push_back(version);
  }
  dlclose(library);
  return found;
}

template <class Use>
auto LoadedPlugin::with(Use&& use) const {
  if (version_ == 12) return use(static_cast<nccl::NetV12*>(symbol_));
  if (version_ == 11) return use(static_cast<nccl::NetV11*>(symbol_));
  return use(static_cast<nccl::NetV10*>(symbol_));
}

LoadedPlugin::LoadedPlugin(const std::string& path, int version, nccl::Logger log) : library_(open(path)), log_(log) {
  for (int candidate : kVersions) {
    if (version != 0 && version != candidate) continue;
    symbol_ = dlsym(library_, symbol_of(candidate).c_str());
    version_ = candidate;
    if (symbol_) break;
  }
  if (!symbol_) {
    dlclose(library_);
    throw Error(Code::invalid_argument, "loading a plugin: " + path + " has no " + symbol_of(version ? version : 10));
  }
  path_ = with([](auto* net) { return &net->path; });
}

LoadedPlugin::~LoadedPlugin() { dlclose(library_); }

const char* LoadedPlugin::name() const {
  return with([](auto* net) { return net->name; });
}

nccl::Result LoadedPlugin::init(void** context, uint64_t communicator) {
  nccl::CommunicatorConfig config{nccl::kUndefined};
  if (version_ == 12) return static_cast<nccl::NetV12*>(symbol_)->init(context, communicator, &config, log_, nullptr);
  if (version_ == 11) return static_cast<nccl::NetV11*>(symbol_)->init(context, communicator, &config, log_, nullptr);
  *context = nullptr;
  if (initialized_++ > 0) return nccl::kSuccess;
  return static_cast<nccl::NetV10*>(symbol_)->init(log_, nullptr);
}

nccl::Result LoadedPlugin::finalize(void* context) {
  if (version_ == 12) return static_cast<nccl::NetV12*>(symbol_)->finalize(context);
  if (version_ == 11) return static_cast<nccl::NetV11*>(symbol_)->finalize(context);
  --initialized_;
  return nccl::kSuccess;
}

nccl::Result LoadedPlugin::devices(int* count) {
  return with([&](auto* net) { return net->devices(count); });
}

nccl::Result LoadedPlugin::properties(int device, nccl::PropertiesV12* properties) {
  if (version_ == 12) return static_cast<nccl::NetV12*>(symbol_)->get_properties(device, properties);
  nccl::PropertiesV11 old{};
  old.max_multi_request = 1;
  const nccl::Result result = version_ == 11
                                  ? static_cast<nccl::NetV11*>(symbol_)->get_properties(device, &old)
                                  : static_cast<nccl::NetV10*>(symbol_)->get_properties(device, &old.v10);
  const nccl::PropertiesV10& v10 = old.v10;
  *properties = {v10.name,          v10.pci_path,
                 v10.guid,          v10.pointer_support,
                 v10.registration_is_global, v10.force_flush,
                 v10.speed,         v10.port,
                 v10.latency,       v10.max_communicators,
                 v10.max_receives,  v10.device_type,
                 v10.device_version, {v10.virtual_device.count, {}},
                 v10.max_p2p_bytes, v10.max_collective_bytes,
                 old.max_multi_request, nccl::kUndefined,
                 nccl::kUndefined};
  for (int i = 0; i < v10.virtual_device.count && i < 4; ++i)
    properties->virtual_device.devices[i] = v10.virtual_device.devices[i];
  return result;
}

nccl::Result LoadedPlugin::listen(void* context, int device, void* handle, void** listener) {
  if (version_ == 12) return static_cast<nccl::NetV12*>(symbol_)->listen(context, device, handle, listener);
  if (version_ == 11) return static_cast<nccl::NetV11*>(symbol_)->listen(context, device, handle, listener);
  return static_cast<nccl::NetV10*>(symbol_)->listen(device, handle, listener);
}

nccl::Result LoadedPlugin::connect(void* context, int device, void* handle, void** communicator) {
  if (version_ == 12)
    return static_cast<nccl::NetV12*>(symbol_)->connect(context, device, handle, communicator, nullptr);
  if (version_ == 11)
    return static_cast<nccl::NetV11*>(symbol_)->connect(context, device, handle, communicator, nullptr);
  nccl::CommunicatorConfig config{nccl::kUndefined};
  return static_cast<nccl::NetV10*>(symbol_)->connect(device, &config, handle, communicator, nullptr);
}

nccl::Result LoadedPlugin::accept(void* listener, void** communicator) {
  return with([&](auto* net) { return net->accept(listener, communicator, nullptr); });
}

}  // namespace harp
