// A rank of NCCL's: all-reduces of 8 bytes to 64 MiB in float32 and int64, compared with the CPU's result. Two of them
// may share a GPU if NCCL_HOSTID differs. Started by nccl_harp.sh.
//
//   nccl_harp RANK RANKS FILE [LIVES]
//
// FILE: where rank 0 leaves what the others join with. LIVES: how many communicators, one after the other, each alone
// in its process; with more than one, all-reduces of up to 4 MiB.
#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr size_t kLeastBytes = 8, kMostBytes = size_t(64) << 20, kMostBytesOfShortLives = size_t(4) << 20;
constexpr int kPatienceS = 60;

void check(cudaError_t error, const char* attempted) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", attempted, cudaGetErrorString(error));
  std::exit(1);
}

void check(ncclResult_t result, const char* attempted) {
  if (result == ncclSuccess) return;
  std::fprintf(stderr, "%s: %s\n", attempted, ncclGetErrorString(result));
  std::exit(1);
}

ncclUniqueId id_of_job(int rank, const std::string& file) {
  ncclUniqueId id;
  if (rank == 0) {
    check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    const std::string draft = file + ".new";
    FILE* out = std::fopen(draft.c_str(), "wb");
    if (!out || std::fwrite(&id, sizeof id, 1, out) != 1 || std::fclose(out) != 0 ||
        std::rename(draft.c_str(), file.c_str()) != 0) {
      std::perror(file.c_str());
      std::exit(1);
    }
    return id;
  }
  for (int second = 0; second < kPatienceS; ++second) {
    if (FILE* in = std::fopen(file.c_str(), "rb")) {
      const size_t read = std::fread(&id, sizeof id, 1, in);
      std::fclose(in);
      if (read == 1) return id;
    }
    sleep(1);
  }
  std::fprintf(stderr, "rank 0 has left nothing in %s\n", file.c_str());
  std::exit(1);
}

// Small whole numbers, whose sums every type holds exactly.
template <class T>
T value(int rank, size_t i) {
  return static_cast<T>((i * 7 + static_cast<size_t>(rank) * 13) % 1000);
}

template <class T>
void all_reduce(ncclComm_t communicator, int rank, int ranks, size_t bytes, ncclDataType_t type, const char* name) {
  const size_t count = bytes / sizeof(T);
  std::vector<T> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = value<T>(rank, i);
  T* device = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&device), bytes), "cudaMalloc");
  check(cudaMemcpy(device, data.data(), bytes, cudaMemcpyHostToDevice), "copying to the GPU");
  check(ncclAllReduce(device, device, count, type, ncclSum, communicator, nullptr), "ncclAllReduce");
  check(cudaStreamSynchronize(nullptr), "waiting for ncclAllReduce");
  check(cudaMemcpy(data.data(), device, bytes, cudaMemcpyDeviceToHost), "copying from the GPU");
  check(cudaFree(device), "cudaFree");
  for (size_t i = 0; i < count; ++i) {
    T sum = 0;
    for (int other = 0; other < ranks; ++other) sum += value<T>(other, i);
    if (data[i] == sum) continue;
    std::fprintf(stderr, "rank %d: %zu bytes of %s are wrong at %zu\n", rank, bytes, name, i);
    std::exit(1);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 4 && count != 5) return 2;
  const int rank = std::atoi(words[1]), ranks = std::atoi(words[2]), lives = count == 5 ? std::atoi(words[4]) : 1;
  const size_t most_bytes = lives == 1 ? kMostBytes : kMostBytesOfShortLives;
  check(cudaSetDevice(0), "cudaSetDevice");
  for (int life = 1; life <= lives; ++life) {
    std::printf("life %d begins\n", life);  // nccl_harp.sh looks for what NCCL says in each
    std::fflush(stdout);
    const ncclUniqueId id = id_of_job(rank, words[3] + std::string(".") + std::to_string(life));
    ncclComm_t communicator;
    check(ncclCommInitRank(&communicator, ranks, id, rank), "ncclCommInitRank");
    for (size_t bytes = kLeastBytes; bytes <= most_bytes; bytes *= 8) {
      all_reduce<float>(communicator, rank, ranks, bytes, ncclFloat32, "float32");
      all_reduce<int64_t>(communicator, rank, ranks, bytes, ncclInt64, "int64");
    }
    check(ncclCommDestroy(communicator), "ncclCommDestroy");
  }
  std::printf("rank %d: ok\n", rank);
  return 0;
}
