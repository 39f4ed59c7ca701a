// A device of a network plugin of NCCL's (nccl_abi/net_plugin.h), as this rank uses it.
#pragma once
#include <string>

#include "nccl_abi/net_plugin.h"

namespace lightcc {

struct PluginOptions {
  // As NCCL_NET_PLUGIN: a path, a file's name, or the NAME of libnccl-net-NAME.so, which is also looked for beside
  // lightcc's own library.
  std::string name;
  std::string interface = "";  // of the devices that send from host memory, the one of that name is taken,
  int index = 0;               // or else, of n, number index % n
  int version = 0;             // of the plugin's interface; 0: the newest
};

class PluginDevice {
 public:
  // Throws Error{internal} where there is no such plugin, or it has no device that sends from host memory.
  explicit PluginDevice(const PluginOptions&);
  ~PluginDevice();
  PluginDevice(const PluginDevice&) = delete;

  NetPlugin& plugin() { return plugin_; }
  void* context() { return context_; }
  int index() const { return index_; }
  const std::string& name() const { return name_; }  // "HARP": ranks that talk have the same
  // "sending by NCCL's network plugin HARP failed with a remote error (it has closed the connection)". What stands last
  // the plugin has said itself.
  std::string failure(nccl::Result, const std::string& attempted) const;
  void check(nccl::Result, const std::string& attempted) const;  // throws that as Error{internal} if it is no success
  static void forget_warnings();  // of this thread: they are about what is over
  void abandon() { abandoned_ = true; }  // in a forked child: it is the parent's

 private:
  void choose(const PluginOptions&);

  NetPlugin& plugin_;
  std::string name_;
  void* context_ = nullptr;
  int index_ = 0;
  bool abandoned_ = false;
};

}  // namespace lightcc
