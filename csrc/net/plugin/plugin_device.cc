#include "net/plugin/plugin_device.h"

#include <cstdarg>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/core_folder.h"
#include "base/error.h"
#include "base/log.h"

namespace lightcc {
namespace {

// A plugin warns of every connection that ends, also in peace. What it says of a failure belongs to the error.
thread_local std::string last_warning;

void take_line(nccl::LogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level != nccl::kLogWarn && level != nccl::kLogInfo) return;
  char text[1000];
  va_list words;
  va_start(words, format);
  std::vsnprintf(text, sizeof text, format, words);
  va_end(words);
  log(Level::debug, text);
  if (level == nccl::kLogWarn) last_warning = text;
}

std::vector<std::string> files_for(const std::string& name) {
  if (name.find('/') != name.npos || name.find(".so") != name.npos) return {name};
  const std::string file = "libnccl-net-" + name + ".so";
  return {file, core_folder() + file};
}

std::unique_ptr<NetPlugin> load(const std::string& name, int version) {
  std::string failures;
  for (const std::string& file : files_for(name)) {
    try {
      return std::make_unique<NetPlugin>(file, version, take_line);
    } catch (const Error& error) {
      failures += (failures.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  throw Error(Code::internal, "init: LIGHTCC_NET_PLUGIN=" + name + ": " + failures);
}

// Stays loaded for the life of the process: threads of the plugin's may outlive its contexts.
NetPlugin& loaded(const std::string& name, int version) {
  static std::mutex mutex;
  static auto* const plugins = new std::map<std::pair<std::string, int>, std::unique_ptr<NetPlugin>>;
  std::lock_guard lock(mutex);
  auto& plugin = (*plugins)[{name, version}];
  if (!plugin) plugin = load(name, version);
  return *plugin;
}

}  // namespace

void PluginDevice::forget_warnings() { last_warning.clear(); }

std::string PluginDevice::failure(nccl::Result result, const std::string& attempted) const {
  static constexpr const char* kNames[] = {"", "an unhandled CUDA error", "a system error", "an internal error",
                                           "an invalid argument", "an invalid usage", "a remote error"};
  const bool is_known = result > 0 && size_t(result) < std::size(kNames);
  const std::string said = std::exchange(last_warning, "");
  return attempted + " by NCCL's network plugin " + name_ + " failed with " +
         (is_known ? kNames[result] : "error " + std::to_string(result)) + (said.empty() ? "" : " (" + said + ")");
}

PluginDevice::PluginDevice(const PluginOptions& options) : plugin_(loaded(options.name, options.version)) {
  name_ = plugin_.name() ? plugin_.name() : options.name;
  check(plugin_.init(&context_, 0), "starting");
  try {
    choose(options);
  } catch (...) {
    plugin_.finalize(context_);
    throw;
  }
}

void PluginDevice::choose(const PluginOptions& options) {
  const std::string title = "NCCL's network plugin " + options.name;
  int count = 0;
  check(plugin_.devices(&count), "listing devices");
  std::vector<std::pair<int, std::string>> usable;
  for (int i = 0; i < count; ++i) {
    nccl::PropertiesV12 properties{};
    check(plugin_.properties(i, &properties), "asking for a device's properties");
    if (properties.pointer_support & nccl::kHostPointers)
      usable.emplace_back(i, properties.name ? properties.name : std::to_string(i));
  }
  if (usable.empty())
    throw Error(Code::internal, "init: " + title + " has no device on this host that sends from host memory");
  auto chosen = usable.begin() + long(size_t(options.index) % usable.size());
  for (auto one = usable.begin(); one != usable.end(); ++one)
    if (one->second == options.interface) chosen = one;
  index_ = chosen->first;
  log(Level::info, "links go by " + title + " (" + name_ + ", version " + std::to_string(plugin_.version()) +
                       " of the interface), device " + chosen->second);
}

PluginDevice::~PluginDevice() {
  if (!abandoned_) plugin_.finalize(context_);
}

void PluginDevice::check(nccl::Result result, const std::string& attempted) const {
  if (result != nccl::kSuccess) throw Error(Code::internal, failure(result, attempted));
}

}  // namespace lightcc
