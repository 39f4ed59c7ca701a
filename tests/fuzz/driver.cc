// Drives a fuzz target where libFuzzer is missing (g++): seeded random mutations of a corpus, under ASan and UBSan.
// The command line is the part of libFuzzer's that we use, so that one command fits both:
//   message_fuzz -max_total_time=20 -seed=7 -artifact_prefix=build/ corpus/     mutate for 20 s
//   message_fuzz build/crash-message_fuzz                                       replay one input
// There is no coverage feedback, so the corpus has to hold a valid input of every kind.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

namespace fs = std::filesystem;
using Input = std::vector<uint8_t>;

constexpr size_t kLargestInput = 4096;
constexpr unsigned kHangSeconds = 10;  // one input that takes longer is a hang

Input read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

class Mutator {
 public:
  Mutator(std::vector<Input> corpus, uint64_t seed) : corpus_(std::move(corpus)), random_(seed) {}

  Input next() {
    Input input = corpus_[below(corpus_.size())];
    for (size_t edits = below(6); edits > 0; --edits) edit(input);  // none in one of six: the corpus itself
    input.resize(std::min(input.size(), kLargestInput));
    return input;
  }

 private:
  size_t below(size_t n) { return random_() % n; }

  void edit(Input& input) {
    size_t at = below(input.size() + 1), left = input.size() - at;
    switch (below(7)) {
      case 0:  // flip a bit
        if (left > 0) input[at] ^= uint8_t(1u << below(8));
        break;
      case 1:  // any byte
        if (left > 0) input[at] = uint8_t(random_());
        break;
      case 2:  // a length or an enum at its borders
        overwrite(input, at, left);
        break;
      case 3:  // cut short
        input.resize(at);
        break;
      case 4:  // drop a piece
        input.erase(input.begin() + at, input.begin() + at + below(left + 1));
        break;
      case 5: {  // say a piece twice
        Input piece(input.begin() + at, input.begin() + at + std::min<size_t>(below(left + 1), 64));
        input.insert(input.begin() + at, piece.begin(), piece.end());
        break;
      }
      case 6: {  // go on with the tail of another input
        const Input& other = corpus_[below(corpus_.size())];
        input.resize(at);
        input.insert(input.end(), other.begin() + below(other.size() + 1), other.end());
        break;
      }
    }
  }

  void overwrite(Input& input, size_t at, size_t left) {
    static constexpr uint64_t kBorders[] = {0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                            0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff};
    uint64_t value = below(4) ? kBorders[below(std::size(kBorders))] : input.size() + below(3) - 1;
    std::memcpy(input.data() + at, &value, std::min(left, size_t(1) << below(4)));
  }

  std::vector<Input> corpus_;
  std::mt19937_64 random_;
};

void run(const Input& input) {
  // Memory of exactly this size: one byte beyond it is ASan's.
  std::unique_ptr<uint8_t[]> exact(new uint8_t[input.size()]);
  if (!input.empty()) std::memcpy(exact.get(), input.data(), input.size());
  alarm(kHangSeconds);
  LLVMFuzzerTestOneInput(exact.get(), input.size());
  alarm(0);
}

// The input at hand lies in a file before it runs, so it survives whatever way the process dies.
class LastInput {
 public:
  explicit LastInput(std::string path) : path_(std::move(path)) {
    fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd_ < 0) {
      std::perror(path_.c_str());
      std::exit(2);
    }
  }
  ~LastInput() {
    close(fd_);
    unlink(path_.c_str());
  }
  void keep(const Input& input) {
    if (pwrite(fd_, input.data(), input.size(), 0) != ssize_t(input.size()) || ftruncate(fd_, off_t(input.size()))) {
      std::perror(path_.c_str());
      std::exit(2);
    }
  }

 private:
  std::string path_;
  int fd_;
};

}  // namespace

int main(int argc, char** argv) {
  std::string prefix = "./", name = fs::path(argv[0]).filename();
  uint64_t seed = std::random_device{}();
  long seconds = 0;
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    std::string option = argv[i];
    auto value = [&](const char* flag) { return option.starts_with(flag) ? argv[i] + std::strlen(flag) : nullptr; };
    if (auto* text = value("-max_total_time=")) {
      seconds = std::atol(text);
    } else if (auto* text = value("-seed=")) {
      seed = std::strtoull(text, nullptr, 10);
    } else if (auto* text = value("-artifact_prefix=")) {
      prefix = text;
    } else if (option.starts_with("-")) {
      std::fprintf(stderr, "%s: unknown option %s\n", name.c_str(), argv[i]);
      return 2;
    } else if (fs::is_directory(option)) {
      for (const auto& file : fs::directory_iterator(option)) corpus.push_back(read_file(file.path()));
    } else {
      corpus.push_back(read_file(option));
    }
  }
  if (seconds == 0) {
    for (const Input& input : corpus) run(input);
    return 0;
  }

  if (corpus.empty()) corpus.emplace_back(16);  // from nothing: sixteen zero bytes
  std::string crash = prefix + "crash-" + name;
  std::printf("%s: %ld s, -seed=%s, a crash leaves %s\n", name.c_str(), seconds, std::to_string(seed).c_str(),
              crash.c_str());
  std::fflush(stdout);
  LastInput last(crash);
  long long runs = 0;
  auto kept_run = [&](const Input& input) {
    last.keep(input);
    run(input);
    ++runs;
  };
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (const Input& input : corpus) kept_run(input);
  Mutator mutator(std::move(corpus), seed);
  while (std::chrono::steady_clock::now() < end) kept_run(mutator.next());
  std::printf("%s: %lld inputs, no crash\n", name.c_str(), runs);
}
