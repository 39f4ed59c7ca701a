// TopKSelection and QuantizedEncoding beside the error-feedback add that is a part of both, residual += scale * gradient, by
// instruction set.
// Sides take turns in random order in one run; the median of the ratios of each turn counts. Selections are steps
// of one training: random gradients, whose scale drifts by some percent, and a residual that has settled.
//
//   ninja -C build/cmake topk_bench && build/cmake/topk_bench [Mi elements] [1/ratio] [repeats] [float32|float16] [isa]
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device/quantization.h"
#include "device/sets.h"
#include "device/topk.h"

using namespace lightcc;

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr int kGradients = 4, kSettling = 100;

float* memory(size_t count) {
  const size_t bytes = round_up(count * sizeof(float), kHugePage);
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  void* at = reinterpret_cast<void*>(round_up(reinterpret_cast<size_t>(p), kHugePage));
  madvise(at, bytes, MADV_HUGEPAGE);
  std::memset(at, 0, bytes);
  return static_cast<float*>(at);
}

LIGHTCC_INLINE void add(float* residual, const float* gradient, size_t count, float scale) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) residual[i] += scale * gradient[i];
}

using Add = void (*)(float*, const float*, size_t, float);
void add_plain(float* r, const float* g, size_t count, float scale) { add(r, g, count, scale); }
#if defined(__x86_64__)
LIGHTCC_AVX2 void add_avx2(float* r, const float* g, size_t count, float scale) { add(r, g, count, scale); }
LIGHTCC_AVX512 void add_avx512(float* r, const float* g, size_t count, float scale) {
  const __m512 by = _mm512_set1_ps(scale);
  for (size_t i = 0; i < count; i += 16) {
    _mm512_storeu_ps(r + i, _mm512_add_ps(_mm512_loadu_ps(r + i), _mm512_mul_ps(by, _mm512_loadu_ps(g + i))));
  }
}
Add add_of(Isa isa) { return isa == Isa::avx512 ? add_avx512 : isa == Isa::avx2 ? add_avx2 : add_plain; }
#else
Add add_of(Isa) { return add_plain; }
#endif

enum Side { adding, warm, cold, too_high, too_low, int8, int4, kSides };
constexpr const char* kNames[] = {"add alone", "warm", "cold", "guess twice too high", "guess twice too low",
                                  "int8", "int4"};
constexpr double kGoals[] = {0, 1.5, 2.5, 0, 0, 0, 0};  // times the add
bool is_topk(int side) { return side != adding && side != int8 && side != int4; }

double median(std::vector<double> all) {
  std::nth_element(all.begin(), all.begin() + int64_t(all.size() / 2), all.end());
  return all[all.size() / 2];
}

class Training {
 public:
  Training(size_t count, size_t k, DType values)
      : count_(count),
        k_(k),
        values_(values),
        gradient_(memory(count)),
        residual_(memory(count)),
        added_(memory(count)),
        quantized_residual_(memory(count)),
        quantized_body_(quantized_bytes<Int8>(count)) {
    std::normal_distribution<float> normal;
    for (float*& gradient : gradients_) {
      gradient = memory(count);
      for (size_t i = 0; i < count; ++i) gradient[i] = normal(random_);
    }
  }

  // Seconds of a side's step.
  double step(Side side, Isa isa, TopKSelection& selection) {
    std::memcpy(gradient_, gradients_[step_++ % kGradients], count_ * sizeof(float));
    const float scale = 0.01f * std::uniform_real_distribution<float>(0.95f, 1.05f)(random_);
    TopKWarmStart guess = warm_;
    if (side == cold) guess.threshold = 0;
    if (side == too_high) guess.threshold *= 2;
    if (side == too_low) guess.threshold /= 2;
    const auto start = std::chrono::steady_clock::now();
    if (side == adding) {
      add_of(isa)(added_, gradient_, count_, scale);
    } else if (side == int8) {
      quantize<Int8>(isa, scale);
    } else if (side == int4) {
      quantize<Int4>(isa, scale);
    } else {
      selection.start({gradient_, residual_, count_, k_, scale, values_}, guess);
      while (selection.step()) {}
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (side == warm) warm_ = guess;
    else if (is_topk(side)) warm_.threshold = guess.threshold;
    return seconds;
  }

  void measure(Isa isa, int repeats) {
    TopKSelection selection(isa);
    for (int i = 0; i < kSettling; ++i) step(warm, isa, selection);
    std::vector<double> seconds[kSides], ratios[kSides];
    double passes[kSides] = {};
    int prunes[kSides] = {};
    std::vector<Side> order{adding, warm, cold, too_high, too_low, int8, int4};
    for (int repeat = 0; repeat < repeats; ++repeat) {
      std::shuffle(order.begin(), order.end(), random_);
      for (Side side : order) {
        seconds[side].push_back(step(side, isa, selection));
        if (!is_topk(side)) continue;
        passes[side] += selection.selected().passes;
        prunes[side] += selection.selected().prunes;
      }
      for (Side side : order) ratios[side].push_back(seconds[side].back() / seconds[adding].back());
    }
    std::printf("\n%-8s %-22s%9s%9s%9s%9s%9s%9s%9s\n", name_of(isa), "", "ms", "least", "GB/s", "ratio", "goal",
                "passes", "prunes");
    for (int side = 0; side < kSides; ++side) {
      const double typical = median(seconds[side]), ratio = median(ratios[side]);
      const double least = *std::min_element(seconds[side].begin(), seconds[side].end());
      std::printf("%8s %-22s%9.2f%9.2f%9.1f%9.2f", "", kNames[side], 1e3 * typical, 1e3 * least,
                  3e-9 * sizeof(float) * static_cast<double>(count_) / typical, ratio);
      if (!is_topk(side)) std::printf("\n");
      else if (kGoals[side] == 0) std::printf("%9s%9.2f%9d\n", "", passes[side] / repeats, prunes[side]);
      else std::printf("%9.1f%9.2f%9d  %s\n", kGoals[side], passes[side] / repeats, prunes[side],
                       ratio <= kGoals[side] ? "ok" : "MISSED");
    }
    std::printf("%8s the gap settled at %.3f\n", "", static_cast<double>(warm_.gap));
  }

 private:
  template <class Format> void quantize(Isa isa, float scale) {
    QuantizedEncoding<Format> encoding(isa);
    encoding.start({gradient_, quantized_residual_, count_, scale}, quantized_body_.data());
    while (encoding.step()) {}
  }

  size_t count_, k_;
  DType values_;
  float *gradient_, *residual_, *added_, *quantized_residual_;
  std::vector<std::byte> quantized_body_;
  float* gradients_[kGradients];
  TopKWarmStart warm_;
  int step_ = 0;
  std::mt19937_64 random_{1};
};

}  // namespace

int main(int words, char** word) {
  const size_t count = static_cast<size_t>((words > 1 ? std::atof(word[1]) : 16) * (1 << 20)) / 16 * 16;
  const size_t part = words > 2 ? static_cast<size_t>(std::atol(word[2])) : 100;
  const int repeats = words > 3 ? std::atoi(word[3]) : 31;
  const DType values = words > 4 && word[4] == std::string("float16") ? DType::float16 : DType::float32;
  const std::string isa_name = words > 5 ? word[5] : "";
  std::printf("%zu elements, 1 of %zu, values as %s; GB/s as of the add: two reads and a write\n", count, part,
              name_of(values));
  Training training(count, std::max<size_t>(1, count / part), values);
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
    if (has(isa) && (isa_name.empty() || isa_name == name_of(isa))) training.measure(isa, repeats);
  }
  return 0;
}
