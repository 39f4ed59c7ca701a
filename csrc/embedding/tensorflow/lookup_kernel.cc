// LightccEmbeddingLookup: the rows of several tables in one exchange. Its inputs are, N of each, leaves (which carry
// gradients, and nothing else), keys and checks, and whether the rows are trained; its outputs, N of each, are rows,
// inverse and tokens.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "embedding/tensorflow/embedding_run.h"
#include "embedding/tensorflow/kernels.h"
#include "embedding/tensorflow/trained_lookups.h"

namespace lightcc::tf {
namespace {

class LookupRun : public EmbeddingRun {
 public:
  using EmbeddingRun::EmbeddingRun;

 private:
  size_t count() const { return kernel_.tables.size(); }
  size_t keys_at(size_t i) const { return count() + i; }
  size_t checks_at(size_t i) const { return 2 * count() + i; }
  bool is_training() const { return *static_cast<const bool*>(data(3 * count())); }

  void make_call(std::vector<BoundTable> tables) override {
    std::vector<lightcc_embedding_wanted> wanted(count());
    for (size_t i = 0; i < count(); ++i) {
      if (api.TensorType(input(i)) != tables[i].dtype)
        return fail(kInvalidArgument, "table '" + tables[i].name + "' has rows of another dtype");
      wanted[i].size = sizeof wanted[i];
      wanted[i].table = tables[i].table;
      wanted[i].keys = static_cast<const int64_t*>(data(keys_at(i)));
      wanted[i].count = rows(keys_at(i));
      if (rows(checks_at(i)) == wanted[i].count) wanted[i].checks = static_cast<const uint32_t*>(data(checks_at(i)));
    }
    lightcc_embedding_call* call = nullptr;
    const uint32_t flags = is_training() ? LIGHTCC_EMBEDDING_TRAINING : 0;
    int status = lightcc_embedding_lookup(tables[0].group, wanted.data(), int(count()), flags, &call);
    if (status) return fail(code_of(status), lightcc_embedding_error());
    const auto held = std::make_shared<HeldCall>(call);
    std::string text;
    status = call_thread().finish(call, &text);
    if (status) return fail(code_of(status), text);
    for (size_t i = 0; i < count() && ok(); ++i) make_outputs(i, tables[i], held);
  }

  void make_outputs(size_t i, const BoundTable& table, const std::shared_ptr<HeldCall>& held) {
    lightcc_embedding_found found{};
    found.size = sizeof found;
    if (const int status = lightcc_embedding_get_found(held->get(), int(i), &found))
      return fail(code_of(status), lightcc_embedding_error());
    make_rows(int(i), table, found, held);
    // A copy: TensorFlow may write other numbers into the tensor, and the update needs the lookup's own.
    if (void* inverse = ok() ? allocate(int(count() + i), kInt64, found.count) : nullptr)
      std::memcpy(inverse, found.inverse, size_t(found.count) * sizeof(int64_t));
    void* token = ok() ? allocate(int(2 * count() + i), kInt64, 1, true) : nullptr;
    if (!token) return;
    *static_cast<int64_t*>(token) =
        is_training() ? trained_lookups().add(table.number, {held, int(i), found.padded}) : 0;
  }

  // In the call's memory, which the tensor keeps.
  void make_rows(int index, const BoundTable& table, const lightcc_embedding_found& found,
                 const std::shared_ptr<HeldCall>& held) {
    const int64_t shape[] = {found.padded, table.dim};
    const auto drop = [](void*, size_t, void* kept) { delete static_cast<std::shared_ptr<HeldCall>*>(kept); };
    set_output(index, OwnedTensor(api.NewTensor(table.dtype, shape, 2, found.rows,
                                                size_t(found.padded) * table.row_bytes(), drop,
                                                new std::shared_ptr<HeldCall>(held))));
  }
};

void compute_lookup(void* kernel, Context* context, Done* done) {
  (new LookupRun("LightccEmbeddingLookup", *static_cast<const EmbeddingKernel*>(kernel), context, done))->start();
}

}  // namespace

void add_lookup(const char* device) {
  add_kernel("LightccEmbeddingLookup",
             api.NewAsyncKernelBuilder("LightccEmbeddingLookup", device, create_embedding_kernel, compute_lookup,
                                       destroy_embedding_kernel),
             {"leaves", "keys", "checks", "training", "rows", "inverse", "tokens"});
}

}  // namespace lightcc::tf
