// The binary interface between NCCL and its network plugins, versions 6 to 12, in our own words: layouts and call rules
// of NCCL 2.15 to 2.30 (nccl_net.h there). NCCL looks for a symbol ncclNetPlugin_v12, then _v11, and so on.
//
// Threads: a communicator calls connect, accept, registration and close from one thread, and sends, receives and tests
// from another; init and finalize from the application's.
#pragma once
#include <cstddef>
#include <cstdint>

namespace nccl {

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

enum LogLevel : int { kLogWarn = 2, kLogInfo = 3 };
enum LogSubsystem : unsigned long { kLogInit = 1, kLogNet = 16 };
using Logger = void (*)(LogLevel, unsigned long subsystems, const char* file, int line, const char* format, ...);
using ProfilerCallback = Result (*)(void** event, int type, void* phandle, int64_t plugin, void* data);

enum PointerSupport : int { kHostPointers = 1, kCudaPointers = 2 };
enum DeviceType : int { kDeviceHost = 0 };
constexpr int kUndefined = -1;  // a traffic class, rail or plane
constexpr size_t kHandleBytes = 128;
constexpr int kMostRequests = 32;  // outstanding ones of a communicator
constexpr int kMostReceives = 8;   // in one irecv

template <int Most>
struct VirtualDevice {
  int count;
  int devices[Most];
};

struct PropertiesV6 {
  char* name;
  char* pci_path;  // in /sys, or nullptr
  uint64_t guid;   // of the NIC: functions of one NIC have the same
  int pointer_support;
  int speed;  // Mbit/s
  int port;
  float latency;  // us
  int max_communicators;
  int max_receives;  // in one irecv
};

struct PropertiesV7 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int speed;
  int port;
  float latency;
  int max_communicators;
  int max_receives;
  DeviceType device_type;
  int device_version;
};

struct PropertiesV8 {
  char* name;
  char* pci_path;  // in /sys, or nullptr
  uint64_t guid;   // of the NIC: functions of one NIC have the same
  int pointer_support;
  int registration_is_global;
  int speed;  // Mbit/s
  int port;
  float latency;  // us
  int max_communicators;
  int max_receives;  // in one irecv
  DeviceType device_type;
  int device_version;
};

struct PropertiesV10 {  // and of version 9
  char* name;
  char* pci_path;  // in /sys, or nullptr
  uint64_t guid;   // of the NIC: functions of one NIC have the same
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed;  // Mbit/s
  int port;
  float latency;  // us
  int max_communicators;
  int max_receives;  // in one irecv
  DeviceType device_type;
  int device_version;
  VirtualDevice<4> virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
};

struct PropertiesV11 {
  PropertiesV10 v10;
  int max_multi_request;
};

struct PropertiesV12 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed;
  int port;
  float latency;
  int max_communicators;
  int max_receives;
  DeviceType device_type;
  int device_version;
  VirtualDevice<8> virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
  int16_t rail;
  int16_t plane;
};

struct CommunicatorConfig {
  int traffic_class;
};

using Isend = Result (*)(void* communicator, void* data, size_t bytes, int tag, void* memory, void* phandle,
                         void** request);
using Irecv = Result (*)(void* communicator, int n, void** data, size_t* bytes, int* tags, void** memory,
                         void** phandles, void** request);
using IsendV9 = Result (*)(void* communicator, void* data, size_t bytes, int tag, void* memory, void** request);
using IrecvV9 = Result (*)(void* communicator, int n, void** data, size_t* bytes, int* tags, void** memory,
                           void** request);
using IsendV8 = Result (*)(void* communicator, void* data, int bytes, int tag, void* memory, void** request);
using IrecvV8 = Result (*)(void* communicator, int n, void** data, int* bytes, int* tags, void** memory,
                           void** request);

// What all versions have after accept, in this order; version 6 ends with close_listen.
template <class Send, class Receive, class RegisteredSize = size_t>
struct DataPathOf {
  Result (*reg_mr)(void* communicator, void* data, RegisteredSize bytes, int pointer, void** memory);
  Result (*reg_mr_dma_buf)(void* communicator, void* data, size_t bytes, int pointer, uint64_t offset, int fd,
                           void** memory);
  Result (*dereg_mr)(void* communicator, void* memory);
  // A request that is nullptr afterwards could not be begun yet: NCCL calls again.
  Send isend;
  Receive irecv;
  Result (*iflush)(void* communicator, int n, void** data, int* bytes, void** memory, void** request);
  Result (*test)(void* request, int* done, int* bytes);  // bytes, n of them, may be nullptr
  Result (*close_send)(void* communicator);
  Result (*close_recv)(void* communicator);
  Result (*close_listen)(void* listener);
  Result (*get_device_mr)(void* communicator, void* memory, void** device_memory);
  Result (*irecv_consumed)(void* communicator, int n, void* request);
};
using DataPath = DataPathOf<Isend, Irecv>;
using DataPathV7 = DataPathOf<IsendV8, IrecvV8, int>;  // and of version 6

// A communicator that is nullptr after connect or accept is not there yet: NCCL calls again, for ever.
using Accept = Result (*)(void* listener, void** communicator, void** device_communicator);

// The last two functions of its path do not belong to version 6: nobody may read them.
struct NetV6 {
  const char* name;
  Result (*init)(Logger);  // once in a process
  Result (*devices)(int* count);
  Result (*get_properties)(int device, PropertiesV6*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** communicator);
  Result (*accept)(void* listener, void** communicator);
  DataPathV7 path;
};

template <class Properties, class Path>
struct NetWithoutConfig {
  const char* name;
  Result (*init)(Logger);  // once in a process
  Result (*devices)(int* count);
  Result (*get_properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** communicator, void** device_communicator);
  Accept accept;
  Path path;
};
using NetV7 = NetWithoutConfig<PropertiesV7, DataPathV7>;
using NetV8 = NetWithoutConfig<PropertiesV8, DataPathOf<IsendV8, IrecvV8>>;

struct NetV9 : NetWithoutConfig<PropertiesV10, DataPathOf<IsendV9, IrecvV9>> {
  Result (*make_virtual_device)(int* device, VirtualDevice<4>*);
};

struct NetV10 {
  const char* name;
  Result (*init)(Logger, ProfilerCallback);  // once in a process
  Result (*devices)(int* count);
  Result (*get_properties)(int device, PropertiesV10*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, CommunicatorConfig*, void* handle, void** communicator, void** device_communicator);
  Accept accept;
  DataPath path;
  Result (*make_virtual_device)(int* device, VirtualDevice<4>*);
};

// Versions 11 and 12 differ in the properties only.
template <class Properties, class Virtual>
struct NetWithContext {
  const char* name;
  Result (*init)(void** context, uint64_t communicator, CommunicatorConfig*, Logger, ProfilerCallback);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, Properties*);
  Result (*listen)(void* context, int device, void* handle, void** listener);
  Result (*connect)(void* context, int device, void* handle, void** communicator, void** device_communicator);
  Accept accept;
  DataPath path;
  Result (*make_virtual_device)(int* device, Virtual*);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, void* attributes);
};
using NetV11 = NetWithContext<PropertiesV11, VirtualDevice<4>>;
using NetV12 = NetWithContext<PropertiesV12, VirtualDevice<8>>;

static_assert(sizeof(NetV7) == 152 && sizeof(PropertiesV7) == 56 && sizeof(PropertiesV6) == 48);
static_assert(offsetof(NetV6, path) == 56 && offsetof(DataPathV7, get_device_mr) == 80);
static_assert(sizeof(NetV8) == 152 && sizeof(NetV9) == 160 && sizeof(PropertiesV8) == 64);
static_assert(sizeof(NetV10) == 160 && sizeof(NetV11) == 176 && sizeof(NetV12) == 176);
static_assert(sizeof(PropertiesV10) == 104 && sizeof(PropertiesV11) == 112 && sizeof(PropertiesV12) == 128);
static_assert(offsetof(PropertiesV10, max_p2p_bytes) == 88 && offsetof(PropertiesV12, max_p2p_bytes) == 104);

}  // namespace nccl
