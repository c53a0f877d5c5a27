/* Programs one behind the other, run at once on caches that are changed in place.
 *
 * A program as a graph node (program.cpp) has every cache among its inputs and its outputs: for 30 layers mlx makes,
 * schedules and takes apart 60 arrays a token, which costs the thread that builds the graph more than half of its time.
 * Here one node has one input and one output, x. The caches are no part of the graph: their memory is written by the
 * stream's task, and the arrays that Python has stay the same ones and get the event of the node's evaluation, so that
 * whoever evaluates them waits for the task.
 *
 * That is only right where nobody else can tell: every array is Python's alone, its memory is its own, no graph refers
 * to it, and whatever made it is done or was queued on the same stream. Everything else is refused, before anything has
 * happened, and runs as graph nodes. */
#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "call.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/memory.h"
#include "mlx/scheduler.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"
#include "program.h"
#include "program_run.h"

using namespace nanobind::literals;

namespace accel {
namespace {

using Memory = std::vector<std::shared_ptr<mx::array::Data>>;

/* The memory of caches, held while tasks that write it are queued. Tasks on the same caches share one, so that an array
 * whose memory has two owners, itself and this, is nobody else's. */
std::weak_ptr<const Memory> latest; // under the GIL

constexpr int kMostTasks = 8; // mlx waits for a task from 11 on

struct Stage {
  std::shared_ptr<const ProgramSpec> program;
  std::shared_ptr<const Layout> layout;
  std::vector<void*> caches;
};

/* Everything that a queued evaluation needs; destroyed from the last member to the first, so that the memory is let go
 * of before a program says that it is no longer queued. */
struct Evaluation {
  std::vector<Job> jobs;
  std::vector<std::unique_ptr<char[]>> between;
  std::shared_ptr<const Memory> memory;

  explicit Evaluation(size_t n) : jobs(n) {}
};

class AtOnce : public mx::Primitive {
 public:
  AtOnce(mx::Stream stream, std::vector<Stage> stages, std::shared_ptr<const Params> params,
         std::shared_ptr<const Memory> memory)
      : Primitive(stream), stages_(std::move(stages)), params_(std::move(params)), memory_(std::move(memory)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    if (stages_.empty()) throw std::runtime_error("[accel/stack] evaluated twice");
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto task = std::make_shared<Evaluation>(stages_.size());
    task->memory = std::move(memory_);
    Seen first;
    first.see(inputs[0]);
    void* x = first.data;
    for (size_t i = 0; i < stages_.size(); ++i) {
      const Stage& stage = stages_[i];
      Job& job = task->jobs[i];
      job.program = stage.program;
      job.layout = stage.layout;
      job.params = params_;
      job.places.push_back(x);
      job.places.insert(job.places.end(), stage.caches.begin(), stage.caches.end());
      if (i == 0 && !first.is_row_major()) {
        std::vector<Seen> seen{first};
        for (size_t k = 1; k < job.places.size(); ++k) seen.push_back(job.input(int(k)));
        job.inputs = std::move(seen);
      }
      const mx::Shape& shape = stage.layout->output_shapes[0];
      const mx::Dtype dtype = stage.layout->output_dtypes[0];
      void* to = out.data<char>();
      if (i + 1 < stages_.size()) {
        task->between.emplace_back(new char[bytes_of(shape, dtype) + 64]);
        to = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(task->between.back().get()) + 63) / 64 * 64);
      }
      job.outputs.push_back(to);
      job.outputs.insert(job.outputs.end(), stage.caches.begin(), stage.caches.end());
      x = to;
    }
    for (Job& job : task->jobs) {
      job.program->queued.add();
      job.queued = true;
    }
    stages_.clear();
    mx::cpu::get_command_encoder(stream()).dispatch([task = std::move(task)] {
      for (const Job& job : task->jobs) job.run();
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[accel/stack] these are CPU kernels; they cannot run on a GPU stream");
  }
  const char* name() const override { return "accel/stack"; }

 private:
  std::vector<Stage> stages_;
  std::shared_ptr<const Params> params_;
  std::shared_ptr<const Memory> memory_;
};

/* Whether what made the array is done or runs on the stream before anything queued from now on. An array that is
 * evaluated and has no event is one that mlx would use without waiting. */
bool follows(const mx::array& a, const mx::Stream& stream) {
  if (a.status() == mx::array::Status::unscheduled) return false;
  return !a.event().valid() || a.event().stream() == stream;
}

/* Whether every array may be changed in place, where `owners` hold the memory of each. */
bool free_to_change(const std::vector<mx::array*>& arrays, const mx::Stream& stream, long owners) {
  for (const mx::array* a : arrays) {
    if (references(*a) != 1 || !follows(*a, stream) || a->data_shared_ptr().use_count() != owners) return false;
    if (!a->data_shared_ptr()->is_owned() || !a->flags().row_contiguous || a->data_size() != a->size()) return false;
  }
  return true;
}

bool is_memory_of(const Memory& memory, const std::vector<mx::array*>& arrays) {
  if (memory.size() != arrays.size()) return false;
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (memory[i] != arrays[i]->data_shared_ptr()) return false;
  }
  return true;
}

/* The memory of arrays that are free to be changed, null if they are not. */
std::shared_ptr<const Memory> take_memory(const std::vector<mx::array*>& arrays, const mx::Stream& stream,
                                          const ProgramSpec& last) {
  auto held = latest.lock();
  if (held && is_memory_of(*held, arrays)) return free_to_change(arrays, stream, 2) ? held : nullptr;
  held.reset();
  if (!free_to_change(arrays, stream, 1)) {
    // A run of the same programs as graph nodes may hold them for a moment more.
    const auto until = last.queued.wait() + std::chrono::milliseconds(1);
    while (!free_to_change(arrays, stream, 1)) {
      if (std::chrono::steady_clock::now() > until) return nullptr;
      std::this_thread::sleep_for(std::chrono::microseconds(1));
    }
  }
  auto fresh = std::make_shared<Memory>();
  for (const mx::array* a : arrays) fresh->push_back(a->data_shared_ptr());
  latest = fresh;
  return fresh;
}

/* Every cache of a program is its own output. */
bool stays_in_place(const ProgramSpec& program, const Layout& layout) {
  if (program.outputs.size() != size_t(program.n_inputs) || program.outputs[0].step < 0) return false;
  for (int i = 1; i < program.n_inputs; ++i) {
    if (donor_of(program, program.outputs[i]) != i || layout.output_shapes[i] != layout.input_shapes[i]) return false;
  }
  return program.outputs[0].views.empty();
}

/* Fetches what is looked at of arrays, which a token's weights have driven out of the caches. */
void fetch(const std::vector<mx::array*>& arrays) {
  constexpr int kLines = 5;
  for (const mx::array* a : arrays) __builtin_prefetch(a);
  for (const mx::array* a : arrays) {
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(reinterpret_cast<const char*>(a->id()) + 64 * i - 16);
  }
  for (const mx::array* a : arrays) {
    if (a->status() == mx::array::Status::unscheduled) continue;
    __builtin_prefetch(reinterpret_cast<const char*>(a->data_shared_ptr().get()) - 16, 1);
  }
}

nb::object run(nb::list programs, nb::object x, nb::list arrays, nb::object params) {
  if (pending_errors.load(std::memory_order_acquire)) raise_errors();
  if (!nb::isinstance<mx::array>(x)) throw nb::type_error("x is not an mx.array");
  const mx::Stream stream = mx::default_stream(mx::Device(mx::Device::cpu));
  std::vector<mx::array*> caches;
  for (nb::handle a : arrays) {
    if (!nb::isinstance<mx::array>(a)) throw nb::type_error("a cache is not an mx.array");
    caches.push_back(nb::inst_ptr<mx::array>(a));
  }
  fetch(caches);
  std::vector<Stage> stages;
  mx::array state = *nb::inst_ptr<mx::array>(x);
  size_t at = 0;
  const ProgramSpec* last = nullptr;
  for (nb::handle object : programs) {
    Stage stage{program_of(object), nullptr, {}};
    const size_t n = size_t(stage.program->n_inputs) - 1;
    if (at + n > caches.size()) throw nb::type_error("fewer caches than the programs take");
    {
      std::vector<mx::array> inputs{state};
      for (size_t i = 0; i < n; ++i) inputs.push_back(*caches[at + i]);
      stage.layout = layout_of(object, inputs);
    }
    if (!stays_in_place(*stage.program, *stage.layout)) return nb::none();
    stage.caches.resize(n);
    at += n;
    const Layout& layout = *stage.layout;
    last = stage.program.get();
    state = mx::array(layout.output_shapes[0], layout.output_dtypes[0], nullptr, {});
    stages.push_back(std::move(stage));
  }
  if (!last || at != caches.size()) throw nb::type_error("not as many caches as the programs take");
  // From here on the GIL stays ours: whoever gets hold of a cache's array meanwhile would wait for the event that is
  // exchanged below. So nothing may block, as an evaluation does with many queued tasks or too little memory.
  const mx::array& input = *nb::inst_ptr<mx::array>(x);
  if (input.status() == mx::array::Status::unscheduled) {
    nb::gil_scoped_release release;
    mx::async_eval({input});
  }
  if (mx::scheduler::n_active_tasks() > kMostTasks) return nb::none();
  if (mx::get_active_memory() > mx::get_memory_limit()) return nb::none();
  for (nb::handle a : arrays) {
    if (Py_REFCNT(a.ptr()) > 2) return nb::none(); // the list's and the cache's
  }
  auto memory = take_memory(caches, stream, *last);
  if (!memory) return nb::none();
  at = 0;
  for (Stage& stage : stages) {
    for (void*& place : stage.caches) place = caches[at++]->data<char>();
  }
  auto primitive = std::make_shared<AtOnce>(stream, std::move(stages), make_params(params), std::move(memory));
  mx::array out(state.shape(), state.dtype(), std::move(primitive), {input});
  mx::async_eval({out});
  if (!out.event().valid()) out.wait();
  for (const mx::array* a : caches) {
    a->set_status(out.status());
    a->attach_event(out.event());
  }
  return nb::cast(std::move(out));
}

} // namespace

void register_at_once(nb::module_& m) {
  m.def("run_at_once", &run, "programs"_a, "x"_a, "arrays"_a, "params"_a,
        "x behind programs that each take x and arrays, which are changed in place; None, with nothing done, if others "
        "might see that. The evaluation is queued when this returns.");
}

} // namespace accel
