// The loops of topk_kernels.h for each instruction set.
#include <string>

#include "base/error.h"
#include "device/topk_kernels.h"

namespace lightcc::kernels {
namespace {

template <bool half, bool add>
size_t collect_plain(const CollectTask& t) {
  return PlainTopK::collect<half, add>(t);
}

constexpr TopKLoops kPlain{
    {{collect_plain<false, false>, collect_plain<false, true>},
     {collect_plain<true, false>, collect_plain<true, true>}},
    [](const float* values, size_t n, uint32_t least) { return PlainTopK::count_from(values, n, least); },
    [](const PruneTask& t, size_t& ties) { return PlainTopK::prune(t, ties); }};

#if defined(__x86_64__)

LIGHTCC_AVX2 size_t count_avx2(const float* values, size_t n, uint32_t least) {
  return PlainTopK::count_from(values, n, least);
}
LIGHTCC_AVX2 size_t prune_avx2(const PruneTask& t, size_t& ties) { return PlainTopK::prune(t, ties); }
LIGHTCC_AVX512 size_t count_avx512(const float* values, size_t n, uint32_t least) {
  return PlainTopK::count_from(values, n, least);
}

constexpr TopKLoops kAvx2{
    {{Avx2TopK::collect<false, false>, Avx2TopK::collect<false, true>},
     {Avx2TopK::collect<true, false>, Avx2TopK::collect<true, true>}},
    count_avx2,
    prune_avx2};

constexpr TopKLoops kAvx512{{{Avx512TopK::collect<false, false>, Avx512TopK::collect<false, true>},
                             {Avx512TopK::collect<true, false>, Avx512TopK::collect<true, true>}},
                            count_avx512,
                            Avx512TopK::prune};

#endif

}  // namespace

const TopKLoops& topk_loops(Isa isa) {
  if (!has(isa)) throw Error(Code::internal, std::string("top-k: this machine has no ") + name_of(isa));
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kAvx512;
  if (isa == Isa::avx2) return kAvx2;
#endif
  return kPlain;
}

}  // namespace lightcc::kernels
