// What bench/gpu_codecs.py measures, under names for Python: batches of pieces on a GPU, and the CPU's selection on
// some threads. Functions return what has failed, or nullptr.
#include <chrono>
#include <memory>
#include <thread>

#include "device/topk.h"
#include "device/topk_message.h"
#include "device/quantization.h"
#include "gpu/codec_runner.h"

namespace {

using namespace lightcc;
const CudaFunctions* table = nullptr;

struct Pieces {
  CodecKind kind;
  bool decodes;
  std::vector<CudaEncode> encoded;
  std::vector<CudaDecode> decoded;
  uint64_t* error = nullptr;
};
Pieces& pieces_of(void* handle) { return *static_cast<Pieces*>(handle); }

template <class Body>
const char* guard(Body body) {
  static thread_local std::string words;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    words = error.what();
    return words.c_str();
  }
}

}  // namespace

extern "C" {

size_t codecs_topk_bytes(size_t count, size_t k, int half) {
  return topk_message_bytes(count, k, half ? DType::float16 : DType::float32);
}
size_t codecs_int8_bytes(size_t count) { return quantized_bytes<Int8>(count); }
size_t codecs_state_bytes() { return kCodecStateBytes; }

const char* codecs_open(const char* core) {
  return guard([&] { table = &test::open_codecs(core); });
}

void* codecs_new(int is_topk, int decodes, size_t count) {
  auto* made = new Pieces{is_topk ? CodecKind::topk : CodecKind::int8, decodes != 0, {}, {}};
  made->encoded.resize(decodes ? 0 : count);
  made->decoded.resize(decodes ? count : 0);
  return made;
}
void codecs_delete(void* handle) { delete &pieces_of(handle); }

const char* codecs_set_encode(void* handle, size_t i, const void* gradient, float* residual0, float* residual1,
                              void* state, void* body, size_t count, size_t k, float scale, int dtype, int half) {
  return guard([&] {
    pieces_of(handle).encoded.at(i) = {gradient, {residual0, residual1}, {nullptr, nullptr}, state, body, count, k,
                                       scale,    0,                      dtype,              half};
  });
}

// error: 8 bytes of the GPU that are 0.
const char* codecs_set_decode(void* handle, size_t i, const void* bodies, size_t stride, void* out, size_t count,
                              size_t k, int nodes, int dtype, int half, void* error) {
  return guard([&] {
    pieces_of(handle).decoded.at(i) = {bodies, stride, out, count, k, unsigned(nodes), 1, dtype, half};
    pieces_of(handle).error = static_cast<uint64_t*>(error);
  });
}

const char* codecs_run(void* handle, void* stream) {
  return guard([&] {
    const Pieces& all = pieces_of(handle);
    if (all.decodes) test::run_codec(*table, stream, all.kind, all.decoded, all.error);
    else test::run_codec(*table, stream, all.kind, all.encoded, nullptr);
  });
}

// Seconds of the CPU's selection of k of count elements in so many equal pieces, a thread each; the best of 3.
double codecs_cpu_topk(float* gradient, float* residual, size_t count, size_t k, int threads) {
  const size_t each = count / size_t(threads);
  double best = 1e30;
  std::vector<TopKWarmStart> warm{size_t(threads)};
  std::vector<std::unique_ptr<TopKSelection>> selections;
  for (int i = 0; i < threads; ++i) selections.push_back(std::make_unique<TopKSelection>());
  for (int turn = 0; turn < 4; ++turn) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::jthread> all;
    for (size_t i = 0; i < size_t(threads); ++i)
      all.emplace_back([&, i] {
        selections[i]->start({gradient + i * each, residual + i * each, each, k / size_t(threads)}, warm[i]);
        while (selections[i]->step()) {}
      });
    all.clear();
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (turn > 0) best = std::min(best, took);
  }
  return best;
}

}  // extern "C"
