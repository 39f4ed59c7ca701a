#include "device/cuda/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/core_folder.h"
#include "base/error.h"
#include "device/cuda/driver.h"

namespace lightcc {
namespace {

constexpr int kOldestMajor = 11;

std::mutex mutex;
const Nvrtc* chosen = nullptr;  // by a test

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

template <class Function> void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) refuse(std::string("this libnvrtc has no ") + name);
}

Nvrtc functions_of(void* library, const std::string& path) {
  Nvrtc found;
  NvrtcFunctions& all = found.functions;
  look_up(library, "nvrtcVersion", all.Version);
  look_up(library, "nvrtcGetNumSupportedArchs", all.GetNumSupportedArchs);
  look_up(library, "nvrtcGetSupportedArchs", all.GetSupportedArchs);
  look_up(library, "nvrtcCreateProgram", all.CreateProgram);
  look_up(library, "nvrtcDestroyProgram", all.DestroyProgram);
  look_up(library, "nvrtcCompileProgram", all.CompileProgram);
  look_up(library, "nvrtcGetProgramLogSize", all.GetProgramLogSize);
  look_up(library, "nvrtcGetProgramLog", all.GetProgramLog);
  look_up(library, "nvrtcGetCUBINSize", all.GetCUBINSize);
  look_up(library, "nvrtcGetCUBIN", all.GetCUBIN);
  look_up(library, "nvrtcGetPTXSize", all.GetPTXSize);
  look_up(library, "nvrtcGetPTX", all.GetPTX);
  look_up(library, "nvrtcGetErrorString", all.GetErrorString);
  int major = 0, minor = 0;
  all.Version(&major, &minor);
  found.version = 1000 * major + 10 * minor;
  Dl_info where{};
  dladdr(reinterpret_cast<void*>(all.Version), &where);
  found.path = where.dli_fname ? where.dli_fname : path;
  // It opens this one by name when it compiles, and the wheel of 13.0 does not say that it lies beside it.
  const std::string folder = found.path.substr(0, found.path.rfind('/') + 1);
  dlopen((folder + "libnvrtc-builtins.so." + cuda_version_text(found.version)).c_str(), RTLD_LAZY | RTLD_LOCAL);
  return found;
}

// The end of the library's name. That of 11 has stayed since 11.2, before which there was no nvrtcGetCUBIN.
std::string ending_of(int major) { return ".so." + (major == 11 ? "11.2" : std::to_string(major)); }

// PyTorch's wheels may put a hash into the name; those of CUDA have a second library beside it, for old systems.
bool is_nvrtc(const std::string& name, int major) {
  return name.starts_with("libnvrtc") && name.ends_with(ending_of(major)) && name.find("builtins") == name.npos &&
         name.find(".alt.") == name.npos;
}

// What the process has loaded, and folders that may have NVRTC: where wheels have it beside those that are loaded, and
// where the CUDA runtime is, for toolkits and conda's environments.
struct Loaded {
  std::vector<std::string> libraries, wheels, runtimes;
};

void add_once(std::vector<std::string>& all, const std::string& one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

int note_library(dl_phdr_info* one, size_t, void* to) {
  auto& loaded = *static_cast<Loaded*>(to);
  const std::string path = one->dlpi_name ? one->dlpi_name : "", folder = path.substr(0, path.rfind('/') + 1);
  loaded.libraries.push_back(path);
  if (const size_t at = path.rfind("/nvidia/"); at != path.npos) add_once(loaded.wheels, path.substr(0, at + 8));
  if (path.starts_with(folder + "libcudart")) add_once(loaded.runtimes, folder);
  return 0;
}

std::vector<std::string> loaded_paths(const Loaded& loaded, int major) {
  std::vector<std::string> paths;
  for (const std::string& path : loaded.libraries)
    if (is_nvrtc(path.substr(path.rfind('/') + 1), major)) paths.push_back(path);
  return paths;
}

std::vector<std::string> paths_beside(const Loaded& loaded, int major) {
  std::vector<std::string> paths, folders;
  for (const std::string& wheels : loaded.wheels)
    folders.push_back(wheels + (major >= 13 ? "cu" + std::to_string(major) : "cuda_nvrtc") + "/lib/");
  folders.insert(folders.end(), loaded.runtimes.begin(), loaded.runtimes.end());
  for (const std::string& folder : folders) {
    std::error_code absent;
    for (const auto& entry : std::filesystem::directory_iterator(folder, absent))
      if (is_nvrtc(entry.path().filename(), major)) paths.push_back(entry.path());
  }
  return paths;
}

std::vector<std::string> names(const Loaded&, int major) { return {"libnvrtc" + ending_of(major)}; }

std::optional<Nvrtc> try_open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return std::nullopt;
  return functions_of(library, path);
}

Nvrtc find(int driver_version, int architecture) {
  std::optional<Nvrtc> preferred;  // which no other is better than, as they all are too new for the GPU
  Loaded loaded;
  dl_iterate_phdr(note_library, &loaded);
  add_once(loaded.wheels, core_folder() + "../nvidia/");
  const int newest = driver_version / 1000;
  for (const auto& paths : {loaded_paths, paths_beside, names})
    for (int major = newest; major >= kOldestMajor; --major)
      for (const std::string& path : paths(loaded, major))
        if (auto found = try_open(path)) {
          if (const auto known = architectures_of(*found); !known.empty() && known[0] <= architecture) return *found;
          if (!preferred) preferred = found;
        }
  if (preferred) return *preferred;
  refuse("NVRTC, which compiles lightcc's kernels, was not found for a driver of CUDA " +
         cuda_version_text(driver_version) + "; pip install nvidia-cuda-nvrtc" +
         (newest >= 13 ? "" : "-cu" + std::to_string(newest)) + " brings it");
}

}  // namespace

Nvrtc open_nvrtc(const std::string& path) {
  if (auto found = try_open(path)) return *found;
  refuse(std::string("NVRTC could not be opened (") + dlerror() + ")");
}

const Nvrtc& nvrtc(int driver_version, int architecture) {
  static auto& found = *new std::map<int, Nvrtc>;  // by architecture; threads may outlive what is destroyed at exit
  std::lock_guard lock(mutex);
  if (chosen) return *chosen;
  const auto known = found.find(architecture);
  if (known != found.end()) return known->second;
  return found.emplace(architecture, find(driver_version, architecture)).first->second;
}

std::vector<int> architectures_of(const Nvrtc& nvrtc) {
  int count = 0;
  std::vector<int> known;
  if (nvrtc.functions.GetNumSupportedArchs(&count) == 0) known.resize(size_t(count));
  if (count > 0) nvrtc.functions.GetSupportedArchs(known.data());
  std::sort(known.begin(), known.end());
  return known;
}

void set_nvrtc(const Nvrtc* given) {
  std::lock_guard lock(mutex);
  chosen = given;
}

}  // namespace lightcc
