// How an operation is told to TensorFlow: its inputs, outputs, attributes and shapes.
#pragma once
#include "api/tensorflow/c_api.h"

namespace lightcc::tf {

class ShapeHandle {
 public:
  explicit ShapeHandle(Shape* shape = api.NewShapeHandle()) : shape_(shape) {}
  ~ShapeHandle() { api.DeleteShapeHandle(shape_); }
  ShapeHandle(const ShapeHandle&) = delete;
  operator Shape*() const { return shape_; }

 private:
  Shape* shape_;
};

class Operation {
 public:
  explicit Operation(const char* name) : builder_(api.NewOpDefinitionBuilder(name)) {}
  Operation& input(const char* spec) { return api.OpDefinitionBuilderAddInput(builder_, spec), *this; }
  Operation& output(const char* spec) { return api.OpDefinitionBuilderAddOutput(builder_, spec), *this; }
  Operation& attribute(const char* spec) { return api.OpDefinitionBuilderAddAttr(builder_, spec), *this; }
  // Never called with false, which would have the same effect.
  Operation& stateful() { return api.OpDefinitionBuilderSetIsStateful(builder_, true), *this; }
  Operation& shapes(InferShapes infer) {
    return api.OpDefinitionBuilderSetShapeInferenceFunction(builder_, infer), *this;
  }
  void add() {
    Result result;
    api.RegisterOpDefinition(builder_, result);
  }

 private:
  OpBuilder* builder_;  // RegisterOpDefinition takes it
};

}  // namespace lightcc::tf
