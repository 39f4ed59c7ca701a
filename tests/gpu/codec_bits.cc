// The kernels of codecs on a GPU against the CPU's codecs, bit for bit, on random pieces of three types
// (unit/codec_cases.h). Exits 77 where there is no GPU.
//
//   codec_bits CORE.so PIECES MOST     of each kind so many pieces, of at most so many elements
#include <cstdio>
#include <cstdlib>

#include "gpu/codec_runner.h"
#include "unit/codec_cases.h"

namespace lightcc::test {
namespace {

using Encode = EncodeTrial<GpuMemory>;
using Decode = DecodeTrial<GpuMemory>;

[[noreturn]] void fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

const CudaFunctions* table = nullptr;

template <class Trial>
void run(CodecKind kind, const std::vector<std::unique_ptr<Trial>>& trials, uint64_t* error = nullptr) {
  std::vector<decltype(trials[0]->piece())> pieces;
  for (const auto& trial : trials) pieces.push_back(trial->piece());
  run_codec(*table, nullptr, kind, pieces, error);
  check_runtime(cudaDeviceSynchronize(), "kernels");
}

constexpr size_t kMostPieces = 40;  // of a batch

void encode(CodecKind kind, unsigned pieces, size_t most) {
  std::mt19937 random(7);
  unsigned steps = 0;
  for (unsigned piece = 0; piece < pieces;) {
    std::vector<std::unique_ptr<Encode>> trials;
    for (unsigned n = random() % 4 ? 1 + random() % 6 : kMostPieces; n > 0 && piece < pieces; --n)
      trials.push_back(std::make_unique<Encode>(kind, 10'000 + ++piece, most));
    for (unsigned step = 1 + random() % 4; step > 0; --step, ++steps) {
      for (auto& trial : trials) {
        trial->begin_step();
        if (random() % 8 == 0) trial->set_state(uint32_t(random()), std::bit_cast<float>(uint32_t(random())));
      }
      run(kind, trials);
      for (const auto& trial : trials)
        if (const std::string found = trial->difference(); !found.empty()) fail(found);
    }
  }
  std::printf("%s, encoded: %u pieces in %u batches, equal bits: ok\n", kind == CodecKind::topk ? "Top-K" : "int8",
              pieces, steps);
}

void decode(CodecKind kind, unsigned pieces, size_t most) {
  std::mt19937 random(8);
  auto* error = static_cast<uint64_t*>(GpuMemory::allocate(sizeof(uint64_t)));
  check_runtime(cudaMemset(error, 0, sizeof *error), "cudaMemset");
  unsigned messages = 0;
  for (unsigned piece = 0; piece < pieces;) {
    std::vector<std::unique_ptr<Decode>> trials;
    for (unsigned n = 1 + random() % 6; n > 0 && piece < pieces; --n)
      trials.push_back(std::make_unique<Decode>(kind, 20'000 + ++piece, most));
    run(kind, trials, error);
    uint64_t refused = 0;
    GpuMemory::read(&refused, error, sizeof refused);
    if (refused) fail("a message was refused: " + std::to_string(refused));
    for (const auto& trial : trials)
      if (const std::string found = trial->difference(); !found.empty()) fail(found);
    messages += unsigned(trials.size());
  }
  std::printf("%s, decoded: %u pieces, equal bits: ok\n", kind == CodecKind::topk ? "Top-K" : "int8", messages);
  GpuMemory::release(error);
}

void decode_forged(unsigned pieces, size_t most) {
  auto* error = static_cast<uint64_t*>(GpuMemory::allocate(sizeof(uint64_t)));
  unsigned refusals = 0;
  for (unsigned seed = 1; seed <= pieces; ++seed) {
    std::vector<std::unique_ptr<Decode>> trials;
    trials.push_back(std::make_unique<Decode>(CodecKind::topk, seed, most));
    trials[0]->forge();
    check_runtime(cudaMemset(error, 0, sizeof *error), "cudaMemset");
    run(CodecKind::topk, trials, error);
    uint64_t refused = 0;
    GpuMemory::read(&refused, error, sizeof refused);
    if ((refused != 0) != trials[0]->is_refused_by_cpu()) fail("the CPU refuses otherwise: " + trials[0]->name());
    if (const std::string found = trials[0]->damage(); !found.empty()) fail(trials[0]->name() + ": " + found);
    refusals += refused != 0;
  }
  std::printf("forged messages: %u of %u refused, as by the CPU: ok\n", refusals, pieces);
  GpuMemory::release(error);
}

}  // namespace
}  // namespace lightcc::test

int main(int argc, char** argv) {
  using namespace lightcc;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("LEFT OUT: no GPU");
    return 77;
  }
  if (argc < 2) return std::puts("usage: codec_bits CORE.so [PIECES [MOST]]"), 2;
  const auto pieces = argc > 2 ? unsigned(std::atoi(argv[2])) : 100u;
  const auto most = argc > 3 ? size_t(std::atol(argv[3])) : size_t(100'000);
  try {
    test::table = &test::open_codecs(argv[1]);
    test::encode(CodecKind::topk, pieces, most);
    test::decode(CodecKind::topk, pieces / 4 + 1, most / 4);
    test::encode(CodecKind::int8, pieces / 4 + 1, most);
    test::decode(CodecKind::int8, pieces / 4 + 1, most / 4);
    test::decode_forged(pieces / 4 + 1, most / 8);
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
}
