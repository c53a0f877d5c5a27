/* The lazy mlx primitive that runs a CPU kernel. */
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "library.h"
#include "mlx/primitives.h"
#include "rules.h"
#include "task.h"

namespace accel {

/* A gradient given by the user. Implemented where Python is known (gradient.cpp). */
struct Gradient {
  virtual ~Gradient() = default;
  virtual std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                                     const std::vector<mx::array>& cotangents,
                                     const std::vector<int>& argnums) const = 0;
  virtual bool same(const Gradient& other) const = 0;
};

/* What a call does, apart from its inputs; shared by graph nodes and queued tasks, never changed. */
struct Spec {
  std::shared_ptr<const Kernel> kernel;
  std::string name;
  std::vector<ShapeRule> shapes;
  std::vector<DtypeRule> dtypes;
  bool ensure_row_contiguous = true;
  std::shared_ptr<const Gradient> gradient; // may be null
  // Per output, the input whose elements it holds when the kernel is entered, -1 for none. Empty: none at all.
  std::vector<int> donors;

  /* Shapes and dtypes of the outputs. Throws std::invalid_argument where a rule or a donation does not fit. */
  void describe(const std::vector<mx::array>& inputs, std::vector<mx::Shape>& shapes,
                std::vector<mx::Dtype>& dtypes) const;
};

using Params = std::vector<accel_param>;

class KernelPrimitive : public mx::Primitive {
 public:
  KernelPrimitive(mx::Stream stream, std::shared_ptr<const Spec> spec, std::shared_ptr<const Params> params)
      : Primitive(stream), spec_(std::move(spec)), params_(std::move(params)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums, const std::vector<mx::array>& outputs) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  const char* name() const override { return spec_->name.c_str(); }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  std::shared_ptr<const Spec> spec_;
  std::shared_ptr<const Params> params_;
};

/* How many mx::array objects are this array. */
long references(const mx::array& a);
/* True if `out` may take the memory of `in`; holders: how many references to it mean that nobody else has it. */
bool donatable(const mx::array& in, const mx::array& out, long holders);
/* The same but for other arrays, and tasks that are still queued, which hold the memory of `in`. */
bool movable(const mx::array& in, const mx::array& out, long holders);

/* The number of a dtype in the kernel ABI. Throws std::invalid_argument. */
int accel_dtype_of(mx::Dtype dtype);

/* The call as a task on `outputs`, which get their memory here: an input's where that is donated and nobody else
 * holds it, else new memory (to which the task copies a donated input first).
 *
 * holders: how many references to an input mean that nobody else has it. */
std::shared_ptr<Task> make_task(const Spec& spec, std::shared_ptr<const Params> params,
                                const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs, long holders);

} // namespace accel
