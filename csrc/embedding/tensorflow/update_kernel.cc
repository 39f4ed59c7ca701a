// LightccEmbeddingUpdate: one step of several tables in one exchange. Its inputs are, N of each, gradients (rows, the
// padding of lookups among them) and tokens (for each row, that of its lookup), and the numbers of each table's step.
// The rows of one lookup are one behind the other.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "embedding/tensorflow/embedding_run.h"
#include "embedding/tensorflow/kernels.h"
#include "embedding/tensorflow/trained_lookups.h"

namespace lightcc::tf {
namespace {

constexpr int64_t kNumbers = 7;  // of a step: lr, beta1, beta2, eps, l1, l2, l21

class UpdateRun : public EmbeddingRun {
 public:
  using EmbeddingRun::EmbeddingRun;

 private:
  size_t count() const { return kernel_.tables.size(); }

  void make_call(std::vector<BoundTable> tables) override {
    std::vector<std::vector<lightcc_embedding_gradient>> gradients(count());
    std::vector<lightcc_embedding_step> steps(count());
    std::vector<int64_t> newest(count(), 0);
    for (size_t i = 0; i < count() && ok(); ++i) {
      gradients[i] = gradients_of(i, tables[i], &newest[i]);
      steps[i] = step_of(i, tables[i], gradients[i]);
    }
    if (!ok()) return;
    lightcc_embedding_call* call = nullptr;
    int status = lightcc_embedding_update(tables[0].group, steps.data(), int(count()), kernel_.flags, &call);
    if (status) return fail(code_of(status), lightcc_embedding_error());
    const HeldCall held(call);
    std::string text;
    status = call_thread().finish(call, &text);
    for (size_t i = 0; i < count(); ++i) trained_lookups().forget_until(tables[i].number, newest[i]);
    if (status) fail(code_of(status), text);
  }

  lightcc_embedding_step step_of(size_t i, const BoundTable& table,
                                 const std::vector<lightcc_embedding_gradient>& gradients) const {
    const double* numbers = static_cast<const double*>(data(2 * count())) + int64_t(i) * kNumbers;
    lightcc_embedding_step step{};
    step.size = sizeof step;
    step.gradient_count = int32_t(gradients.size());
    step.table = table.table;
    step.gradients = gradients.data();
    double* const fields[] = {&step.lr, &step.beta1, &step.beta2, &step.eps, &step.l1, &step.l2, &step.l21};
    for (double* field : fields) *field = *numbers++;
    return step;
  }

  // One for each lookup of the table.
  std::vector<lightcc_embedding_gradient> gradients_of(size_t i, const BoundTable& table, int64_t* newest) {
    std::vector<lightcc_embedding_gradient> gradients;
    const auto* tokens = static_cast<const int64_t*>(data(count() + i));
    const auto* values = static_cast<const std::byte*>(data(i));
    const int64_t all = rows(count() + i);
    if (api.TensorType(input(i)) != table.dtype || api.NumDims(input(i)) != 2 || rows(i) != all ||
        api.Dim(input(i), 1) != table.dim)
      return fail(kInvalidArgument, "table '" + table.name + "' got gradients of another dtype or shape"), gradients;
    for (int64_t at = 0; at < all;) {
      const TrainedLookup* lookup = trained_lookups().find(table.number, tokens[at]);
      if (!lookup) return fail(kFailedPrecondition, no_lookup(table)), gradients;
      const int64_t end = at + lookup->padded;
      if (end > all || std::any_of(tokens + at, tokens + end, [&](int64_t token) { return token != tokens[at]; }))
        return fail(kInvalidArgument, "table '" + table.name + "' got gradients of a part of a lookup"), gradients;
      lightcc_embedding_gradient& added = gradients.emplace_back();
      added.lookup = lookup->call->get();
      added.index = lookup->index;
      added.values = values + size_t(at) * table.row_bytes();
      *newest = std::max(*newest, tokens[at]);
      at = end;
    }
    return gradients;
  }

  static std::string no_lookup(const BoundTable& table) {
    return "table '" + table.name + "' got gradients of a lookup that was not for training (training=True), was "
           "updated already, or has " + std::to_string(TrainedLookups::kMost) + " training lookups without an update "
           "after it; or of other ranks' lookups: leave tables out of DistributedGradientTape";
  }
};

void* create_update(Construction* construction) {
  Attributes attributes(construction);
  const bool average = attributes.number("average") != 0;
  attributes.complain();
  auto* kernel = static_cast<EmbeddingKernel*>(create_embedding_kernel(construction));
  kernel->flags = average ? LIGHTCC_EMBEDDING_AVERAGE : 0;
  return kernel;
}

void compute_update(void* kernel, Context* context, Done* done) {
  (new UpdateRun("LightccEmbeddingUpdate", *static_cast<const EmbeddingKernel*>(kernel), context, done))->start();
}

}  // namespace

void add_update(const char* device) {
  add_kernel("LightccEmbeddingUpdate",
             api.NewAsyncKernelBuilder("LightccEmbeddingUpdate", device, create_update, compute_update,
                                       destroy_embedding_kernel),
             {"gradients", "tokens", "numbers"});
}

}  // namespace lightcc::tf
