// Names of variables with our prefixes: which are known, and what is said of one that is not. It is mostly misspelt,
// and what it asks for would not happen without a word.
#pragma once
#include <string>
#include <vector>

namespace lightcc {

// What the core, the Python package, HARP and launchers read, and what Horovod reads and lightcc needs not.
std::vector<std::string> known_variables();
extern const std::vector<const char*> kBuildVariables;  // of these: what steers how Horovod is compiled

// A line for each that is set and not known, with the nearest name that is; "": none. set: "NAME=value", as in environ,
// up to a nullptr. LIGHT_ and HARP_ begin names of other programs too: of those only what is close to a known one is
// told, and of HARP's only where `harp` says that it is in use.
std::string unknown_variables(const char* const* set, bool harp);

}  // namespace lightcc
