// What compressed all-reduces on a GPU have in common, whichever way their messages travel (codec_run.h,
// nccl_codec_run.h).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collective/compressed_layout.h"
#include "collective/selector.h"
#include "engine/run/pinned_pool.h"

namespace lightcc {

struct GpuTensor {  // of a compressed all-reduce
  const Request* request;
  const void* input;
  void* output;
};

// A way to run compressed all-reduces of tensors where they are, on a GPU.
struct GpuCodecRoute {
  virtual ~GpuCodecRoute() = default;
  // Whether it is this one that runs what such a row would run with that codec. tensors: as in Collective::tensors.
  virtual bool takes(const Row&, const Codec&, const std::vector<GpuTensor>& tensors) const = 0;
  virtual std::unique_ptr<Work> start(const Collective&, std::vector<GpuTensor>) = 0;  // that it takes
};

// A shard's messages, by node `stride` bytes apart, as the GPU's decoder takes them.
CudaDecode decoding_of(const Collective&, const CompressedShard&, const std::byte* bodies, size_t stride, int nodes,
                       void* out);
// Whether a codec's values are sent as float16, as the GPU's codecs are told it.
int is_half(const Codec&);

// A word in the GPU's memory tells of each decoding whether all messages were whole. It is copied to the host behind
// the decoding, where watch() looks at it. What was decoded by then may be in use: so it ends the epoch.
class DecodingErrors {
 public:
  static constexpr size_t kWordBytes = sizeof(uint64_t);

  // end: the word has been copied to its place in the slot. titles: of the pieces.
  void expect(std::shared_ptr<CudaEvent> end, std::shared_ptr<StagingSlot>, size_t word_at,
              std::vector<std::string> titles);
  bool is_busy() const { return !decodings_.empty(); }  // there are words to come; watch() looks
  void watch();  // throws Error{internal} if a message was none

 private:
  struct Decoding {
    std::shared_ptr<CudaEvent> end;
    std::shared_ptr<StagingSlot> slot;
    size_t word_at;
    std::vector<std::string> titles;
  };
  std::vector<Decoding> decodings_;  // in the order of their streams
};

}  // namespace lightcc
