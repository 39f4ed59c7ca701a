// _lightcc_embedding_tensorflow.so: TensorFlow opens it (tf.load_op_library), and it registers the operations of tables
// and their kernels with the TensorFlow that is loaded already, if that has all that they need.
//
// Lookups and updates are stateful, so that TensorFlow runs them one after the other, in the order of the program,
// which is the same on all ranks.
#include "api/tensorflow/kernel.h"
#include "api/tensorflow/operation.h"
#include "embedding/tensorflow/kernels.h"

namespace lightcc::tf {
namespace {

void set_vectors(ShapeContext* context, int first, int count, Status* status) {
  for (int i = 0; i < count && api.GetCode(status) == kOk; ++i) {
    ShapeHandle vector(api.ShapeInferenceContextVectorFromSize(context, size_t(-1)));
    api.ShapeInferenceContextSetOutput(context, first + i, vector, status);
  }
}

void lookup_shapes(ShapeContext* context, Status* status) {
  const int tables = int(api.ShapeInferenceContextNumInputs(context)) / 3;
  set_vectors(context, tables, tables, status);
  for (int i = 0; i < tables && api.GetCode(status) == kOk; ++i) {
    ShapeHandle leaf, row, rows, count(api.ShapeInferenceContextVectorFromSize(context, size_t(-1)));
    api.ShapeInferenceContextGetInput(context, i, leaf, status);
    if (api.GetCode(status) == kOk) api.ShapeInferenceContextSubshape(context, leaf, 1, INT64_MAX, row, status);
    if (api.GetCode(status) == kOk) api.ShapeInferenceContextConcatenateShapes(context, count, row, rows, status);
    if (api.GetCode(status) == kOk) api.ShapeInferenceContextSetOutput(context, i, rows, status);
    ShapeHandle scalar(api.ShapeInferenceContextScalar(context));
    if (api.GetCode(status) == kOk) api.ShapeInferenceContextSetOutput(context, 2 * tables + i, scalar, status);
  }
}

void hash_shapes(ShapeContext* context, Status* status) { set_vectors(context, 0, 2, status); }
void no_shapes(ShapeContext*, Status*) {}

#define LIGHTCC_ROWS "T: list({float, double}) >= 1"
#define LIGHTCC_MANY "N: int >= 1"

void register_all() {
  Operation("LightccEmbeddingLookup")
      .attribute(LIGHTCC_ROWS)
      .attribute(LIGHTCC_MANY)
      .attribute("tables: string")  // bound_table.h
      .input("leaves: T")           // (0, dim): they have no values, but their gradients are those of the rows
      .input("keys: N * int64")
      .input("checks: N * int32")   // of strings; otherwise empty
      .input("training: bool")
      .output("rows: T")
      .output("inverse: N * int64")
      .output("tokens: N * int64")
      .stateful()
      .shapes(lookup_shapes)
      .add();
  Operation("LightccEmbeddingUpdate")
      .attribute(LIGHTCC_ROWS)
      .attribute(LIGHTCC_MANY)
      .attribute("tables: string")
      .attribute("average: int")
      .input("gradients: T")
      .input("tokens: N * int64")
      .input("numbers: double")
      .stateful()
      .shapes(no_shapes)
      .add();
  Operation("LightccEmbeddingHash")
      .input("strings: string")
      .output("keys: int64")
      .output("checks: int32")
      .shapes(hash_shapes)
      .add();
  for (const char* device : kDevices) {
    add_lookup(device);
    add_update(device);
    add_hash(device);
  }
  for (const char* operation : {"LightccEmbeddingLookup", "LightccEmbeddingUpdate", "LightccEmbeddingHash"})
    add_refusal(operation);
}

[[gnu::constructor]] void enter() {
  if (!find_functions()) register_all();
}

}  // namespace
}  // namespace lightcc::tf
