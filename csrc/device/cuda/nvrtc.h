// CUDA's run-time compiler, which comes with every framework that uses GPUs: found in the process, or where the
// framework has it. Names and values are those of nvrtc.h.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace lightcc {

struct NvrtcFunctions {
  int (*Version)(int* major, int* minor);
  int (*GetNumSupportedArchs)(int* count);
  int (*GetSupportedArchs)(int* archs);  // 90 is sm_90; rising
  int (*CreateProgram)(void** program, const char* text, const char* name, int headers, const char* const* header_texts,
                       const char* const* header_names);
  int (*DestroyProgram)(void** program);
  int (*CompileProgram)(void* program, int count, const char* const* options);
  int (*GetProgramLogSize)(void* program, size_t* bytes);
  int (*GetProgramLog)(void* program, char* log);
  int (*GetCUBINSize)(void* program, size_t* bytes);
  int (*GetCUBIN)(void* program, char* image);
  int (*GetPTXSize)(void* program, size_t* bytes);
  int (*GetPTX)(void* program, char* text);
  const char* (*GetErrorString)(int result);
};

struct Nvrtc {
  NvrtcFunctions functions;
  int version = 0;   // as the driver's: 12040 is 12.4
  std::string path;  // where it is
};

// The one of this process for GPUs of this architecture and a driver of this version: never of a later major version of
// CUDA, whose kernels the driver could not load. It is one that is loaded already, or else lies where the framework's
// wheels or its CUDA runtime are, or else the system's; the newest of these, of those that know the GPU if any does. It
// is never unloaded. Throws Error{invalid_argument} that says what to install.
const Nvrtc& nvrtc(int driver_version, int architecture);
void set_nvrtc(const Nvrtc*);  // for tests: what nvrtc() returns from now on; nullptr: what it has found or finds

Nvrtc open_nvrtc(const std::string& path);  // this one. Throws Error{invalid_argument}
std::vector<int> architectures_of(const Nvrtc&);  // for which it compiles, rising; 90 is sm_90

}  // namespace lightcc
