#include "program_plan.h"

#include <algorithm>

#include "program_run.h"

namespace accel {

std::unique_ptr<const Plan> Plan::make(const ProgramSpec& program, const Layout& layout) {
  auto plan = std::make_unique<Plan>();
  const size_t n = program.steps.size();
  for (size_t s = 0; s < n; ++s) {
    if (!plan->add(program, layout, s)) return nullptr;
  }
  for (size_t s = n; s-- > 0;) {
    Call& call = plan->calls_[s];
    const bool last = s + 1 == n || program.steps[s + 1].first != program.steps[s].first;
    call.end = last ? int32_t(s) + 1 : plan->calls_[s + 1].end;
    call.next = last ? program.steps[s].next : plan->calls_[s + 1].next;
  }
  return plan;
}

const Plan::Form* Plan::form_of(const accel_array& a) {
  for (const Form& f : forms_) {
    if (f.array.dtype == a.dtype && f.array.ndim == a.ndim && std::equal(a.shape, a.shape + a.ndim, f.shape) &&
        std::equal(a.strides, a.strides + a.ndim, f.strides)) {
      return &f;
    }
  }
  Form& f = forms_.emplace_back();
  f.array = a;
  std::copy_n(a.shape, a.ndim, f.shape);
  std::copy_n(a.strides, a.ndim, f.strides);
  f.array.data = nullptr;
  f.array.shape = f.shape;
  f.array.strides = f.strides;
  return &f;
}

bool Plan::add(const ProgramSpec& program, const Layout& layout, size_t s) {
  const Step& step = program.steps[s];
  const Spec& spec = *step.spec;
  const std::vector<Result>& results = layout.results[s];
  Call call{};
  call.spec = &spec;
  call.refs = int32_t(refs_.size());
  call.n_inputs = int32_t(step.sources.size() + step.fixed.size());
  call.n_outputs = int32_t(results.size());
  if (call.n_inputs + call.n_outputs > kMostArrays) return false;

  auto put = [&](const Seen& seen, Ref ref) {
    const accel_array a = seen.array();
    // A kernel whose outputs are all empty is not called.
    if (a.ndim > kMostDims || a.size == 0) return false;
    ref.form = form_of(a);
    refs_.push_back(ref);
    return true;
  };
  /* An array as it lies: where it begins. */
  auto place = [&](const Source& source, Seen& seen) {
    Ref ref{};
    ref.limit = -1;
    seen.data = nullptr;
    if (source.step < 0) {
      seen.dtype = accel_dtype_of(layout.input_dtypes[source.index]);
      seen.row_major(layout.input_shapes[source.index]);
      ref.base = Input;
      ref.index = source.index;
    } else {
      const Result& r = layout.results[source.step][source.index];
      seen.dtype = accel_dtype_of(r.dtype);
      seen.row_major(r.shape);
      ref.base = r.output >= 0 ? Output : Temporary;
      ref.index = r.output;
      ref.offset = r.output >= 0 ? 0 : int64_t(r.offset);
    }
    return ref;
  };

  for (const Source& source : step.sources) {
    Seen seen;
    Ref ref = place(source, seen);
    for (size_t v = 0; v < source.views.size(); ++v) {
      const View& view = source.views[v];
      if (view.kind == View::Limit) {
        // Views that follow would see another shape in every run.
        if (v + 1 != source.views.size() || spec.ensure_row_contiguous) return false;
        ref.limit = view.parts;
        continue;
      }
      if (view.kind == View::Merge && seen.merge_copies()) return false;
      seen.look(view, {});
    }
    // From an address of zero, parts have moved it by so much.
    ref.offset += reinterpret_cast<intptr_t>(seen.data);
    const accel_array a = seen.array();
    if (spec.ensure_row_contiguous && !accel_is_row_contiguous(&a)) return false;
    if (!put(seen, ref)) return false;
  }
  for (const mx::array& f : step.fixed) {
    Seen seen;
    if (f.ndim() > kMostDims) return false;
    seen.see(f);
    const accel_array a = seen.array();
    if (spec.ensure_row_contiguous && !accel_is_row_contiguous(&a)) return false;
    Ref ref{};
    ref.limit = -1;
    ref.base = Fixed;
    ref.data = a.data;
    if (!put(seen, ref)) return false;
  }
  for (size_t k = 0; k < results.size(); ++k) {
    Seen seen;
    const Ref ref = place({int(s), int(k), {}}, seen);
    if (!put(seen, ref)) return false;
  }

  call.copies = int32_t(copies_.size());
  for (size_t o = 0; o < spec.donors.size(); ++o) {
    if (spec.donors[o] >= 0) copies_.push_back({spec.donors[o], call.n_inputs + int32_t(o)});
  }
  call.n_copies = int32_t(copies_.size()) - call.copies;
  call.params = -1;
  if (step.params) {
    call.params = int32_t(params_.size());
    call.n_params = int32_t(step.params->size());
    params_.insert(params_.end(), step.params->begin(), step.params->end());
  }
  calls_.push_back(call);
  return true;
}

void Plan::run(size_t begin, size_t end, const Memory& memory) const {
  const Call& call = calls_[begin];
  const int n = call.n_inputs + call.n_outputs;
  accel_array arrays[kMostArrays];
  accel_array* pointers[kMostArrays];
  int64_t limited[kMostArrays][kMostDims];
  for (int i = 0; i < n; ++i) {
    const Ref& ref = refs_[call.refs + i];
    accel_array& a = arrays[i];
    a = ref.form->array;
    switch (ref.base) {
      case Fixed: a.data = ref.data; break;
      case Input: a.data = static_cast<char*>(memory.inputs[ref.index]) + ref.offset; break;
      case Output: a.data = static_cast<char*>(memory.outputs[ref.index]) + ref.offset; break;
      case Temporary: a.data = memory.temporary + ref.offset; break;
    }
    if (ref.limit >= 0) {
      int64_t* shape = limited[i];
      std::copy_n(a.shape, a.ndim, shape);
      a.shape = shape;
      const int64_t most = shape[2];
      const bool known = size_t(ref.limit) < memory.params->size();
      shape[2] = std::clamp<int64_t>(known ? (*memory.params)[ref.limit].i : 0, 0, most);
      a.size = a.size / most * shape[2];
      if (!a.size) a.data = nullptr;
    }
    pointers[i] = &a;
  }
  for (int c = call.copies; c < call.copies + call.n_copies; ++c) {
    const accel_array &from = arrays[copies_[c].input], &to = arrays[copies_[c].output];
    if (from.data != to.data) copy_row_major(from, to.data);
  }
  struct Rest {
    const Plan* plan;
    size_t begin, end;
    const Memory* memory;
  } rest{this, begin + 1, end, &memory};
  Meanwhile meanwhile{[](void* arg) noexcept {
                        const Rest& r = *static_cast<Rest*>(arg);
                        r.plan->run(r.begin, r.end, *r.memory);
                      },
                      &rest};
  const bool more = begin + 1 < end;
  const bool own = call.params < 0;
  Scratch& scratch = Scratch::local();
  const auto mark = scratch.mark();
  enter_kernel(*call.spec->kernel, call.spec->name, own ? memory.params->data() : params_.data() + call.params,
               own ? int32_t(memory.params->size()) : call.n_params, pointers, call.n_inputs, call.n_outputs,
               more ? &meanwhile : nullptr);
  scratch.rewind(mark);
  // A kernel without a parallel loop leaves the others to us.
  if (more && meanwhile.run) run(begin + 1, end, memory);
}

} // namespace accel
