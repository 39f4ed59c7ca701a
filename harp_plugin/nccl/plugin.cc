// The callbacks that NCCL calls. Each is one guard(): nothing is thrown across it, and what went wrong is in NCCL's
// log.
#include <array>
#include <climits>
#include <cstring>
#include <set>

#include "base/error.h"
#include "harp_plugin/engine/control.h"
#include "harp_plugin/nccl/communicator.h"
#include "harp_plugin/nccl/devices.h"
#include "harp_plugin/nccl/log.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using nccl::Result;

constexpr int kSpeedIfUnknown = 10'000;  // Mbit/s, as NCCL assumes
constexpr float kLatencyUs = 10;         // half a round trip of 4 KiB (docs/harp.md)
constexpr int kMostCommunicators = 65536;
constexpr size_t kMostBytes = size_t(1) << 30;
// In a handle: whether the listener groups receives (harp.h leaves this byte to us).
constexpr size_t kGroupedByte = HARP_HANDLE_BYTES - 1;
static_assert(size_t(HARP_HANDLE_BYTES) == nccl::kHandleBytes);

struct Listener {
  SharedContext context;
  harp_listener* listener;
  bool grouped;
  ~Listener() { harp_stop_listening(listener); }
};

template <class F>
Result guard(const char* attempted, F&& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    warn(std::string(attempted) + ": " + error.what());
    return error.code() == Code::invalid_argument ? nccl::kInvalidArgument : nccl::kSystemError;
  } catch (const std::exception& error) {
    warn(std::string(attempted) + ": " + error.what());
    return nccl::kInternalError;
  }
}

// The status of a function of harp.h; the words are harp_error()'s.
Result checked(const char* attempted, int status) {
  if (status != HARP_OK) warn(std::string(attempted) + ": " + harp_error());
  return result_of(status);
}

void require(bool holds, const char* what) {
  if (!holds) throw Error(Code::invalid_argument, what);
}

// NCCL keeps pointers to names for as long as it likes.
char* kept(const std::string& text) {
  static auto* const all = new Guarded<std::set<std::string>>;
  return all->with([&](auto& texts) { return const_cast<char*>(texts.insert(text).first->c_str()); });
}

std::string describe(harp_connection* connection) {
  char text[256];
  harp_describe(connection, text, sizeof text);
  return text;
}

Result init(nccl::Logger log) {
  return guard("starting", [&] {
    log_to(log);
    Devices::initialize();
    return nccl::kSuccess;
  });
}

Result init_v10(nccl::Logger log, nccl::ProfilerCallback) { return init(log); }

Result init_context(void** context, uint64_t, nccl::CommunicatorConfig*, nccl::Logger log, nccl::ProfilerCallback) {
  static char any;
  *context = &any;  // everything belongs to the process
  return init(log);
}

Result finalize(void*) {
  return guard("finalizing", [] {
    Devices::finalize();
    return nccl::kSuccess;
  });
}

Result devices(int* count) {
  return guard("counting devices", [&] {
    *count = Devices::count();
    return nccl::kSuccess;
  });
}

// Those of versions 6 to 10, and what they have of later ones.
template <class Properties>
Result common_properties(int index, Properties* properties) {
  return guard("getting properties", [&] {
    const Device device = Devices::get(index);
    *properties = {};
    properties->name = kept(device.interface.name);
    properties->pci_path = device.pci_path.empty() ? nullptr : kept(device.pci_path);
    properties->guid = device.guid;
    properties->pointer_support = nccl::kHostPointers;
    properties->speed = static_cast<int>(std::min<uint64_t>(device.interface.speed_mbit, INT_MAX));
    if (properties->speed == 0) properties->speed = kSpeedIfUnknown;
    properties->latency = kLatencyUs;
    properties->max_communicators = kMostCommunicators;
    properties->max_receives = Devices::config().most_receives;
    if constexpr (requires { properties->device_type; }) properties->device_type = nccl::kDeviceHost;
    if constexpr (requires { properties->virtual_device; }) {
      properties->virtual_device.count = 1;
      properties->virtual_device.devices[0] = index;
      properties->max_p2p_bytes = properties->max_collective_bytes = kMostBytes;
    }
    return nccl::kSuccess;
  });
}

Result properties_v11(int index, nccl::PropertiesV11* properties) {
  properties->max_multi_request = 1;
  return common_properties(index, &properties->v10);
}

Result properties_v12(int index, nccl::PropertiesV12* properties) {
  const Result result = common_properties(index, properties);
  properties->max_multi_request = 1;
  properties->rail = properties->plane = nccl::kUndefined;
  return result;
}

Result listen(int device, void* handle, void** made) {
  return guard("listening", [&] {
    *made = nullptr;
    auto listener = std::make_unique<Listener>(Devices::open(device), nullptr, Devices::config().most_receives > 1);
    harp_handle own;
    const Result result = checked("listening", harp_listen(listener->context.get(), &own, &listener->listener));
    if (result != nccl::kSuccess) return result;
    own.bytes[kGroupedByte] = listener->grouped;
    std::memcpy(handle, &own, sizeof own);
    *made = listener.release();
    return nccl::kSuccess;
  });
}

Result listen_in(void*, int device, void* handle, void** made) { return listen(device, handle, made); }

// The communicator is there at once: sends wait until the peer has answered, or fail.
Result connect(int device, void* handle, void** made) {
  return guard("connecting", [&] {
    *made = nullptr;
    SharedContext context = Devices::open(device);
    harp_handle own;
    std::memcpy(&own, handle, sizeof own);
    harp_connection* connection = nullptr;
    const Result result = checked("connecting", harp_connect(context.get(), &own, HARP_MESSAGE, &connection));
    if (result != nccl::kSuccess) return result;
    inform("sending to " + describe(connection));
    *made = new Communicator(std::move(context), connection, own.bytes[kGroupedByte] != 0);
    return nccl::kSuccess;
  });
}

Result connect_v9(int device, void* handle, void** made, void**) { return connect(device, handle, made); }
Result connect_v10(int device, nccl::CommunicatorConfig*, void* handle, void** made, void**) {
  return connect(device, handle, made);
}
Result connect_in(void*, int device, void* handle, void** made, void**) { return connect(device, handle, made); }

Result accept_v6(void* from, void** made) {
  return guard("accepting", [&] {
    *made = nullptr;
    const auto* listener = static_cast<Listener*>(from);
    require(listener, "the listener is NULL");
    harp_connection* connection = nullptr;
    const int status = harp_accept(listener->listener, &connection);
    if (status == HARP_PENDING) return nccl::kSuccess;
    const Result result = checked("accepting", status);
    if (result != nccl::kSuccess) return result;
    inform("receiving from " + describe(connection));
    *made = new Communicator(listener->context, connection, listener->grouped);
    return nccl::kSuccess;
  });
}

Result accept(void* from, void** made, void**) { return accept_v6(from, made); }

Result reg_mr(void*, void* data, size_t bytes, int pointer, void** memory) {
  return guard("registering memory", [&] {
    *memory = nullptr;
    require(pointer == nccl::kHostPointers, "only memory of the host can be registered");
    *memory = new Memory{static_cast<uint8_t*>(data), bytes};
    return nccl::kSuccess;
  });
}

Result dereg_mr(void* communicator, void* handle) {
  return guard("deregistering memory", [&] {
    require(communicator && handle, "the communicator or the memory is NULL");
    const std::unique_ptr<Memory> memory(static_cast<Memory*>(handle));
    static_cast<Communicator*>(communicator)->deregister(*memory);
    return nccl::kSuccess;
  });
}

Result isend(void* communicator, void* data, size_t bytes, int tag, void*, void*, void** request) {
  return guard("sending", [&] {
    *request = nullptr;
    require(communicator, "the communicator is NULL");
    NetRequest* made = nullptr;
    const Result result = static_cast<Communicator*>(communicator)->send(data, bytes, tag, &made);
    *request = made;
    return result;
  });
}

Result irecv(void* communicator, int n, void** data, size_t* bytes, int* tags, void**, void**, void** request) {
  return guard("receiving", [&] {
    *request = nullptr;
    require(communicator, "the communicator is NULL");
    NetRequest* made = nullptr;
    const Result result = static_cast<Communicator*>(communicator)->receive(n, data, bytes, tags, &made);
    *request = made;
    return result;
  });
}

// ---- the same as versions before 10 have it

Result isend_v9(void* communicator, void* data, size_t bytes, int tag, void* memory, void** request) {
  return isend(communicator, data, bytes, tag, memory, nullptr, request);
}

Result irecv_v9(void* communicator, int n, void** data, size_t* bytes, int* tags, void** memory, void** request) {
  return irecv(communicator, n, data, bytes, tags, memory, nullptr, request);
}

// A size that did not fit has become negative, if the caller did not look.
size_t size_of(int bytes) {
  if (bytes >= 0) return static_cast<size_t>(bytes);
  throw Error(Code::invalid_argument, "a size of " + std::to_string(bytes) +
                                          " bytes: this version of NCCL's interface counts in int, so up to " +
                                          std::to_string(INT_MAX));
}

Result reg_mr_v7(void* communicator, void* data, int bytes, int pointer, void** memory) {
  return guard("registering memory", [&] {
    *memory = nullptr;
    return reg_mr(communicator, data, size_of(bytes), pointer, memory);
  });
}

Result isend_v8(void* communicator, void* data, int bytes, int tag, void* memory, void** request) {
  return guard("sending", [&] {
    *request = nullptr;
    return isend_v9(communicator, data, size_of(bytes), tag, memory, request);
  });
}

Result irecv_v8(void* communicator, int n, void** data, int* bytes, int* tags, void** memory, void** request) {
  return guard("receiving", [&] {
    *request = nullptr;
    std::array<size_t, nccl::kMostReceives> sizes{};
    for (int i = 0; i < std::min(n, nccl::kMostReceives); ++i) sizes[size_t(i)] = size_of(bytes[i]);
    return irecv_v9(communicator, n, data, sizes.data(), tags, memory, request);
  });
}

// Memory of GPUs would need it, and is not supported.
Result iflush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return nccl::kInternalError;
}

Result test(void* request, int* done, int* sizes) {
  return guard("testing", [&] {
    *done = 0;
    require(request, "the request is NULL");
    auto* own = static_cast<NetRequest*>(request);
    bool over = false;
    const Result result = own->owner->test(*own, &over, sizes);
    *done = over;
    return result;
  });
}

template <class Object>
Result close(void* object) {
  return guard("closing", [&] {
    delete static_cast<Object*>(object);
    return nccl::kSuccess;
  });
}

constexpr char kName[] = "HARP";

template <class Path, class Register, class Send, class Receive>
constexpr Path path_of(Register* register_memory, Send* send, Receive* receive) {
  return {
      .reg_mr = register_memory,
      .reg_mr_dma_buf = nullptr,
      .dereg_mr = dereg_mr,
      .isend = send,
      .irecv = receive,
      .iflush = iflush,
      .test = test,
      .close_send = close<Communicator>,
      .close_recv = close<Communicator>,
      .close_listen = close<Listener>,
      .get_device_mr = nullptr,
      .irecv_consumed = nullptr,
  };
}
constexpr auto kPath = path_of<nccl::DataPath>(reg_mr, isend, irecv);
constexpr auto kPathV7 = path_of<nccl::DataPathV7>(reg_mr_v7, isend_v8, irecv_v8);

template <class Net, class Properties, class Path>
constexpr Net net_of(Path path) {
  Net net{};
  net.name = kName;
  net.init = init;
  net.devices = devices;
  net.get_properties = common_properties<Properties>;
  net.listen = listen;
  net.connect = connect_v9;
  net.accept = accept;
  net.path = path;
  return net;
}

template <class Net, class Properties>
constexpr Net net_with_context(Result (*properties)(int, Properties*)) {
  Net net{};
  net.name = kName;
  net.init = init_context;
  net.devices = devices;
  net.get_properties = properties;
  net.listen = listen_in;
  net.connect = connect_in;
  net.accept = accept;
  net.path = kPath;
  net.finalize = finalize;
  return net;
}

}  // namespace

}  // namespace harp

#pragma GCC visibility push(default)
extern "C" {

nccl::NetV6 ncclNetPlugin_v6 = {
    .name = harp::kName,
    .init = harp::init,
    .devices = harp::devices,
    .get_properties = harp::common_properties<nccl::PropertiesV6>,
    .listen = harp::listen,
    .connect = harp::connect,
    .accept = harp::accept_v6,
    .path = harp::kPathV7,
};

nccl::NetV7 ncclNetPlugin_v7 = harp::net_of<nccl::NetV7, nccl::PropertiesV7>(harp::kPathV7);

nccl::NetV8 ncclNetPlugin_v8 = harp::net_of<nccl::NetV8, nccl::PropertiesV8>(
    harp::path_of<decltype(nccl::NetV8::path)>(harp::reg_mr, harp::isend_v8, harp::irecv_v8));

nccl::NetV9 ncclNetPlugin_v9 = harp::net_of<nccl::NetV9, nccl::PropertiesV10>(
    harp::path_of<decltype(nccl::NetV9::path)>(harp::reg_mr, harp::isend_v9, harp::irecv_v9));

nccl::NetV10 ncclNetPlugin_v10 = {
    .name = harp::kName,
    .init = harp::init_v10,
    .devices = harp::devices,
    .get_properties = harp::common_properties<nccl::PropertiesV10>,
    .listen = harp::listen,
    .connect = harp::connect_v10,
    .accept = harp::accept,
    .path = harp::kPath,
    .make_virtual_device = nullptr,
};

nccl::NetV11 ncclNetPlugin_v11 = harp::net_with_context<nccl::NetV11>(harp::properties_v11);
nccl::NetV12 ncclNetPlugin_v12 = harp::net_with_context<nccl::NetV12>(harp::properties_v12);

}  // extern "C"
#pragma GCC visibility pop
