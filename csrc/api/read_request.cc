#include "api/read_request.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "api/global_state.h"

namespace lightcc {
namespace {

static_assert(sizeof(lightcc_request) == *std::rbegin(kRequestSizes), "a new field appends the struct's new size");
static_assert(sizeof(lightcc_codec) == *std::rbegin(kCodecSizes), "a new field appends the struct's new size");
static_assert(sizeof(lightcc_residual) == *std::rbegin(kResidualSizes), "a new field appends the struct's new size");
static_assert(sizeof(lightcc_tensor) == *std::rbegin(kTensorSizes), "a new field appends the struct's new size");

bool is_zero(const std::byte* from, size_t bytes) {
  return std::all_of(from, from + bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// A caller of this version, as nearly all are, is spared the loops of read_struct().
template <class Struct>
Struct read(const Struct* caller, uint32_t size, std::span<const uint32_t> published, const char* what) {
  if (size == sizeof(Struct)) return *caller;
  Struct own;
  read_struct(&own, caller, size, published, what);
  return own;
}

void add_tensor(RequestForm& request, const lightcc_tensor& tensor) {
  if (tensor.dtype < 0 || tensor.dtype >= kDTypes)
    refuse(request.title() + ": unknown dtype " + std::to_string(tensor.dtype));
  if (tensor.ndim < 0) refuse(request.title() + ": ndim is " + std::to_string(tensor.ndim));
  if (tensor.ndim > 0 && !tensor.shape)
    refuse(request.title() + ": no shape of " + std::to_string(tensor.ndim) + " dimensions");
  const Shape shape(tensor.shape, tensor.shape + tensor.ndim);
  if (!is_countable(shape))
    refuse(request.title() + ": a tensor of shape " + text_of(shape) +
           " cannot be sent: at most 64 dimensions, 0 or more each, that multiply to at most 2^43");
  const Kind kind = request.what.kind;
  const bool writes = kind == Kind::allreduce || kind == Kind::broadcast || kind == Kind::receive;
  if (writes && count_of(shape) > 0 && !tensor.output) refuse(request.title() + " needs output memory");
  if (kind == Kind::send && count_of(shape) > 0 && !tensor.input)
    refuse(request.title() + " needs input memory");
  const DevicePlace place = place_of(tensor.place);
  if (request.what.tensors.empty()) {
    request.place = place;
    request.what.device = place.kind;
  } else if (place != request.place) {
    refuse(request.title() + ": its tensors are not all on one device, or not of one stream");
  }
  request.add_tensor({DType(tensor.dtype), shape}, tensor.input, tensor.output);
}

}  // namespace

void read_struct(void* to, const void* from, uint32_t size, std::span<const uint32_t> published, const char* what) {
  const uint32_t own = published.back();
  const uint32_t known = std::min(size, own);
  if (size > own && size <= kMostStructBytes) {
    if (!is_zero(static_cast<const std::byte*>(from) + own, size - own))
      refuse(std::string(what) + " is " + std::to_string(size) + ", and what follows the " + std::to_string(own) +
             " bytes that this version of lightcc knows is not zero: a newer one is needed");
  } else if (std::find(published.begin(), published.end(), size) == published.end()) {
    std::string sizes;
    for (uint32_t one : published) sizes += (sizes.empty() ? "" : ", ") + std::to_string(one);
    refuse(std::string(what) + " is " + std::to_string(size) + ", which no version has: it must be " + sizes +
           ", or up to " + std::to_string(kMostStructBytes) + " if the rest is zero");
  }
  std::memcpy(to, from, known);
  std::memset(static_cast<std::byte*>(to) + known, 0, own - known);
}

const char* fault_of(const lightcc_place& place) {
  if (place.kind != LIGHTCC_CPU && place.kind != LIGHTCC_CUDA)
    return ".kind is none that this version of lightcc knows";
  if (place.kind == LIGHTCC_CPU && (place.device != 0 || place.stream))
    return " is in the host's memory, and yet has a device or a stream";
  return nullptr;
}

DevicePlace place_of(const lightcc_place& place) { return {DeviceKind(place.kind), place.device, place.stream}; }

lightcc_request read_request(const lightcc_request* caller) {
  if (!caller) refuse("lightcc_request is NULL");
  const lightcc_request request = read(caller, caller->size, kRequestSizes, "lightcc_request.size");
  if (const uint32_t unknown = request.flags & ~uint32_t(LIGHTCC_BLOCK | LIGHTCC_PADDED | LIGHTCC_UNORDERED))
    refuse("lightcc_request.flags has " + std::to_string(unknown) + ", which this version of lightcc does not know");
  if (request.set < 0) refuse("lightcc_request.set is " + std::to_string(request.set) + ", which is negative");
  if (request.count > 0 && !request.tensors)
    refuse("lightcc_request.tensors is NULL, but count is " + std::to_string(request.count));
  return request;
}

lightcc_tensor read_tensor(const lightcc_request& request, int index) {
  const auto* first = reinterpret_cast<const std::byte*>(request.tensors);
  const auto* caller = reinterpret_cast<const lightcc_tensor*>(first + size_t(index) * request.tensor_size);
  const lightcc_tensor tensor = read(caller, request.tensor_size, kTensorSizes, "lightcc_request.tensor_size");
  if (const char* fault = fault_of(tensor.place))
    refuse("lightcc_tensor.place of tensor " + std::to_string(index) + fault);
  return tensor;
}

FastPathFacts facts_of(const lightcc_request& request) {
  FastPathFacts facts;
  facts.blocks = request.flags & LIGHTCC_BLOCK;
  facts.kind = Kind(request.kind);
  facts.op = ReduceOp(request.op);
  facts.pre = request.prescale;
  facts.tensors = request.count;
  facts.is_compressed = request.codec != 0;
  facts.is_whole = request.op >= 0 && request.op <= LIGHTCC_PRODUCT;
  return facts;
}

void add_facts_of(const lightcc_tensor& tensor, FastPathFacts* facts) {
  facts->device = DeviceKind(tensor.place.kind);
  facts->is_whole = tensor.input && tensor.output && tensor.dtype >= 0 && tensor.dtype < kDTypes && tensor.ndim >= 0 &&
                    (tensor.ndim == 0 || tensor.shape);
  if (!facts->is_whole) return;
  const std::span shape(tensor.shape, size_t(tensor.ndim));
  facts->is_whole = is_countable(shape) && std::find(shape.begin(), shape.end(), 0) == shape.end();
}

RequestForm form_of(const lightcc_request& from, int members) {
  if (from.kind < 0 || from.kind > LIGHTCC_RECV) refuse("unknown kind of request " + std::to_string(from.kind));
  if (from.op < 0 || from.op > LIGHTCC_PRODUCT) refuse("unknown reduce op " + std::to_string(from.op));
  const Kind kind = Kind(from.kind);
  RequestForm form(kind, from.name, from.group);
  form.what.op = ReduceOp(from.op);
  form.what.root = from.root;
  form.what.pre = from.prescale;
  form.what.post = from.postscale;
  form.set = kind == Kind::allreduce && from.name ? from.set : 0;
  form.tag = is_point_to_point(kind) ? from.tag : 0;
  form.space = is_point_to_point(kind) ? from.space : 0;
  form.padded = from.flags & LIGHTCC_PADDED;
  form.unordered = from.flags & LIGHTCC_UNORDERED;
  form.callbacks = {from.done, from.allocate, from.context, from.received};
  if (kind == Kind::barrier ? from.count != 0 : is_point_to_point(kind) ? from.count != 1 : from.count < 1)
    refuse(form.title() + ": " + std::to_string(from.count) + " tensors");
  for (int i = 0; i < from.count; ++i) add_tensor(form, read_tensor(from, i));
  if (from.allocate && form.place.kind != DeviceKind::cpu)
    refuse(form.title() + ": lightcc_request.allocate gives host memory, and the tensors are on a GPU");
  if (kind == Kind::alltoall && from.splits)
    form.what.splits.assign(from.splits, from.splits + size_t(members) * size_t(from.count));
  return form;
}

}  // namespace lightcc
