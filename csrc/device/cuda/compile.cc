#include "device/cuda/compile.h"

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "base/hmac.h"
#include "device/cuda/driver.h"
#include "device/cuda/scale.h"

namespace lightcc {
namespace {

constexpr const char* kStandardHeaders[] = {"cstddef", "cstdint", "limits"};
constexpr const char* kStandardText = "#include \"device/cuda/standard.h\"\n";

// As the CPU computes: no product and sum in one, and nothing approximate. What is not marked is code of the GPU, so
// that headers need no marks.
std::vector<std::string> options_for(const KernelTarget& target) {
  std::vector<std::string> options{"--std=c++17", "--fmad=false", "--device-as-default-execution-space",
                                   std::string("--gpu-architecture=") + (target.is_machine ? "sm_" : "compute_") +
                                       std::to_string(target.architecture)};
  if (scaling::kOwnNanIsNegative) options.push_back("-DLIGHTCC_OWN_NAN_IS_NEGATIVE");
  if (target.has_long_arguments) options.push_back("-DLIGHTCC_LONG_ARGUMENTS");
  return options;
}

// A program of NVRTC's that is given back.
class Program {
 public:
  Program(const NvrtcFunctions& functions, const KernelSource& source) : functions_(functions), name_(source.name) {
    std::vector<const char*> texts, names;
    const auto add = [&](const char* name, const char* text) { texts.push_back(text), names.push_back(name); };
    for (const char* name : kStandardHeaders) add(name, kStandardText);
    for (const KernelSource* one = kKernelSources; one->name; ++one) add(one->name, one->text);
    check(functions_.CreateProgram(&program_, source.text, source.name, int(texts.size()), texts.data(), names.data()));
  }
  ~Program() { functions_.DestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void compile(const std::vector<std::string>& options) {
    std::vector<const char*> texts;
    for (const std::string& option : options) texts.push_back(option.c_str());
    check(functions_.CompileProgram(program_, int(texts.size()), texts.data()));
  }
  std::string image(bool is_machine) {
    return is_machine ? taken(functions_.GetCUBINSize, functions_.GetCUBIN)
                      : taken(functions_.GetPTXSize, functions_.GetPTX);
  }

 private:
  std::string taken(int (*size)(void*, size_t*), int (*get)(void*, char*)) {
    size_t bytes = 0;
    check(size(program_, &bytes));
    std::string text(bytes, '\0');
    check(get(program_, text.data()));
    return text;
  }
  void check(int result) {
    if (result == 0) return;
    size_t bytes = 0;
    std::string log;
    if (program_ && functions_.GetProgramLogSize(program_, &bytes) == 0 && bytes > 0) {
      log.resize(bytes);
      functions_.GetProgramLog(program_, log.data());
      log.resize(bytes - 1);  // its zero
    }
    throw Error(Code::internal, "NVRTC did not compile " + std::string(name_) + ": " +
                                    functions_.GetErrorString(result) + (log.empty() ? "" : "\n" + log));
  }

  const NvrtcFunctions& functions_;
  const char* const name_;
  void* program_ = nullptr;
};

std::string hash_of_sources() {
  std::string all, hex;
  for (const KernelSource* one = kKernelSources; one->name; ++one) all += std::string(one->name) + "\n" + one->text;
  for (const uint8_t byte : sha256(all)) hex += std::to_string(byte) + ".";
  return hex;
}

// All that the result depends on.
std::string key_of(const Nvrtc& nvrtc, const KernelSource& program, const KernelTarget& target) {
  static const std::string sources = hash_of_sources();
  std::string key = std::string(program.name) + " of " + sources + ", NVRTC " + cuda_version_text(nvrtc.version);
  for (const std::string& option : options_for(target)) key += " " + option;
  return key;
}

}  // namespace

std::vector<KernelSource> kernel_programs() {
  std::vector<KernelSource> programs;
  for (const KernelSource* one = kKernelSources; one->name; ++one)
    if (std::string_view(one->name).ends_with(".cu")) programs.push_back(*one);
  return programs;
}

KernelTarget target_for(const Nvrtc& nvrtc, int architecture, int driver_version) {
  const std::vector<int> known = architectures_of(nvrtc);
  const auto next = std::upper_bound(known.begin(), known.end(), architecture);
  if (next == known.begin())
    throw Error(Code::invalid_argument, "NVRTC " + cuda_version_text(nvrtc.version) + " (" + nvrtc.path +
                                            ") does not know GPUs as old as sm_" + std::to_string(architecture));
  const bool has_long_arguments =
      std::min(nvrtc.version, driver_version) >= kLongArguments && next[-1] >= kLongArgumentsOn;
  return {next[-1], next[-1] == architecture, has_long_arguments};
}

std::string compile(const Nvrtc& nvrtc, const KernelSource& source, const KernelTarget& target) {
  Program program(nvrtc.functions, source);
  program.compile(options_for(target));
  return program.image(target.is_machine);
}

std::string compile_once(const ImageCache& cache, const Nvrtc& nvrtc, const KernelSource& program,
                         const KernelTarget& target) {
  const std::string key = key_of(nvrtc, program, target);
  if (auto image = cache.get(key)) return *image;
  const ImageCache::FileLock turn = cache.wait_for_turn(key);
  if (auto image = cache.get(key)) return *image;
  std::string image = compile(nvrtc, program, target);
  cache.put(key, image);
  return image;
}

}  // namespace lightcc
