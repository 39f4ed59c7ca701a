// Registers one kernel each.
#pragma once

namespace lightcc::tf {

void add_lookup(const char* device);  // lookup_kernel.cc
void add_update(const char* device);  // update_kernel.cc
void add_hash(const char* device);    // hash_kernel.cc

}  // namespace lightcc::tf
