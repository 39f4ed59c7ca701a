/* What Python tells _lightcc_embedding_tensorflow.so: which table a number in TensorFlow's graphs stands for. A graph
 * is run again after the ranks have changed, when the table has another handle: so it names a number, not a handle. */
#ifndef LIGHTCC_EMBEDDING_TENSORFLOW_BIND_H
#define LIGHTCC_EMBEDDING_TENSORFLOW_BIND_H
#include "embedding/table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From now on `number` is this table. dtype, dim, name: its own. Lookups under its earlier handle are forgotten. */
LIGHTCC_API void lightcc_embedding_tensorflow_bind(int64_t number, lightcc_embedding_group* group,
                                                   lightcc_embedding_table* table, const char* name, int dtype,
                                                   int64_t dim);
/* Before the table is freed. */
LIGHTCC_API void lightcc_embedding_tensorflow_unbind(int64_t number);
/* Lookups and updates that the operations have made, together. */
LIGHTCC_API int64_t lightcc_embedding_tensorflow_calls(void);

#ifdef __cplusplus
}
#endif
#endif
