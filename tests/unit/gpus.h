// Engines whose ranks have GPUs that are doubles, one each, and tensors there.
#pragma once
#include "device/cuda_objects.h"
#include "doubles/cuda_double.h"
#include "doubles/nccl_double.h"
#include "ranks.h"
#include "simulated.h"

namespace lightcc::test {

class GpuTest : public testing::Test {
 protected:
  GpuTest() {
    set_cuda(&CudaDouble::functions());
    set_nccl(&NcclDouble::functions());
  }
  ~GpuTest() override {
    set_cuda(nullptr);
    set_nccl(nullptr);
    EXPECT_EQ(nccl_.leaks(), 0u);
    if (expects_faults_) return;
    EXPECT_EQ(cuda_.faults(), std::vector<std::string>{}) << "seed " << cuda_.seed();
  }

  // A tensor in a rank's GPU, which a kernel fills on a stream of that rank.
  struct GpuTensor {
    GpuTest& gpus;
    int device;
    void* stream;
    float* data;
    size_t count;
    GpuTensor(GpuTest& gpus_, int rank, size_t count_, void* stream_)
        : gpus(gpus_),
          device(rank),
          stream(stream_),
          data(static_cast<float*>(gpus.cuda_.allocate(rank, std::max<size_t>(count_, 1) * sizeof(float)))),
          count(count_) {}
    ~GpuTensor() {
      gpus.cuda_.synchronize(device, stream);
      gpus.cuda_.release(data);
    }
    GpuTensor(const GpuTensor&) = delete;
    void fill(float value) { gpus.cuda_.fill(device, stream, data, count, value); }
    std::vector<float> read() { return gpus.cuda_.read(device, stream, data, count); }
  };
  void* stream_of(int rank) {
    void* stream = nullptr;
    check_cuda(CudaDouble::functions().create_stream(rank, &stream), "making a stream", rank);
    return stream;
  }
  static RequestPtr on_gpu(Engine& engine, Kind kind, const std::string& name, std::vector<GpuTensor*> inputs,
                           std::vector<GpuTensor*> outputs, std::vector<Shape> shapes = {}) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < inputs.size(); ++i)
      tensors.push_back({DType::float32, shapes.empty() ? Shape{int64_t(inputs[i]->count)} : shapes[i],
                         inputs[i]->data, outputs.empty() ? nullptr : outputs[i]->data});
    auto one = request(engine, kind, name, tensors);
    one->place = {DeviceKind::cuda, inputs[0]->device, inputs[0]->stream};
    one->what.device = DeviceKind::cuda;
    return one;
  }
  // An output that lies in host memory until the program takes it.
  std::vector<float> taken(Request& one, size_t tensor = 0) {
    Output& output = one.results[tensor];
    GpuTensor to(*this, one.place.device, size_t(count_of(output.shape)), one.place.stream);
    if (to.count > 0) output.gpu->copy_to(one.place, to.data, output.data, to.count * sizeof(float));
    output.gpu = nullptr;
    return to.read();
  }

  CudaDouble cuda_;
  NcclDouble nccl_{cuda_};
  Config config_;
  bool expects_faults_ = false;
};

}  // namespace lightcc::test
