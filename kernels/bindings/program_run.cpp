#include "program_run.h"

#include <cstring>

#include "program_plan.h"
#include "thread_pool.h"

namespace accel {

void Job::out_of_memory() const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t bytes = bytes_of(layout->output_shapes[i], layout->output_dtypes[i]);
    if (bytes && program->outputs[i].step >= 0) std::memset(outputs[i], 0xff, bytes); // NaN
  }
  record_error(program->name + ": out of memory");
}

void Job::run() const {
  Scratch::Scope scope;
  char* temporary = static_cast<char*>(Scratch::local().take(layout->temporary));
  if (!temporary) return out_of_memory();
  static thread_local std::weak_ptr<const ProgramSpec> before;
  if (const auto last = before.lock()) {
    last->then_bytes.store(program->first.bytes, std::memory_order_relaxed);
    last->then_data.store(program->first.data, std::memory_order_relaxed);
  }
  before = program;
  const Plan* plan = inputs.empty() ? layout->plan(*program) : nullptr;
  const Plan::Memory memory{places.data(), outputs.data(), temporary, params.get()};
  const size_t n = program->steps.size();
  for (size_t s = 0, end; s < n; s = end) {
    if (plan) {
      end = plan->end_of(s);
    } else {
      for (end = s + 1; end < n && program->steps[end].first == int(s); ++end) {
      }
    }
    const Expected& next = plan ? plan->next(s) : program->steps[end - 1].next;
    if (next.data) {
      pool::expect(next.data, next.bytes);
    } else {
      pool::expect(program->then_data.load(std::memory_order_relaxed),
                   program->then_bytes.load(std::memory_order_relaxed));
    }
    if (plan) {
      plan->run(s, end, memory);
    } else if (!run_steps(s, end, temporary)) {
      return out_of_memory();
    }
  }
}

Seen Job::input(int i) const {
  if (!inputs.empty()) return inputs[i];
  Seen seen;
  seen.dtype = accel_dtype_of(layout->input_dtypes[i]);
  seen.row_major(layout->input_shapes[i]);
  seen.data = seen.size() ? places[i] : nullptr;
  return seen;
}

bool Job::run_steps(size_t s, size_t end, char* temporary) const {
  const Step& step = program->steps[s];
  const std::vector<Result>& results = layout->results[s];
  Scratch& scratch = Scratch::local();
  const auto mark = scratch.mark();
  const size_t n_inputs = step.sources.size() + step.fixed.size(), n = n_inputs + results.size();
  Seen* seen = static_cast<Seen*>(scratch.take(n * sizeof(Seen)));
  accel_array* arrays = static_cast<accel_array*>(scratch.take(n * sizeof(accel_array)));
  if (!seen || !arrays) return false;
  size_t at = 0;
  for (const Source& source : step.sources) {
    Seen& a = seen[at++];
    if (source.step < 0) {
      a = input(source.index);
    } else {
      const Result& r = layout->results[source.step][source.index];
      a.data = place(r, temporary);
      a.dtype = accel_dtype_of(r.dtype);
      a.row_major(r.shape);
    }
    for (const View& view : source.views) a.look(view, *params);
  }
  for (const mx::array& f : step.fixed) seen[at++].see(f);
  for (const Result& r : results) {
    Seen& a = seen[at++];
    a.data = place(r, temporary);
    a.dtype = accel_dtype_of(r.dtype);
    a.row_major(r.shape);
  }
  for (size_t i = 0; i < n; ++i) arrays[i] = seen[i].array();
  const Spec& spec = *step.spec;
  std::vector<std::pair<size_t, size_t>> copies;
  for (size_t o = 0; o < spec.donors.size(); ++o) {
    if (spec.donors[o] < 0) continue;
    const size_t donor = size_t(spec.donors[o]);
    if (arrays[donor].data != arrays[n_inputs + o].data) copies.emplace_back(donor, o);
  }
  struct Rest {
    const Job* job;
    size_t begin, end;
    char* temporary;
    bool done;
  } rest{this, s + 1, end, temporary, true};
  Meanwhile meanwhile{[](void* arg) noexcept {
                        Rest& r = *static_cast<Rest*>(arg);
                        r.done = r.job->run_steps(r.begin, r.end, r.temporary);
                      },
                      &rest};
  const bool more = s + 1 < end;
  run_kernel(*spec.kernel, spec.name, step.params ? *step.params : *params, spec.ensure_row_contiguous, arrays,
             n_inputs, results.size(), copies, more ? &meanwhile : nullptr);
  scratch.rewind(mark);
  // A kernel without a parallel loop leaves the others to us.
  return more && meanwhile.run ? run_steps(s + 1, end, temporary) : rest.done;
}

} // namespace accel
