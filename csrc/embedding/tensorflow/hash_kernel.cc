// LightccEmbeddingHash: the keys and checks of strings (lightcc_embedding_hash_strings).
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "api/tensorflow/kernel.h"
#include "embedding/table.h"
#include "embedding/tensorflow/kernels.h"

namespace lightcc::tf {
namespace {

// One element of a tensor of strings, as TensorFlow has it in memory: tsl/platform/ctstring_internal.h. The functions
// for it (tensorflow/c/tf_tstring.h) are not in the library that the others are in. The two lowest bits of the first
// byte say which form it has; the size is above them.
static_assert(std::endian::native == std::endian::little);
struct TensorString {
  enum Storage { kSmall, kLarge, kOffset, kView };
  unsigned char bytes[24];

  template <class T> T at(size_t offset) const {
    T value;
    std::memcpy(&value, bytes + offset, sizeof value);
    return value;
  }
  std::string_view text() const {
    const auto* own = reinterpret_cast<const char*>(bytes);
    switch (bytes[0] & 3) {
      case kSmall: return {own + 1, size_t(bytes[0] >> 2)};
      case kLarge: return {at<const char*>(16), size_t(at<uint64_t>(0) >> 2)};
      case kOffset: return {own + at<uint32_t>(4), size_t(at<uint32_t>(0) >> 2)};
      default: return {at<const char*>(8), size_t(at<uint64_t>(0) >> 2)};
    }
  }
};
static_assert(sizeof(TensorString) == 24);

void compute_hash(void*, Context* context) {
  Result result;
  Tensor* strings = nullptr;
  api.GetInput(context, 0, &strings, result);
  if (!result.ok()) return api.OpKernelContext_Failure(context, result);
  const int64_t count = api.Dim(strings, 0);
  const auto* elements = static_cast<const TensorString*>(api.TensorData(strings));
  std::string text;
  std::vector<int64_t> offsets{0};
  for (int64_t i = 0; i < count; ++i) {
    text += elements[i].text();
    offsets.push_back(int64_t(text.size()));
  }
  api.DeleteTensor(strings);
  void* outputs[2] = {};
  for (int i = 0; i < 2 && result.ok(); ++i) {
    const size_t bytes = size_t(count) * (i ? sizeof(uint32_t) : sizeof(int64_t));
    Tensor* output = api.AllocateOutput(context, i, i ? kInt32 : kInt64, &count, 1, bytes, result);
    if (!result.ok()) break;
    outputs[i] = api.TensorData(output);
    api.DeleteTensor(output);
  }
  if (!result.ok()) return api.OpKernelContext_Failure(context, result);
  if (const int status = lightcc_embedding_hash_strings(text.data(), offsets.data(), count,
                                                        static_cast<int64_t*>(outputs[0]),
                                                        static_cast<uint32_t*>(outputs[1])))
    fail(context, code_of(status), std::string("LightccEmbeddingHash: ") + lightcc_embedding_error());
}

}  // namespace

void add_hash(const char* device) {
  add_kernel("LightccEmbeddingHash",
             api.NewKernelBuilder("LightccEmbeddingHash", device, [](Construction*) -> void* { return nullptr; },
                                  compute_hash, [](void*) {}),
             {"strings", "keys", "checks"});
}

}  // namespace lightcc::tf
