#include "device/cuda/codecs.h"

#include "device/cuda/codec_pieces.h"
#include "device/cuda/codec_steps.h"

namespace lightcc {
namespace {

constexpr const char* kCodecPrograms[] = {"device/cuda/int8_codec.cu", "device/cuda/topk_decode.cu",
                                          "device/cuda/topk_encode.cu"};

// What a batch needs while the stream works on it.
class BatchBytes {
 public:
  BatchBytes(const DriverFunctions& driver, Gpu& gpu, void* stream, size_t bytes) : driver_(driver), stream_(stream) {
    check_driver(driver.MemAllocFromPoolAsync(&address_, bytes, pool_of(driver, gpu), stream),
                 "cuMemAllocFromPoolAsync of a codec");
  }
  ~BatchBytes() { driver_.MemFreeAsync(address_, stream_); }
  BatchBytes(const BatchBytes&) = delete;
  BatchBytes& operator=(const BatchBytes&) = delete;
  std::byte* get() const { return reinterpret_cast<std::byte*>(address_); }

 private:
  const DriverFunctions& driver_;
  void* const stream_;
  uintptr_t address_ = 0;
};

template <class Batch, class Piece>
void run(const DriverFunctions& driver, Gpu& gpu, void* stream, std::vector<Piece>& pieces, uint64_t* error = nullptr) {
  if (pieces.empty()) return;
  Batch batch{};
  const BatchBytes memory(driver, gpu, stream, gpu::lay_out(pieces.data(), pieces.size(), nullptr, batch));
  gpu::lay_out(pieces.data(), pieces.size(), memory.get(), batch);
  if constexpr (requires { batch.error; }) batch.error = error;
  gpu.codec_tables.copy(driver, stream, memory.get(), pieces.data(), pieces.size() * sizeof(Piece));
  void* arguments[] = {&batch};
  for (const gpu::CodecStep& step : gpu::steps_of(batch, static_cast<uint32_t>(gpu.multiprocessors))) {
    const auto kernel = static_cast<size_t>(step.kernel);
    check_driver(driver.LaunchKernel(gpu.codecs.get(driver, gpu.architecture, kernel), step.blocks, step.blocks_y, 1,
                                     gpu::kCodecKernelThreads[kernel], 1, 1, 0, stream, arguments, nullptr),
                 gpu::kCodecKernelNames[kernel]);
  }
}

[[noreturn]] void no_codec(int codec) {
  throw Error(Code::internal, "there is no codec " + std::to_string(codec) + " on a GPU");
}

}  // namespace

const KernelSet kCodecKernels{kCodecPrograms, gpu::kCodecKernelNames};

void load_codecs(const DriverFunctions& driver, Gpu& gpu) {
  gpu.codecs.load(driver, gpu.architecture);
  gpu.codec_tables.make_ready(driver);
}

void encode_pieces(const DriverFunctions& driver, Gpu& gpu, void* stream, int codec, const CudaEncode* pieces,
                   size_t count) {
  if (codec == int(CodecKind::topk)) {
    auto all = gpu::pieces_of<gpu::EncodePiece>(pieces, count);
    return run<gpu::EncodeBatch>(driver, gpu, stream, all);
  }
  if (codec != int(CodecKind::int8)) no_codec(codec);
  auto all = gpu::pieces_of<gpu::Int8EncodePiece>(pieces, count);
  run<gpu::Int8EncodeBatch>(driver, gpu, stream, all);
}

void decode_pieces(const DriverFunctions& driver, Gpu& gpu, void* stream, int codec, const CudaDecode* pieces,
                   size_t count, uint64_t* error) {
  if (codec == int(CodecKind::topk)) {
    auto all = gpu::pieces_of<gpu::DecodePiece>(pieces, count);
    return run<gpu::DecodeBatch>(driver, gpu, stream, all, error);
  }
  if (codec != int(CodecKind::int8)) no_codec(codec);
  auto all = gpu::pieces_of<gpu::Int8DecodePiece>(pieces, count);
  run<gpu::Int8DecodeBatch>(driver, gpu, stream, all);
}

}  // namespace lightcc
