// A network plugin of NCCL's, as NCCL loads it: the newest version that the file has, behind one set of calls.
#pragma once
#include <string>
#include <vector>

#include "harp_plugin/nccl/nccl_net.h"

namespace harp {

// What the versions have in common; from version 12's, with what a version lacks left as NCCL assumes it.
class LoadedPlugin {
 public:
  // Loads `path`; `version` 0 takes the newest it has. Throws lightcc::Error that says what is missing.
  LoadedPlugin(const std::string& path, int version, nccl::Logger);
  ~LoadedPlugin();  // dlclose
  LoadedPlugin(const LoadedPlugin&) = delete;
  LoadedPlugin& operator=(const LoadedPlugin&) = delete;

  static std::vector<int> versions(const std::string& path);  // that the file has and we know, newest first

  int version() const { return version_; }
  const char* name() const;

  nccl::Result init(void** context, uint64_t communicator);  // version 10: the first calls the plugin, others count
  nccl::Result finalize(void* context);
  nccl::Result devices(int* count);
  nccl::Result properties(int device, nccl::PropertiesV12*);
  nccl::Result listen(void* context, int device, void* handle, void** listener);
  nccl::Result connect(void* context, int device, void* handle, void** communicator);
  nccl::Result accept(void* listener, void** communicator);
  const nccl::DataPath& path() const { return *path_; }

 private:
  template <class Use>
  auto with(Use&& use) const;

  void* library_ = nullptr;
  void* symbol_ = nullptr;
  int version_ = 0;
  int initialized_ = 0;  // of version 10
  nccl::Logger log_;
  const nccl::DataPath* path_ = nullptr;
};

}  // namespace harp
