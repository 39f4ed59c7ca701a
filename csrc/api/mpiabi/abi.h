// MPItrampoline's ABI, version 2: what jaxlib looks up in the library that MPITRAMPOLINE_LIB names. jaxlib brings a
// table of all functions and constants of MPI and fills it from there; its "mpi" collectives use those declared here.
// The other names are in other_names.txt. Source: MPItrampoline's mpiabi.h (github.com/eschnett/MPItrampoline, 5.3).
//
// Any thread may call any function. None throws; what is not MPIABI_SUCCESS is a failure, whose text
// MPIABI_Error_string gives to the thread that saw it.
#pragma once
#include <cstdint>

#define MPIABI_EXPORT __attribute__((visibility("default")))

using MPIABI_Comm = uintptr_t;
using MPIABI_Datatype = uintptr_t;
using MPIABI_Op = uintptr_t;
using MPIABI_Request = uintptr_t;
struct MPIABI_Status;  // JAX ignores it everywhere

namespace lightcc::mpiabi {
inline constexpr int kMostErrorCharacters = 1024;  // of MPIABI_Error_string and the next one, their end included
}

extern "C" {

extern MPIABI_EXPORT const int mpiabi_version_major, mpiabi_version_minor, mpiabi_version_patch;
extern MPIABI_EXPORT const int mpiwrapper_version_major, mpiwrapper_version_minor, mpiwrapper_version_patch;

extern MPIABI_EXPORT const int MPIABI_SUCCESS, MPIABI_UNDEFINED;
extern MPIABI_EXPORT const int MPIABI_THREAD_SINGLE, MPIABI_THREAD_FUNNELED, MPIABI_THREAD_SERIALIZED,
    MPIABI_THREAD_MULTIPLE;
extern MPIABI_EXPORT const MPIABI_Comm MPIABI_COMM_NULL, MPIABI_COMM_WORLD;
extern MPIABI_EXPORT const MPIABI_Request MPIABI_REQUEST_NULL;
extern MPIABI_EXPORT MPIABI_Status* const MPIABI_STATUS_IGNORE;
extern MPIABI_EXPORT const MPIABI_Op MPIABI_SUM, MPIABI_PROD, MPIABI_MIN, MPIABI_MAX;
extern MPIABI_EXPORT const MPIABI_Datatype MPIABI_BYTE, MPIABI_INT8_T, MPIABI_UINT8_T, MPIABI_INT16_T, MPIABI_UINT16_T,
    MPIABI_INT32_T, MPIABI_UINT32_T, MPIABI_INT64_T, MPIABI_UINT64_T, MPIABI_FLOAT, MPIABI_DOUBLE, MPIABI_C_COMPLEX,
    MPIABI_C_FLOAT_COMPLEX, MPIABI_C_DOUBLE_COMPLEX;

MPIABI_EXPORT int MPIABI_Init_thread(int* argc, char*** argv, int required, int* provided);
MPIABI_EXPORT int MPIABI_Finalize(void);
MPIABI_EXPORT int MPIABI_Is_thread_main(int* flag);
MPIABI_EXPORT int MPIABI_Error_string(int error, char* text, int* length);
// With MPITRAMPOLINE_VERBOSE=1 the text is printed when the library is loaded.
MPIABI_EXPORT int MPIABI_Get_library_version(char* text, int* length);
MPIABI_EXPORT void mpiwrapper_export_fortran_constants_(void);

MPIABI_EXPORT int MPIABI_Comm_rank(MPIABI_Comm, int* rank);
MPIABI_EXPORT int MPIABI_Comm_size(MPIABI_Comm, int* size);
MPIABI_EXPORT int MPIABI_Comm_split(MPIABI_Comm, int color, int key, MPIABI_Comm* made);
MPIABI_EXPORT int MPIABI_Comm_free(MPIABI_Comm*);

MPIABI_EXPORT int MPIABI_Allreduce(const void* sent, void* received, int count, MPIABI_Datatype, MPIABI_Op,
                                   MPIABI_Comm);
MPIABI_EXPORT int MPIABI_Allgather(const void* sent, int count, MPIABI_Datatype, void* received, int received_count,
                                   MPIABI_Datatype received_type, MPIABI_Comm);
// counts: as many elements for each rank, the same for all.
MPIABI_EXPORT int MPIABI_Reduce_scatter(const void* sent, void* received, const int counts[], MPIABI_Datatype,
                                        MPIABI_Op, MPIABI_Comm);

MPIABI_EXPORT int MPIABI_Isend(const void* from, int count, MPIABI_Datatype, int to, int tag, MPIABI_Comm,
                               MPIABI_Request*);
MPIABI_EXPORT int MPIABI_Irecv(void* to, int count, MPIABI_Datatype, int from, int tag, MPIABI_Comm, MPIABI_Request*);
MPIABI_EXPORT int MPIABI_Wait(MPIABI_Request*, MPIABI_Status*);
MPIABI_EXPORT int MPIABI_Sendrecv(const void* sent, int sent_count, MPIABI_Datatype sent_type, int to, int sent_tag,
                                  void* received, int received_count, MPIABI_Datatype received_type, int from,
                                  int received_tag, MPIABI_Comm, MPIABI_Status*);

}  // extern "C"
