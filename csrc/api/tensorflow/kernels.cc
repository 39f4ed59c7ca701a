// The kernels: each hands its tensors to the engine and returns; the engine's callbacks make the outputs and tell
// TensorFlow that it is done, from whichever thread runs the engine. Tensors are in host memory, also where the
// operation is placed on a GPU: TensorFlow copies them.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/tensorflow/codec.h"
#include "api/tensorflow/kernel.h"

namespace lightcc::tf {
namespace {

struct Form {
  const char* operation;
  int kind;
  bool several = false;
};
constexpr Form kForms[] = {{"HorovodAllreduce", LIGHTCC_ALLREDUCE},
                           {"HorovodGroupedAllreduce", LIGHTCC_ALLREDUCE, true},
                           {"HorovodReducescatter", LIGHTCC_REDUCESCATTER},
                           {"HorovodGroupedReducescatter", LIGHTCC_REDUCESCATTER, true},
                           {"HorovodAllgather", LIGHTCC_ALLGATHER},
                           {"HorovodGroupedAllgather", LIGHTCC_ALLGATHER, true},
                           {"HorovodBroadcast", LIGHTCC_BROADCAST},
                           {"HorovodAlltoall", LIGHTCC_ALLTOALL},
                           {"HorovodBarrier", LIGHTCC_BARRIER}};
constexpr DataType kDataTypes[] = {kUint8, kInt8,  kUint16, kInt16, kInt32,   kInt64,  // by lightcc_dtype
                                   kHalf,  kFloat, kDouble, kBool,  kBfloat16, kUint32, kUint64};
constexpr size_t kBytes[] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2, 4, 8};

// The iterations of a loop that TensorFlow may run at a time, 10 unless told otherwise, need names of their own.
constexpr int64_t kIterations = 16;
// And sets of their own, so the number of a set that an operation is given is below this.
constexpr int64_t kSets = (int64_t(INT32_MAX) + 1) / kIterations;

int dtype_of(const Tensor* tensor) {
  for (int code = 0; code < int(std::size(kDataTypes)); ++code)
    if (kDataTypes[code] == api.TensorType(tensor)) return code;
  return -1;  // refused by the core; the operation's definition lets no such type through
}

// ---- one operation of a graph, or all eager calls with the same attributes

struct Kernel {
  Form form = {};
  int group = 0, op = LIGHTCC_SUM, root = 0, set = 0;
  double pre = 1, post = 1;
  CodecText codec;
  std::string name;    // empty: the core numbers it
  bool waits = false;  // TensorFlow does nothing else meanwhile, so this thread may run the engine
};

// In a graph an operation is known by its node's name, which functions that are inlined make longer, and so unique.
void name(Kernel& kernel, Construction* construction, Attributes& attributes) {
  kernel.name = attributes.text("tensor_name");
  kernel.waits = attributes.text("unique").empty();
  if (kernel.waits || !kernel.name.empty()) return;
  const StringView node = api.OpKernelConstruction_GetName(construction);
  kernel.name.assign(node.data, node.size);
  if (attributes.number("ignore_name_scope")) kernel.name.erase(0, kernel.name.rfind('/') + 1);
}

// What is wrong is said here, and not by each run.
void codec(Kernel& kernel, Attributes& attributes) {
  std::string why;
  if (!parse_codec(attributes.text("codec"), &kernel.codec, &why)) return attributes.refuse(why);
  if (id_of(kernel.codec) < 0) attributes.refuse(lightcc_error());
}

void set(Kernel& kernel, Attributes& attributes) {
  const int64_t number = attributes.number("set");
  if (number < 0 || number >= kSets)
    return attributes.refuse("set is " + std::to_string(number) + ", not 0 to " + std::to_string(kSets - 1));
  kernel.set = int(number);
}

template <size_t form> void* create(Construction* construction) {
  auto kernel = std::make_unique<Kernel>();
  kernel->form = kForms[form];
  const int kind = kernel->form.kind;
  Attributes attributes(construction);
  kernel->group = attributes.integer("process_set_id");
  if (kind == LIGHTCC_BROADCAST) kernel->root = attributes.integer("root_rank");
  if (kind == LIGHTCC_ALLREDUCE || kind == LIGHTCC_REDUCESCATTER) {
    kernel->op = attributes.integer("reduce_op");
    kernel->pre = attributes.factor("prescale_factor");
    kernel->post = attributes.factor("postscale_factor");
  }
  if (kind == LIGHTCC_ALLREDUCE) {
    codec(*kernel, attributes);
    set(*kernel, attributes);
  }
  if (kind != LIGHTCC_BARRIER) name(*kernel, construction, attributes);
  attributes.complain();
  return kernel.release();
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

// ---- one run of it

class Run {
 public:
  Run(const Kernel& kernel, Context* context, Done* done) : kernel_(kernel), context_(context), done_(done) {}

  void start() {
    if (!take_inputs() || !take_splits()) return fail(kInvalidArgument, result_.text());
    const std::string name = name_here();
    const int64_t status = submit(name.empty() ? nullptr : name.c_str());
    if (status < 0) fail(code_of_refusal(int(-status)), lightcc_error());  // else this may be gone
  }

 private:
  bool take_inputs() {
    const int kind = kernel_.form.kind;
    // Behind the tensors: the token, and for an alltoall the splits; a barrier has nothing.
    const int tensors = kind == LIGHTCC_BARRIER ? 0 : api.NumInputs(context_) - (kind == LIGHTCC_ALLTOALL ? 2 : 1);
    for (int i = 0; i < tensors; ++i) {
      Tensor* tensor = nullptr;
      api.GetInput(context_, i, &tensor, result_);
      if (!result_.ok()) return false;
      lightcc_tensor& added = tensors_.emplace_back();
      added.input = api.TensorData(tensor);
      added.dtype = dtype_of(tensor);
      added.ndim = api.NumDims(tensor);
      for (int d = 0; d < added.ndim; ++d) shapes_.push_back(api.Dim(tensor, d));
      api.DeleteTensor(tensor);  // the context keeps the memory; with a second owner it could not be the output's
      if ((kind == LIGHTCC_ALLREDUCE || kind == LIGHTCC_BROADCAST) && !make_output(i)) return false;
    }
    return true;
  }

  // In the input's memory if nobody else needs that.
  bool make_output(int i) {
    lightcc_tensor& tensor = tensors_.back();
    const int64_t* shape = shapes_.data() + shapes_.size() - size_t(tensor.ndim);
    tensor.output = pooled_output(i, shape, tensor.ndim);
    if (tensor.output) return true;
    if (!result_.ok()) return false;
    int forwarded = -1;
    Tensor* output = api.ForwardInputOrAllocateOutput(context_, &i, 1, i, shape, tensor.ndim, &forwarded, result_);
    if (!result_.ok()) return false;
    tensor.output = api.TensorData(output);
    api.DeleteTensor(output);
    return true;
  }

  bool take_splits() {
    if (kernel_.form.kind != LIGHTCC_ALLTOALL) return true;
    Tensor* splits = nullptr;
    api.GetInput(context_, 1, &splits, result_);
    if (!result_.ok()) return false;
    const auto* values = static_cast<const int32_t*>(api.TensorData(splits));
    const bool vector = api.NumDims(splits) == 1;
    if (vector) splits_.assign(values, values + api.Dim(splits, 0));
    api.DeleteTensor(splits);
    const int members = lightcc_group_size(kernel_.group);
    if (vector && (splits_.empty() || members < 0 || splits_.size() == size_t(members))) return cut();
    api.SetStatus(result_, kInvalidArgument,
                  ("splits must be one number of rows for each of the " + std::to_string(members) +
                   " ranks of the process set, or empty").c_str());
    return false;
  }

  // Rows behind the splits stay here. Whatever is wrong with the splits is said by the core.
  bool cut() {
    int64_t sum = 0;
    for (int32_t rows : splits_) sum += rows;
    if (!splits_.empty() && !shapes_.empty() && sum >= 0 && sum < shapes_[0]) shapes_[0] = sum;
    return true;
  }

  int64_t submit(const char* name) {
    const int64_t* shape = shapes_.data();
    for (lightcc_tensor& tensor : tensors_) {
      tensor.shape = shape;
      shape += tensor.ndim;
    }
    const int codec = id_of(kernel_.codec);
    if (codec < 0) return codec;
    lightcc_request request{};
    request.size = sizeof request;
    request.tensor_size = sizeof(lightcc_tensor);
    request.tensors = tensors_.data();
    request.count = int32_t(tensors_.size());
    request.kind = kernel_.form.kind;
    request.flags = kernel_.waits ? LIGHTCC_BLOCK : 0;
    request.group = kernel_.group;
    request.name = name;
    request.op = kernel_.op;
    request.root = kernel_.root;
    request.prescale = kernel_.pre;
    request.postscale = kernel_.post;
    request.splits = splits_.empty() ? nullptr : splits_.data();
    request.done = on_done;
    request.allocate = on_allocate;
    request.received = on_received;
    request.codec = codec;
    request.set = set_here();
    request.context = this;
    return lightcc_submit(&request);
  }

  std::string name_here() const {
    // By its name what is left behind is found again in each iteration, of which none may overtake another then.
    if (kernel_.name.empty() || kernel_.waits || kernel_.codec.kind) return kernel_.name;
    const int64_t iteration = iteration_here();
    return iteration > 0 ? kernel_.name + "@" + std::to_string(iteration) : kernel_.name;
  }

  // Iterations of a loop wait for what those before them have submitted, or run beside them: together they are no set.
  int32_t set_here() const {
    return kernel_.set ? int32_t(kernel_.set + iteration_here() * kSets) : 0;
  }
  int64_t iteration_here() const { return api.GetIterId(context_) % kIterations; }

  // Memory for a large output of an eager call, which TensorFlow would put into new pages each time. The tensor gives
  // it back when its last reference is gone. nullptr: to be allocated by TensorFlow, or a failure.
  void* pooled_output(int index, const int64_t* shape, int ndim) {
    const size_t bytes = bytes_of(index, shape, ndim);
    const int dtype = dtype_at(index);
    if (!kernel_.waits || bytes < LIGHTCC_POOLED_BYTES || dtype < 0) return nullptr;
    void* data = lightcc_alloc_output(int64_t(bytes));
    if (!data) return nullptr;
    Tensor* output = api.NewTensor(kDataTypes[size_t(dtype)], shape, ndim, data, bytes,
                                   [](void* memory, size_t, void*) { lightcc_free(memory); }, nullptr);
    api.SetOutput(context_, index, output, result_);
    api.DeleteTensor(output);
    return result_.ok() ? data : nullptr;
  }

  int dtype_at(int index) const { return tensors_[size_t(index)].dtype; }
  size_t bytes_of(int index, const int64_t* shape, int ndim) const {
    const int dtype = dtype_at(index);
    size_t bytes = dtype < 0 ? 0 : kBytes[size_t(dtype)];
    for (int d = 0; d < ndim; ++d) bytes *= size_t(shape[d]);
    return bytes;
  }

  void* allocate(int index, const int64_t* shape, int ndim) {
    if (void* data = pooled_output(index, shape, ndim)) return data;
    if (!result_.ok()) return nullptr;
    const auto dtype = size_t(dtype_at(index));
    const size_t bytes = bytes_of(index, shape, ndim);
    Tensor* output = api.AllocateOutput(context_, index, kDataTypes[dtype], shape, ndim, bytes, result_);
    if (!result_.ok()) return nullptr;
    void* data = api.TensorData(output);
    api.DeleteTensor(output);
    return data;
  }

  void receive(const int32_t* rows, int count) {
    const int64_t shape = count;
    Tensor* output = api.AllocateOutput(context_, 1, kInt32, &shape, 1, size_t(count) * sizeof *rows, result_);
    if (!result_.ok()) return;
    std::memcpy(api.TensorData(output), rows, size_t(count) * sizeof *rows);
    api.DeleteTensor(output);
  }

  void fail(StatusCode code, const std::string& why) {
    const int rank = lightcc_rank();  // -1 outside of an epoch
    const std::string here = rank < 0 ? ": " : " on rank " + std::to_string(rank) + ": ";
    api.SetStatus(result_, code, (kernel_.form.operation + here + why).c_str());
    finish();
  }
  void finish() {
    if (!result_.ok()) api.OpKernelContext_Failure(context_, result_);
    Completion done = std::move(done_);
    delete this;
    done();
  }

  static void on_done(void* run, int status, const char* text) {
    auto& self = *static_cast<Run*>(run);
    status == LIGHTCC_OK ? self.finish() : self.fail(code_of(status), text);
  }
  static void* on_allocate(void* run, int index, const int64_t* shape, int ndim) {
    return static_cast<Run*>(run)->allocate(index, shape, ndim);
  }
  static void on_received(void* run, int, const int32_t* rows, int count) {
    static_cast<Run*>(run)->receive(rows, count);
  }

  const Kernel& kernel_;  // outlives its runs
  Context* const context_;
  Completion done_;
  Result result_;
  std::vector<lightcc_tensor> tensors_;
  std::vector<int64_t> shapes_;  // of all tensors, one behind the other
  std::vector<int32_t> splits_;
};

void compute(void* kernel, Context* context, Done* done) {
  (new Run(*static_cast<const Kernel*>(kernel), context, done))->start();
}

// ---- registration

template <size_t... form> void add_collectives(const char* device, std::index_sequence<form...>) {
  const auto one = [&](const Form& what, Create make) {
    KernelBuilder* builder = api.NewAsyncKernelBuilder(what.operation, device, make, compute, destroy);
    if (what.kind == LIGHTCC_BARRIER) return add_kernel(what.operation, builder, {});
    if (what.kind == LIGHTCC_ALLTOALL)
      return add_kernel(what.operation, builder, {"tensor", "splits", "token", "output", "received_splits"});
    add_kernel(what.operation, builder,
               {what.several ? "tensors" : "tensor", "token", what.several ? "outputs" : "output"});
  };
  (one(kForms[form], create<form>), ...);
}

}  // namespace

void register_kernels() {
  for (const char* device : kDevices) add_collectives(device, std::make_index_sequence<std::size(kForms)>());
  for (const Form& form : kForms) add_refusal(form.operation);
  register_numbers();
}

}  // namespace lightcc::tf
