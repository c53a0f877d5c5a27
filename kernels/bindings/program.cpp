#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "scratch.h"
#include "thread_pool.h"

namespace accel {
namespace {

constexpr size_t kAlign = 64;

/* Throws std::invalid_argument. */
template <class Shape>
void view_shape(const View& view, Shape& shape, const std::string& name) {
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
    case View::Limit:
      if (n < 3) throw std::invalid_argument("[" + name + "] there is no dimension 2 to limit");
      break;
    case View::Part:
      if (n < 1 || view.parts > view.end || view.end > shape[n - 1]) {
        throw std::invalid_argument("[" + name + "] a last dimension has no part " + std::to_string(view.parts) + ".." +
                                    std::to_string(view.end));
      }
      shape[n - 1] = view.end - view.parts;
      break;
    case View::Merge:
      if (n < 2) throw std::invalid_argument("[" + name + "] there are no two dimensions to merge");
      shape[n - 2] *= shape[n - 1];
      shape.pop_back();
      break;
  }
}

/* An array as it is seen, of at most kMost dimensions; views were checked when the layout was made. */
struct Seen {
  static constexpr int kMost = 12;
  void* data;
  int32_t dtype;
  int ndim = 0;
  int64_t shape[kMost], strides[kMost];

  int64_t size() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= shape[d];
    return n;
  }
  accel_array array() const { return {size() ? data : nullptr, shape, strides, size(), ndim, dtype}; }

  template <class Dims>
  void row_major(const Dims& dims) {
    ndim = int(dims.size());
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      shape[d] = dims[d];
      strides[d] = step;
      step *= shape[d];
    }
  }

  void look(const View& view, const Params& params) {
    const int n = ndim;
    if (view.kind == View::Limit) {
      const int64_t limit = size_t(view.parts) < params.size() ? params[view.parts].i : 0;
      shape[2] = std::clamp<int64_t>(limit, 0, shape[2]);
      return;
    }
    if (view.kind == View::Part) {
      data = static_cast<char*>(data) + view.parts * strides[n - 1] * int64_t(accel_itemsize(dtype));
      shape[n - 1] = view.end - view.parts;
    } else if (view.kind == View::Split) {
      shape[n] = shape[n - 1] / view.parts;
      strides[n] = strides[n - 1];
      shape[n - 1] = view.parts;
      strides[n - 1] *= shape[n];
      ++ndim;
    } else if (view.kind == View::Swap) {
      std::swap(shape[1], shape[2]);
      std::swap(strides[1], strides[2]);
    } else {
      if (shape[n - 2] != 1 && shape[n - 1] != 1 && strides[n - 2] != shape[n - 1] * strides[n - 1]) copy();
      if (shape[n - 1] != 1) strides[n - 2] = strides[n - 1];
      shape[n - 2] *= shape[n - 1];
      --ndim;
    }
  }

 private:
  void copy() {
    const accel_array from = array();
    void* to = Scratch::local().take(size_t(from.size) * accel_itemsize(dtype));
    if (!to) return; // the kernel that follows will find no memory either
    copy_row_major(from, to);
    data = to;
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      strides[d] = step;
      step *= shape[d];
    }
  }
};

mx::array placeholder(mx::Shape shape, mx::Dtype dtype) { return mx::array(std::move(shape), dtype, nullptr, {}); }

/* One evaluation, queued on the stream. Whatever it points to is kept alive: inputs and outputs by mlx, the rest here. */
struct Job {
  std::shared_ptr<const ProgramSpec> program;
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<const Params> params;
  std::vector<Seen> inputs;
  std::vector<void*> outputs;

  void* place(const Result& r, char* temporary) const {
    return r.output >= 0 ? outputs[r.output] : temporary + r.offset;
  }

  void out_of_memory() const {
    for (size_t i = 0; i < outputs.size(); ++i) {
      size_t bytes = mx::size_of(layout->output_dtypes[i]);
      for (int d : layout->output_shapes[i]) bytes *= size_t(d);
      if (bytes && program->outputs[i].step >= 0) std::memset(outputs[i], 0xff, bytes); // NaN
    }
    record_error(program->name + ": out of memory");
  }

  void run() const {
    Scratch::Scope scope;
    Scratch& scratch = Scratch::local();
    char* temporary = static_cast<char*>(scratch.take(layout->temporary));
    if (!temporary) return out_of_memory();
    std::vector<accel_array> arrays;
    static thread_local std::weak_ptr<const ProgramSpec> before;
    if (const auto last = before.lock()) {
      last->then_bytes.store(program->first.bytes, std::memory_order_relaxed);
      last->then_data.store(program->first.data, std::memory_order_relaxed);
    }
    before = program;
    for (size_t s = 0; s < program->steps.size(); ++s) {
      const Step& step = program->steps[s];
      if (step.next.data) {
        pool::expect(step.next.data, step.next.bytes);
      } else {
        pool::expect(program->then_data.load(std::memory_order_relaxed),
                     program->then_bytes.load(std::memory_order_relaxed));
      }
      const std::vector<Result>& results = layout->results[s];
      const auto mark = scratch.mark();
      const size_t n_inputs = step.sources.size() + step.fixed.size(), n = n_inputs + results.size();
      Seen* seen = static_cast<Seen*>(scratch.take(n * sizeof(Seen)));
      if (!seen) return out_of_memory();
      size_t at = 0;
      for (const Source& source : step.sources) {
        Seen& a = seen[at++];
        if (source.step < 0) {
          a = inputs[source.index];
        } else {
          const Result& r = layout->results[source.step][source.index];
          a.data = place(r, temporary);
          a.dtype = accel_dtype_of(r.dtype);
          a.row_major(r.shape);
        }
        for (const View& view : source.views) a.look(view, *params);
      }
      for (const mx::array& f : step.fixed) {
        Seen& a = seen[at++];
        a.data = const_cast<char*>(f.data<char>());
        a.dtype = accel_dtype_of(f.dtype());
        a.ndim = int(f.ndim());
        for (int d = 0; d < a.ndim; ++d) a.shape[d] = f.shape(d), a.strides[d] = f.strides(d);
      }
      for (const Result& r : results) {
        Seen& a = seen[at++];
        a.data = place(r, temporary);
        a.dtype = accel_dtype_of(r.dtype);
        a.row_major(r.shape);
      }
      arrays.clear();
      for (size_t i = 0; i < n; ++i) arrays.push_back(seen[i].array());
      const Spec& spec = *step.spec;
      std::vector<std::pair<size_t, size_t>> copies;
      for (size_t o = 0; o < spec.donors.size(); ++o) {
        if (spec.donors[o] < 0) continue;
        const size_t donor = size_t(spec.donors[o]);
        if (arrays[donor].data != arrays[n_inputs + o].data) copies.emplace_back(donor, o);
      }
      run_kernel(*spec.kernel, spec.name, step.params ? *step.params : *params, spec.ensure_row_contiguous,
                 arrays.data(), n_inputs, results.size(), copies);
      scratch.rewind(mark);
    }
  }
};

/* Gives every result that is no output its place in temporary memory; those that do not live at the same time share. */
void place_results(const ProgramSpec& program, Layout& layout) {
  struct Block {
    size_t begin, end;
    int until; // the last step that reads it
  };
  std::vector<Block> live;
  for (size_t s = 0; s < program.steps.size(); ++s) {
    live.erase(std::remove_if(live.begin(), live.end(), [&](const Block& b) { return b.until < int(s); }), live.end());
    for (size_t k = 0; k < layout.results[s].size(); ++k) {
      Result& r = layout.results[s][k];
      if (r.output >= 0) continue;
      size_t bytes = mx::size_of(r.dtype);
      for (int d : r.shape) bytes *= size_t(d);
      bytes = (bytes + kAlign - 1) / kAlign * kAlign;
      int until = int(s);
      for (size_t t = s + 1; t < program.steps.size(); ++t) {
        for (const Source& source : program.steps[t].sources) {
          if (source.step == int(s) && source.index == int(k)) until = int(t);
        }
      }
      std::sort(live.begin(), live.end(), [](const Block& a, const Block& b) { return a.begin < b.begin; });
      size_t begin = 0;
      for (const Block& b : live) {
        if (begin + bytes <= b.begin) break;
        begin = std::max(begin, b.end);
      }
      r.offset = begin;
      live.push_back({begin, begin + bytes, until});
      layout.temporary = std::max(layout.temporary, begin + bytes);
    }
  }
}

} // namespace

bool Layout::fits(const std::vector<mx::array>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].shape() != input_shapes[i] || inputs[i].dtype() != input_dtypes[i]) return false;
  }
  return true;
}

std::shared_ptr<const Layout> make_layout(const ProgramSpec& program, const std::vector<mx::array>& inputs) {
  auto layout = std::make_shared<Layout>();
  for (const mx::array& a : inputs) {
    layout->input_shapes.push_back(a.shape());
    layout->input_dtypes.push_back(a.dtype());
  }
  auto look = [&](const Source& source) {
    mx::Shape shape = source.step < 0 ? inputs[source.index].shape() : layout->results[source.step][source.index].shape;
    const mx::Dtype dtype =
        source.step < 0 ? inputs[source.index].dtype() : layout->results[source.step][source.index].dtype;
    for (const View& view : source.views) view_shape(view, shape, program.name);
    if (int(shape.size()) > Seen::kMost) throw std::invalid_argument("[" + program.name + "] too many dimensions");
    return placeholder(std::move(shape), dtype);
  };
  for (const Step& step : program.steps) {
    std::vector<mx::array> args;
    for (const Source& source : step.sources) args.push_back(look(source));
    args.insert(args.end(), step.fixed.begin(), step.fixed.end());
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    step.spec->describe(args, shapes, dtypes);
    layout->results.emplace_back();
    for (size_t k = 0; k < shapes.size(); ++k) layout->results.back().push_back({shapes[k], dtypes[k]});
  }
  for (size_t i = 0; i < program.outputs.size(); ++i) {
    const Source& source = program.outputs[i];
    const mx::array seen = look(source);
    layout->output_shapes.push_back(seen.shape());
    layout->output_dtypes.push_back(seen.dtype());
    if (source.step < 0) continue;
    int& output = layout->results[source.step][source.index].output;
    if (output < 0) output = int(i);
  }
  place_results(program, *layout);
  return layout;
}

const mx::array* ProgramPrimitive::donor_of(const Source& source, const std::vector<mx::array>& inputs) const {
  const Step& step = program_->steps[source.step];
  const std::vector<int>& donors = step.spec->donors;
  if (!source.views.empty() || donors.empty() || donors[source.index] < 0) return nullptr;
  if (donors[source.index] >= int(step.sources.size())) return nullptr;
  const Source& from = step.sources[donors[source.index]];
  if (from.step >= 0 || !from.views.empty()) return nullptr;
  // Nothing else in the program may see what this step changes.
  int uses = 0;
  for (const Step& s : program_->steps) {
    for (const Source& other : s.sources) uses += other.step < 0 && other.index == from.index;
  }
  for (const Source& other : program_->outputs) uses += other.step < 0 && other.index == from.index;
  return uses == 1 ? &inputs[from.index] : nullptr;
}

void ProgramPrimitive::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  auto job = std::make_shared<Job>();
  job->program = program_;
  // In a shapeless compiled function, shapes are known only now.
  job->layout = layout_->fits(inputs) ? layout_ : make_layout(*program_, inputs);
  job->params = params_;
  job->inputs.resize(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const mx::array& a = inputs[i];
    encoder.set_input_array(a);
    Seen& seen = job->inputs[i];
    seen.data = a.size() ? const_cast<char*>(a.data<char>()) : nullptr;
    seen.dtype = accel_dtype_of(a.dtype());
    seen.ndim = int(a.ndim());
    for (int d = 0; d < seen.ndim; ++d) seen.shape[d] = a.shape(d), seen.strides[d] = a.strides(d);
  }
  job->outputs.resize(outputs.size(), nullptr);
  for (size_t i = 0; i < outputs.size(); ++i) {
    mx::array& out = outputs[i];
    const Source& source = program_->outputs[i];
    Seen seen;
    const mx::array* owner = nullptr; // whose memory the output shares
    if (source.step < 0) {
      owner = &inputs[source.index];
      seen = job->inputs[source.index];
    } else {
      const Result& r = job->layout->results[source.step][source.index];
      if (r.output != int(i)) owner = &outputs[r.output];
      seen.row_major(r.shape);
    }
    for (const View& view : source.views) seen.look(view, *params_);
    mx::Strides strides(seen.strides, seen.strides + seen.ndim);
    const accel_array as = seen.array();
    const bool plain = accel_is_row_contiguous(&as) != 0;
    // Column-contiguous is what mlx asks before it takes an array for a transposed matrix; saying no is always right.
    mx::array::Flags flags{true, plain, plain && std::count_if(out.shape().begin(), out.shape().end(), [](int d) {
                                                   return d != 1;
                                                 }) <= 1};
    if (owner) {
      flags.contiguous = owner->flags().contiguous;
      out.copy_shared_buffer(*owner, strides, flags, owner->data_size());
    } else if (const mx::array* donor = donor_of(source, inputs);
               donor && plain && donatable(*donor, out, long(outputs.size()))) {
      out.copy_shared_buffer(*donor);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, flags);
    }
    job->outputs[i] = out.size() ? out.data<char>() : nullptr;
    encoder.set_output_array(out);
  }
  encoder.dispatch([job = std::move(job)] { job->run(); });
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

void ProgramSpec::look_ahead() {
  constexpr size_t kLarge = 64 << 10;
  Expected next;
  for (size_t s = steps.size(); s-- > 0;) {
    steps[s].next = next;
    for (const mx::array& f : steps[s].fixed) {
      // The first of the step's large ones that is larger than what came before in it.
      if (f.nbytes() >= kLarge && (next.data == steps[s].next.data || f.nbytes() > next.bytes)) {
        next = {f.data<char>(), f.nbytes()};
      }
    }
  }
  first = next;
}

} // namespace accel
