#include "program.h"

#include <algorithm>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace accel {
namespace {

/* Throws std::invalid_argument. */
void view_shape(const View& view, mx::Shape& shape, const std::string& name) {
  const size_t n = shape.size();
  switch (view.kind) {
    case View::Split:
      if (n < 1 || view.parts < 1 || shape[n - 1] % view.parts) {
        throw std::invalid_argument("[" + name + "] a last dimension cannot be split into " +
                                    std::to_string(view.parts) + " parts");
      }
      shape.push_back(shape[n - 1] / view.parts);
      shape[n - 1] = view.parts;
      break;
    case View::Swap:
      if (n < 3) throw std::invalid_argument("[" + name + "] there are no dimensions 1 and 2 to exchange");
      std::swap(shape[1], shape[2]);
      break;
    case View::Merge:
      if (n < 2) throw std::invalid_argument("[" + name + "] there are no two dimensions to merge");
      shape[n - 2] *= shape[n - 1];
      shape.pop_back();
      break;
  }
}

mx::array placeholder(mx::Shape shape, mx::Dtype dtype) { return mx::array(std::move(shape), dtype, nullptr, {}); }

/* A copy in row-major order, made when the program runs. */
struct Copy {
  std::vector<int64_t> shape, strides;
  accel_array from;
  void* to;
};

/* What a program's run consists of, in order. */
struct Work {
  std::vector<std::pair<std::unique_ptr<Copy>, std::shared_ptr<Task>>> items; // one or the other

  void run() const {
    for (const auto& [copy, task] : items) {
      if (task) {
        task->run();
      } else {
        copy_row_major(copy->from, copy->to);
      }
    }
  }
};

bool row_contiguous(const mx::Shape& shape, const mx::Strides& strides) {
  int64_t expect = 1;
  for (int d = int(shape.size()) - 1; d >= 0; --d) {
    if (shape[d] != 1 && strides[d] != expect) return false;
    expect *= shape[d];
  }
  return true;
}

/* One evaluation. */
class Run {
 public:
  Run(const ProgramSpec& program, const Layout& layout, const std::vector<mx::array>& inputs,
      mx::cpu::CommandEncoder& encoder)
      : program_(program), layout_(layout), inputs_(inputs), encoder_(encoder) {}

  std::shared_ptr<Work> work = std::make_shared<Work>();

  void all(std::shared_ptr<const Params> params, std::vector<mx::array>& outputs) {
    results_.resize(program_.steps.size());
    for (size_t s = 0; s < program_.steps.size(); ++s) {
      for (size_t k = 0; k < layout_.shapes[s].size(); ++k) {
        results_[s].push_back(own_output(int(s), int(k), outputs));
      }
      const Step& step = program_.steps[s];
      std::vector<mx::array> args;
      args.reserve(step.sources.size() + step.fixed_end - step.fixed_begin);
      for (const Source& source : step.sources) args.push_back(look(source));
      args.insert(args.end(), inputs_.begin() + program_.n_inputs + step.fixed_begin,
                  inputs_.begin() + program_.n_inputs + step.fixed_end);
      // Nothing is donated: `holders` is a count that does not occur.
      work->items.emplace_back(nullptr, make_task(*step.spec, step.params ? step.params : params, args, results_[s], -1));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].data_shared_ptr()) continue;
      const mx::array seen = look(program_.outputs[i]);
      outputs[i].copy_shared_buffer(seen);
    }
    for (auto& step : results_) {
      for (auto& a : step) encoder_.add_temporary(std::move(a));
    }
  }

 private:
  /* The program's output that is this step's output as it is, or a temporary. */
  mx::array own_output(int step, int index, std::vector<mx::array>& outputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Source& o = program_.outputs[i];
      if (o.step == step && o.index == index && o.views.empty()) return outputs[i];
    }
    return placeholder(layout_.shapes[step][index], layout_.dtypes[step][index]);
  }

  mx::array look(const Source& source) {
    const mx::array& base = source.step < 0 ? inputs_[source.index] : results_[source.step][source.index];
    if (source.views.empty()) return base;
    mx::Shape shape = base.shape();
    mx::Strides strides = base.strides();
    mx::array from = base;
    for (const View& view : source.views) {
      const size_t n = shape.size();
      if (view.kind == View::Split) {
        strides.push_back(strides[n - 1]);
        strides[n - 1] *= shape[n - 1] / view.parts;
      } else if (view.kind == View::Swap) {
        std::swap(strides[1], strides[2]);
      } else if (shape[n - 2] != 1 && shape[n - 1] != 1 && strides[n - 2] != shape[n - 1] * strides[n - 1]) {
        from = copied(from, shape, strides);
        strides = from.strides();
        strides[n - 2] = strides[n - 1];
        strides.pop_back();
      } else {
        if (shape[n - 1] != 1) strides[n - 2] = strides[n - 1];
        strides.pop_back();
      }
      view_shape(view, shape, program_.name);
    }
    mx::array seen = placeholder(shape, base.dtype());
    mx::array::Flags flags = from.flags();
    flags.row_contiguous = row_contiguous(shape, strides);
    flags.col_contiguous = std::count_if(shape.begin(), shape.end(), [](int d) { return d != 1; }) <= 1 &&
        flags.row_contiguous;
    seen.copy_shared_buffer(from, strides, flags, from.data_size());
    encoder_.add_temporary(seen);
    return seen;
  }

  mx::array copied(const mx::array& from, const mx::Shape& shape, const mx::Strides& strides) {
    mx::array to = placeholder(shape, from.dtype());
    to.set_data(mx::allocator::malloc(to.nbytes()));
    encoder_.add_temporary(to);
    auto copy = std::make_unique<Copy>();
    copy->shape.assign(shape.begin(), shape.end());
    copy->strides.assign(strides.begin(), strides.end());
    copy->from = {to.size() ? const_cast<char*>(from.data<char>()) : nullptr, copy->shape.data(),
                  copy->strides.data(), int64_t(to.size()), int32_t(shape.size()), accel_dtype_of(from.dtype())};
    copy->to = to.size() ? to.data<char>() : nullptr;
    work->items.emplace_back(std::move(copy), nullptr);
    return to;
  }

  const ProgramSpec& program_;
  const Layout& layout_;
  const std::vector<mx::array>& inputs_;
  mx::cpu::CommandEncoder& encoder_;
  std::vector<std::vector<mx::array>> results_;
};

} // namespace

std::shared_ptr<const Layout> make_layout(const ProgramSpec& program, const std::vector<mx::array>& inputs) {
  auto layout = std::make_shared<Layout>();
  auto look = [&](const Source& source) {
    mx::Shape shape = source.step < 0 ? inputs[source.index].shape() : layout->shapes[source.step][source.index];
    const mx::Dtype dtype =
        source.step < 0 ? inputs[source.index].dtype() : layout->dtypes[source.step][source.index];
    for (const View& view : source.views) view_shape(view, shape, program.name);
    return placeholder(std::move(shape), dtype);
  };
  for (const Step& step : program.steps) {
    std::vector<mx::array> args;
    for (const Source& source : step.sources) args.push_back(look(source));
    args.insert(args.end(), inputs.begin() + program.n_inputs + step.fixed_begin,
                inputs.begin() + program.n_inputs + step.fixed_end);
    layout->shapes.emplace_back();
    layout->dtypes.emplace_back();
    step.spec->describe(args, layout->shapes.back(), layout->dtypes.back());
  }
  for (const Source& source : program.outputs) {
    const mx::array seen = look(source);
    layout->output_shapes.push_back(seen.shape());
    layout->output_dtypes.push_back(seen.dtype());
  }
  return layout;
}

void ProgramPrimitive::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& a : inputs) encoder.set_input_array(a);
  Run run(*program_, *layout_, inputs, encoder);
  run.all(params_, outputs);
  for (mx::array& a : outputs) encoder.set_output_array(a);
  encoder.dispatch([work = std::move(run.work)] { work->run(); });
}

void ProgramPrimitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[" + program_->name + "] these are CPU kernels; they cannot run on a GPU stream");
}

bool ProgramPrimitive::is_equivalent(const mx::Primitive& other) const {
  const auto& o = static_cast<const ProgramPrimitive&>(other);
  auto same_bits = [](const accel_param& x, const accel_param& y) { return x.i == y.i; };
  return program_ == o.program_ &&
      std::equal(params_->begin(), params_->end(), o.params_->begin(), o.params_->end(), same_bits);
}

std::vector<mx::Shape> ProgramPrimitive::output_shapes(const std::vector<mx::array>& inputs) {
  return make_layout(*program_, inputs)->output_shapes;
}

} // namespace accel
