#include "primitive.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "task.h"

namespace accel {

/* mx::array::is_donatable() asks for a single reference, but every output of a primitive holds its inputs. An array
 * is one shared pointer, whose count mlx does not show. */
long references(const mx::array& a) {
  static_assert(sizeof(mx::array) == sizeof(std::shared_ptr<void>));
  return reinterpret_cast<const std::shared_ptr<void>*>(&a)->use_count();
}

bool movable(const mx::array& in, const mx::array& out, long holders) {
  constexpr size_t kSlack = 16384; // bytes of a buffer that may go unused, as in mlx
  return references(in) == holders && in.data_shared_ptr()->is_owned() && in.flags().row_contiguous &&
      in.data_size() == in.size() && in.buffer_size() <= out.nbytes() + kSlack;
}

bool donatable(const mx::array& in, const mx::array& out, long holders) {
  return movable(in, out, holders) && in.data_shared_ptr().use_count() == 1;
}

int accel_dtype_of(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_: return ACCEL_BOOL;
    case mx::Dtype::Val::uint8: return ACCEL_UINT8;
    case mx::Dtype::Val::uint16: return ACCEL_UINT16;
    case mx::Dtype::Val::uint32: return ACCEL_UINT32;
    case mx::Dtype::Val::uint64: return ACCEL_UINT64;
    case mx::Dtype::Val::int8: return ACCEL_INT8;
    case mx::Dtype::Val::int16: return ACCEL_INT16;
    case mx::Dtype::Val::int32: return ACCEL_INT32;
    case mx::Dtype::Val::int64: return ACCEL_INT64;
    case mx::Dtype::Val::float16: return ACCEL_FLOAT16;
    case mx::Dtype::Val::float32: return ACCEL_FLOAT32;
    case mx::Dtype::Val::float64: return ACCEL_FLOAT64;
    case mx::Dtype::Val::bfloat16: return ACCEL_BFLOAT16;
    case mx::Dtype::Val::complex64: return ACCEL_COMPLEX64;
  }
  throw std::invalid_argument("this mlx has a dtype that CPU kernels do not know");
}

void Spec::describe(const std::vector<mx::array>& inputs, std::vector<mx::Shape>& to,
                    std::vector<mx::Dtype>& types) const {
  for (const ShapeRule& rule : shapes) to.push_back(rule.apply(inputs, name));
  for (const DtypeRule& rule : dtypes) types.push_back(rule.apply(inputs, name));
  for (size_t i = 0; i < donors.size(); ++i) {
    if (donors[i] < 0) continue;
    if (donors[i] >= int(inputs.size())) {
      throw std::invalid_argument("[" + name + "] there is no input " + std::to_string(donors[i]) + " to donate");
    }
    const mx::array& in = inputs[donors[i]];
    if (in.shape() != to[i] || in.dtype() != types[i]) {
      throw std::invalid_argument("[" + name + "] output " + std::to_string(i) +
                                  " must have the shape and dtype of the donated input " +
                                  std::to_string(donors[i]));
    }
  }
}

std::shared_ptr<Task> make_task(const Spec& spec, std::shared_ptr<const Params> params,
                                const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs,
                                long holders) {
  auto task = std::make_shared<Task>();
  task->kernel = spec.kernel;
  task->name = spec.name;
  task->params = std::move(params);
  task->ensure_row_contiguous = spec.ensure_row_contiguous;
  size_t dims = 0;
  for (const mx::array& a : inputs) dims += a.ndim();
  for (const mx::array& a : outputs) dims += a.ndim();
  task->reserve(inputs.size(), outputs.size(), dims);
  // Raw pointers are enough: mlx keeps the buffers of a node's inputs alive until what the node has queued on
  // the stream is done.
  for (const mx::array& a : inputs) {
    void* data = a.size() ? const_cast<char*>(a.data<char>()) : nullptr;
    task->add_input(data, accel_dtype_of(a.dtype()), a.shape().data(), a.strides().data(), int(a.ndim()));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    mx::array& a = outputs[i];
    const int donor = spec.donors.empty() ? -1 : spec.donors[i];
    if (donor >= 0 && donatable(inputs[donor], a, holders)) {
      a.copy_shared_buffer(inputs[donor]);
    } else {
      a.set_data(mx::allocator::malloc(a.nbytes()));
      if (donor >= 0) task->add_copy(size_t(donor), i);
    }
    void* data = a.size() ? a.data<char>() : nullptr;
    task->add_output(data, accel_dtype_of(a.dtype()), a.shape().data(), a.strides().data(), int(a.ndim()));
  }
  return task;
}

void KernelPrimitive::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& a : inputs) encoder.set_input_array(a);
  auto task = make_task(*spec_, params_, inputs, outputs, long(outputs.size()));
  for (mx::array& a : outputs) encoder.set_output_array(a);
  encoder.dispatch([task = std::move(task)] { task->run(); });
}

void KernelPrimitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[" + spec_->name + "] this is a CPU kernel; it cannot run on a GPU stream");
}

std::vector<mx::array> KernelPrimitive::vjp(const std::vector<mx::array>& primals,
                                            const std::vector<mx::array>& cotangents,
                                            const std::vector<int>& argnums, const std::vector<mx::array>&) {
  if (!spec_->gradient) {
    throw std::invalid_argument("[" + spec_->name + "] this kernel has no gradient: none was given as vjp=");
  }
  return spec_->gradient->vjp(primals, cotangents, argnums);
}

std::vector<mx::array> KernelPrimitive::jvp(const std::vector<mx::array>& primals,
                                            const std::vector<mx::array>& tangents,
                                            const std::vector<int>& argnums) {
  if (!spec_->gradient) {
    throw std::invalid_argument("[" + spec_->name + "] this kernel has no gradient: none was given as vjp=");
  }
  // The vjp u -> J^T u is linear, and its own vjp is J.
  std::vector<mx::array> zeros;
  for (size_t i = 0; i < spec_->shapes.size(); ++i) {
    zeros.push_back(mx::zeros(spec_->shapes[i].apply(primals, spec_->name),
                              spec_->dtypes[i].apply(primals, spec_->name), stream()));
  }
  auto transposed = [&](const std::vector<mx::array>& u) { return spec_->gradient->vjp(primals, u, argnums); };
  return mx::vjp(transposed, zeros, tangents).second;
}

std::pair<std::vector<mx::array>, std::vector<int>> KernelPrimitive::vmap(const std::vector<mx::array>&,
                                                                          const std::vector<int>&) {
  throw std::invalid_argument("[" + spec_->name + "] vmap is not supported for CPU kernels");
}

bool KernelPrimitive::is_equivalent(const mx::Primitive& other) const {
  // mlx compares primitives of one type only.
  const auto& o = static_cast<const KernelPrimitive&>(other);
  const Spec &a = *spec_, &b = *o.spec_;
  auto same_bits = [](const accel_param& x, const accel_param& y) { return x.i == y.i; };
  if (params_ != o.params_ &&
      !std::equal(params_->begin(), params_->end(), o.params_->begin(), o.params_->end(), same_bits)) {
    return false;
  }
  if (&a == &b) return true;
  const bool gradients = a.gradient == b.gradient || (a.gradient && b.gradient && a.gradient->same(*b.gradient));
  return gradients && a.kernel->fn == b.kernel->fn && a.name == b.name && a.shapes == b.shapes &&
      a.dtypes == b.dtypes && a.ensure_row_contiguous == b.ensure_row_contiguous && a.donors == b.donors;
}

std::vector<mx::Shape> KernelPrimitive::output_shapes(const std::vector<mx::array>& inputs) {
  std::vector<mx::Shape> shapes;
  for (const ShapeRule& rule : spec_->shapes) {
    if (rule.is_static()) {
      throw std::invalid_argument(
          "[" + spec_->name + "] an output shape is given as numbers, so this call cannot be part of a shapeless "
          "compiled function; describe it by the inputs, for example like(0, last=N)");
    }
    shapes.push_back(rule.apply(inputs, spec_->name));
  }
  return shapes;
}

} // namespace accel
