// What a caller says by lightcc_request and lightcc_tensor: structs of any published size, read as those of this
// version. No state, no I/O; every refusal is an Error{invalid_argument}, of which those of single fields name them.
//
// 1. A field that the caller's struct does not have reads as zero.
// 2. A field that this version does not have must be zero, so that nothing that was asked for is left out in silence.
// 3. No byte beyond the caller's size is read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "api/lightcc.h"
#include "engine/request/fast_path_facts.h"
#include "engine/request/request.h"

namespace lightcc {

// The sizes that each struct has had, the present one last: a new field appends a size.
inline constexpr uint32_t kRequestSizes[] = {112, 120};
inline constexpr uint32_t kTensorSizes[] = {48};
inline constexpr uint32_t kCodecSizes[] = {40};
inline constexpr uint32_t kResidualSizes[] = {72};
inline constexpr uint32_t kClusterSizes[] = {96};
inline constexpr uint32_t kMostStructBytes = 4096;  // a larger size is taken for garbage, not for a later version

// Fills `to`, a struct of the last size in `published`, from the caller's of `size` bytes. Errors begin with `what`,
// the field that holds the size.
void read_struct(void* to, const void* from, uint32_t size, std::span<const uint32_t> published, const char* what);

lightcc_request read_request(const lightcc_request* caller);            // may be nullptr, which is refused
lightcc_tensor read_tensor(const lightcc_request& request, int index);  // index < request.count

const char* fault_of(const lightcc_place&);  // nullptr, or what is wrong with it, to stand behind its name
DevicePlace place_of(const lightcc_place&);

// What they tell of a call that would take the fast path. Whatever is wrong with a request is said by form_of().
FastPathFacts facts_of(const lightcc_request&);
void add_facts_of(const lightcc_tensor&, FastPathFacts*);

// members: ranks in its group, 0 if there is no such group; only the splits of an alltoall ask.
RequestForm form_of(const lightcc_request&, int members);

}  // namespace lightcc
