// The operations as TensorFlow knows them: inputs, outputs, attributes and shapes.
//
// Those that move data are stateless, so that TensorFlow runs them as soon as their inputs are there, many at a time;
// stateful ones it puts into one chain. What it does to stateless ones besides is prevented by two arguments:
//   unique  an attribute, other for each operation of a graph: equal ones would be merged;
//   token   an input that only running the graph makes: operations on constants would run once, ahead of the graph.
#include <cstdint>
#include <initializer_list>

#include "api/tensorflow/operation.h"

namespace lightcc::tf {
namespace {

void same_shapes(ShapeContext* context, Status* status) {
  const int tensors = int(api.ShapeInferenceContextNumInputs(context)) - 1;  // the last is the token
  for (int i = 0; i < tensors && api.GetCode(status) == kOk; ++i) {
    ShapeHandle shape;
    api.ShapeInferenceContextGetInput(context, i, shape, status);
    api.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
}

// Input `i` with another, unknown number of rows.
void other_rows(ShapeContext* context, int i, Status* status) {
  ShapeHandle input, checked, row, result, rows(api.ShapeInferenceContextVectorFromSize(context, size_t(-1)));
  api.ShapeInferenceContextGetInput(context, i, input, status);
  api.ShapeInferenceContextWithRankAtLeast(context, input, 1, checked, status);
  if (api.GetCode(status) != kOk) return;
  api.ShapeInferenceContextSubshape(context, checked, 1, INT64_MAX, row, status);
  if (api.GetCode(status) != kOk) return;
  api.ShapeInferenceContextConcatenateShapes(context, rows, row, result, status);
  if (api.GetCode(status) == kOk) api.ShapeInferenceContextSetOutput(context, i, result, status);
}
void all_other_rows(ShapeContext* context, Status* status) {
  const int tensors = int(api.ShapeInferenceContextNumInputs(context)) - 1;
  for (int i = 0; i < tensors && api.GetCode(status) == kOk; ++i) other_rows(context, i, status);
}
void alltoall_shapes(ShapeContext* context, Status* status) {
  other_rows(context, 0, status);
  ShapeHandle members(api.ShapeInferenceContextVectorFromSize(context, size_t(-1)));
  if (api.GetCode(status) == kOk) api.ShapeInferenceContextSetOutput(context, 1, members, status);
}
void scalar(ShapeContext* context, Status* status) {
  ShapeHandle shape(api.ShapeInferenceContextScalar(context));
  api.ShapeInferenceContextSetOutput(context, 0, shape, status);
}
void nothing(ShapeContext*, Status*) {}

#define LIGHTCC_TYPES "{uint8, int8, uint16, int16, int32, int64, uint32, uint64, half, float, double, bool, bfloat16}"

Operation one(const char* name) {
  return Operation(name).attribute("T: " LIGHTCC_TYPES).input("tensor: T").output("output: T");
}
Operation several(const char* name) {
  return Operation(name).attribute("T: list(" LIGHTCC_TYPES ") >= 1").input("tensors: T").output("outputs: T");
}
Operation on_data(Operation operation) {
  return operation.input("token: int32")
      .attribute("process_set_id: int = 0")
      .attribute("tensor_name: string = ''")
      .attribute("unique: string = ''")
      .attribute("ignore_name_scope: int = 0");
}
// Factors are the bits of a double (here of 1): a float attribute has no more than 24.
Operation reducing(Operation operation) {
  return on_data(operation)
      .attribute("reduce_op: int")
      .attribute("prescale_factor: int = 4607182418800017408")
      .attribute("postscale_factor: int = 4607182418800017408");
}

}  // namespace

void register_operations() {
  for (const Operation& operation : {one("HorovodAllreduce"), several("HorovodGroupedAllreduce")})
    reducing(operation)
        .attribute("codec: string = ''")  // codec.h
        .attribute("set: int = 0")        // of lightcc_request
        .shapes(same_shapes)
        .add();
  reducing(one("HorovodReducescatter")).shapes(all_other_rows).add();
  reducing(several("HorovodGroupedReducescatter")).shapes(all_other_rows).add();
  on_data(one("HorovodAllgather")).shapes(all_other_rows).add();
  on_data(several("HorovodGroupedAllgather")).shapes(all_other_rows).add();
  on_data(one("HorovodBroadcast")).attribute("root_rank: int").shapes(same_shapes).add();
  on_data(one("HorovodAlltoall").input("splits: int32").output("received_splits: int32")).shapes(alltoall_shapes).add();

  Operation("HorovodBarrier").attribute("process_set_id: int = 0").stateful().shapes(nothing).add();
  for (const char* number : {"HorovodToken", "HorovodJoin", "HorovodRank", "HorovodLocalRank", "HorovodLocalSize"})
    Operation(number).output("output: int32").stateful().shapes(scalar).add();
  for (const char* number : {"HorovodSize", "HorovodProcessSetIncluded"})
    Operation(number).output("output: int32").attribute("process_set_id: int = 0").stateful().shapes(scalar).add();
}

}  // namespace lightcc::tf
