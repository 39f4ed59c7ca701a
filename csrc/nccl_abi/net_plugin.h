// A network plugin of NCCL's, as NCCL loads it: the newest version that the file has, behind one set of calls.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "nccl_abi/nccl_net.h"

namespace lightcc {

// What the versions have in common; from version 12's, with what a version lacks left as NCCL assumes it. The functions
// are the plugin's own: which thread may call them, nccl_net.h says.
class NetPlugin {
 public:
  // Loads `path`; `version` 0 takes the newest it has. Throws Error{invalid_argument} that says what is missing.
  NetPlugin(const std::string& path, int version, nccl::Logger);
  ~NetPlugin();  // dlclose
  NetPlugin(const NetPlugin&) = delete;
  NetPlugin& operator=(const NetPlugin&) = delete;

  static std::vector<int> versions(const std::string& path);  // that the file has and we know, newest first

  int version() const { return version_; }
  const char* name() const;

  // Before version 11 a plugin begins once in a process, and never ends: the first call of these does.
  nccl::Result init(void** context, uint64_t communicator);
  nccl::Result finalize(void* context);
  nccl::Result devices(int* count);
  nccl::Result properties(int device, nccl::PropertiesV12*);
  nccl::Result listen(void* context, int device, void* handle, void** listener);
  nccl::Result connect(void* context, int device, void* handle, void** communicator);
  nccl::Result accept(void* listener, void** communicator);

  // Sizes that do not fit the version's are refused with kInvalidArgument and a warning that names them.
  nccl::Result reg_mr(void* communicator, void* data, size_t bytes, int pointer, void** memory);
  nccl::Result dereg_mr(void* communicator, void* memory);
  nccl::Result isend(void* communicator, void* data, size_t bytes, int tag, void* memory, void** request);
  // Into n buffers at once: at most so many as the properties say.
  nccl::Result irecv(void* communicator, int n, void** data, size_t* bytes, int* tags, void** memory, void** request);
  nccl::Result test(void* request, int* done, int* bytes);
  nccl::Result close_send(void* communicator);
  nccl::Result close_recv(void* communicator);
  nccl::Result close_listen(void* listener);

 private:
  template <class Use>
  auto with(Use&& use) const;
  nccl::Result refuse(const char* what, size_t bytes) const;

  void* library_ = nullptr;
  void* symbol_ = nullptr;
  int version_ = 0;
  pid_t initialized_in_ = 0;  // the process, before version 11; a forked one is another
  nccl::Logger log_;
};

}  // namespace lightcc
