#include "program.h"

#include <algorithm>
#include <future>
#include <new>
#include <stdexcept>
#include <thread>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "program_plan.h"
#include "program_run.h"

namespace accel {
namespace {

constexpr size_t kAlign = 64;
constexpr auto kLongest = std::chrono::milliseconds(500); // that we wait for what is queued

mx::array placeholder(mx::Shape shape, mx::Dtype dtype) { return mx::array(std::move(shape), dtype, nullptr, {}); }

/* Gives every result that is no output its place in temporary memory; those that do not live at the same time share. */
void place_results(const ProgramSpec& program, Layout& layout) {
  struct Block {
    size_t begin, end;
    int until; // the last step that reads it
  };
  std::vector<Block> live;
  for (size_t s = 0; s < program.steps.size(); ++s) {
    // What a step's neighbours read is in use until all of them are done.
    const int begun = program.steps[s].first;
    live.erase(std::remove_if(live.begin(), live.end(), [&](const Block& b) { return b.until < begun; }), live.end());
    for (size_t k = 0; k < layout.results[s].size(); ++k) {
      Result& r = layout.results[s][k];
      if (r.output >= 0) continue;
      const size_t bytes = (bytes_of(r.shape, r.dtype) + kAlign - 1) / kAlign * kAlign;
      std::sort(live.begin(), live.end(), [](const Block& a, const Block& b) { return a.begin < b.begin; });
      size_t begin = 0;
      for (const Block& b : live) {
        if (begin + bytes <= b.begin) break;
        begin = std::max(begin, b.end);
      }
      r.offset = begin;
      live.push_back({begin, begin + bytes, program.until[s][k]});
      layout.temporary = std::max(layout.temporary, begin + bytes);
    }
  }
}

} // namespace

Layout::Layout() = default;
Layout::~Layout() = default;

const Plan* Layout::plan(const ProgramSpec& program) const {
  try {
    std::call_once(planned_, [&] { plan_ = Plan::make(program, *this); });
  } catch (const std::bad_alloc&) {
    return nullptr; // a run needs none
  }
  return plan_.get();
}

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

int donor_of(const ProgramSpec& program, const Source& source) {
  if (source.step < 0) return -1;
  const Step& step = program.steps[source.step];
  const std::vector<int>& donors = step.spec->donors;
  if (!source.views.empty() || donors.empty() || donors[source.index] < 0) return -1;
  if (donors[source.index] >= int(step.sources.size())) return -1;
  const Source& from = step.sources[donors[source.index]];
  if (from.step >= 0 || !from.views.empty()) return -1;
  // Nothing else in the program may see what this step changes.
  return program.uses[from.index] == 1 ? from.index : -1;
}

/* While a run is queued, mlx holds the memory of everything that it reads and writes. A program that changes what its
 * last run has made, as every token does with the KV cache, would have to copy it as soon as evaluation is a run ahead;
 * waiting for the last run costs less. It needs nothing from us: all that it waits for was queued before. */
bool ProgramPrimitive::may_move(const mx::array& in, const mx::array& out, long holders, bool& drained) {
  if (!movable(in, out, holders)) return false;
  auto free = [&] { return in.data_shared_ptr().use_count() == 1; };
  if (free() || drained) return free();
  // mlx lets go of the memory right after the run, on the stream's thread.
  const auto until = program_->queued.wait() + std::chrono::milliseconds(1);
  while (!free() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(1));
  }
  if (free()) return true;
  // Somebody holds it, or the system has taken the thread's processor away: after all that is queued we know.
  drained = true;
  auto reached = std::make_shared<std::promise<void>>();
  mx::cpu::get_command_encoder(stream()).dispatch([reached] { reached->set_value(); });
  return reached->get_future().wait_for(kLongest) == std::future_status::ready && free();
}

void ProgramSpec::Queue::add() {
  std::lock_guard<std::mutex> lock(mutex);
  ++jobs;
}

void ProgramSpec::Queue::remove() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    --jobs;
    last = std::chrono::steady_clock::now();
  }
  less.notify_all();
}

std::chrono::steady_clock::time_point ProgramSpec::Queue::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  less.wait_for(lock, kLongest, [this] { return jobs == 0; });
  return last;
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
    job->inputs[i].see(a);
  }
  for (const Seen& a : job->inputs) job->places.push_back(a.data);
  job->outputs.resize(outputs.size(), nullptr);
  bool drained = false;
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
    } else if (const int donor = donor_of(*program_, source);
               donor >= 0 && plain && may_move(inputs[donor], out, long(outputs.size()), drained)) {
      out.copy_shared_buffer(inputs[donor]);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, flags);
    }
    job->outputs[i] = out.size() ? out.data<char>() : nullptr;
    encoder.set_output_array(out);
  }
  if (std::all_of(job->inputs.begin(), job->inputs.end(), [](const Seen& a) { return a.is_row_major(); })) {
    job->inputs.clear();
  }
  program_->queued.add();
  job->queued = true;
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

void ProgramSpec::prepare() {
  uses.assign(size_t(n_inputs), 0);
  for (size_t s = 0; s < steps.size(); ++s) {
    until.emplace_back(steps[s].spec->shapes.size(), int(s));
    for (const Source& source : steps[s].sources) {
      if (source.step < 0) {
        ++uses[source.index];
      } else {
        until[source.step][source.index] = int(s);
      }
    }
  }
  for (const Source& source : outputs) {
    if (source.step < 0) ++uses[source.index];
  }
  find_neighbours();
  look_ahead();
}

void ProgramSpec::find_neighbours() {
  for (size_t s = 0; s < steps.size(); ++s) {
    Step& step = steps[s];
    step.first = int(s);
    if (s == 0) continue;
    const int first = steps[s - 1].first;
    auto changes_inputs = [](const Step& t) {
      return std::any_of(t.spec->donors.begin(), t.spec->donors.end(), [](int donor) { return donor >= 0; });
    };
    const bool depends = std::any_of(step.sources.begin(), step.sources.end(),
                                     [&](const Source& source) { return source.step >= first; });
    if (!depends && int(s) - first < kNeighbours && !changes_inputs(step) && !changes_inputs(steps[s - 1])) {
      step.first = first;
    }
  }
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
