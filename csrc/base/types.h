// The words every layer shares: element types, reduce operations, kinds of collective, spans.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lightcc {

enum class DType : int32_t {  // the values are part of the C API
  uint8, int8, uint16, int16, int32, int64, float16, float32, float64, boolean, bfloat16, uint32, uint64
};
inline constexpr int kDTypes = 13;

enum class ReduceOp : int32_t { average, sum, adasum, min, max, product };

enum class Kind : int32_t {  // those up to receive are part of the C API
  allreduce, allgather, broadcast, alltoall, reducescatter, barrier, send, receive, add_group, remove_group, join
};
inline constexpr int kKinds = 11;
inline bool is_point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

enum class CodecKind : int32_t { none, topk, int8, int4 };
inline constexpr int kCodecKinds = 4;

// How an all-reduce is compressed between nodes; none: values travel as they are.
struct Codec {
  CodecKind kind = CodecKind::none;
  DType width = DType::float32;  // as which values travel
  double ratio = 1;              // topk: the share of the elements that is sent, above 0 and at most 1
  double momentum = 0;           // topk: of momentum correction, at least 0 and below 1
  bool operator==(const Codec&) const = default;
};
// nullptr, or what cannot be, in words.
const char* fault_of(const Codec&);
std::string text_of(const Codec&);     // "topk of ratio 0.01 as float16", "none"

// Where the tensors of a request are; the values are part of the C API.
enum class DeviceKind : int32_t { cpu, cuda };
inline constexpr int kDeviceKinds = 2;
struct DevicePlace {
  DeviceKind kind = DeviceKind::cpu;
  int device = 0;                // of CUDA: its number in this process
  void* stream = nullptr;        // of CUDA: makes the inputs and waits for the outputs; nullptr: the default stream
  bool operator==(const DevicePlace&) const = default;
};

size_t size_of(DType);
bool is_floating(DType);
const char* name_of(DType);
const char* name_of(ReduceOp);
const char* name_of(Kind);
const char* name_of(DeviceKind);

using Span = std::span<std::byte>;
using ConstSpan = std::span<const std::byte>;
using Shape = std::vector<int64_t>;

int64_t count_of(const Shape&);        // elements; 1 for a scalar
// Whether it can be a tensor's shape: 64 dimensions at most, none negative, and no part of it has more elements than
// arithmetic on them can stand. Also of an empty tensor, whose other dimensions another rank's rows may have.
bool is_countable(std::span<const int64_t> shape);
std::string text_of(const Shape&);     // "[2, 3]"
std::string text_of(const std::vector<int>& ranks);  // "1, 4, 5"

// The unit in which shared memory is shared: no two writers touch one line.
inline constexpr size_t kLine = 64;
inline constexpr size_t round_up(size_t n, size_t unit = kLine) { return (n + unit - 1) / unit * unit; }

}  // namespace lightcc
