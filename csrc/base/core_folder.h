// Where the core's library lies: what belongs to it is looked for there.
#pragma once
#include <dlfcn.h>

#include <string>

namespace lightcc {

inline std::string core_folder() {  // ends in a slash; "": not known
  Dl_info own{};
  if (dladdr(reinterpret_cast<void*>(&core_folder), &own) == 0 || !own.dli_fname) return "";
  const std::string path = own.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace lightcc
