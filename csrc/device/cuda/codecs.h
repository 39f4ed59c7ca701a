// Codecs on a GPU: how pieces of the table (device/cuda.h) become launches (codec_steps.h).
#pragma once
#include "device/cuda.h"
#include "device/cuda/gpu.h"

namespace lightcc {

// Compiles and loads their kernels, and pins memory: so that what follows waits for nothing. Throws Error, as all here.
void load_codecs(const DriverFunctions&, Gpu&);

// As CudaFunctions::encode and decode.
void encode_pieces(const DriverFunctions&, Gpu&, void* stream, int codec, const CudaEncode* pieces, size_t count);
void decode_pieces(const DriverFunctions&, Gpu&, void* stream, int codec, const CudaDecode* pieces, size_t count,
                   uint64_t* error);

}  // namespace lightcc
