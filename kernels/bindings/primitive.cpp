#include "primitive.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "task.h"

namespace accel {
namespace {

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

} // namespace

void KernelPrimitive::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto task = std::make_shared<Task>();
  task->kernel = spec_->kernel;
  task->name = spec_->name;
  task->params = params_;
  task->ensure_row_contiguous = spec_->ensure_row_contiguous;
  size_t dims = 0;
  for (const mx::array& a : inputs) dims += a.ndim();
  for (const mx::array& a : outputs) dims += a.ndim();
  task->reserve(inputs.size(), outputs.size(), dims);
  // Raw pointers are enough: mlx keeps the buffers of a node's inputs alive until what the node has queued on
  // the stream is done.
  for (const mx::array& a : inputs) {
    encoder.set_input_array(a);
    void* data = a.size() ? const_cast<char*>(a.data<char>()) : nullptr;
    task->add_input(data, accel_dtype_of(a.dtype()), a.shape().data(), a.strides().data(), int(a.ndim()));
  }
  for (mx::array& a : outputs) {
    a.set_data(mx::allocator::malloc(a.nbytes()));
    encoder.set_output_array(a);
    void* data = a.size() ? a.data<char>() : nullptr;
    task->add_output(data, accel_dtype_of(a.dtype()), a.shape().data(), a.strides().data(), int(a.ndim()));
  }
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
      a.dtypes == b.dtypes && a.ensure_row_contiguous == b.ensure_row_contiguous;
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
