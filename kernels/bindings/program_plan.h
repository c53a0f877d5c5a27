/* A program's calls as kernels get them, worked out once for every layout.
 *
 * What a call is made of (arrays with their shapes, strides and views, parameters) lies in the memory of many small
 * objects, which is cold when weights have gone through the caches since the last token. All of it but some addresses
 * is known from the layout. So it is put down in a few blocks, which a run reads front to back. */
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "program.h"

namespace accel {

class Plan {
 public:
  /* What differs from run to run. Inputs lie in row-major order, without gaps. */
  struct Memory {
    void* const* inputs;
    void* const* outputs;
    char* temporary;
    const Params* params; // of the program's call
  };

  /* Null if there is something that only a run can know: a view that copies, an array that has to be. */
  static std::unique_ptr<const Plan> make(const ProgramSpec& program, const Layout& layout);

  size_t steps() const { return calls_.size(); }
  /* The step behind those that run together with step s, the first of them; what comes after them. */
  size_t end_of(size_t s) const { return size_t(calls_[s].end); }
  const Expected& next(size_t s) const { return calls_[s].next; }
  void run(size_t begin, size_t end, const Memory& memory) const;

 private:
  static constexpr int kMostArrays = 12, kMostDims = 6;

  /* How an array looks; the same for many. */
  struct Form {
    accel_array array;
    int64_t shape[kMostDims], strides[kMostDims];
  };
  enum Base : int32_t { Fixed, Input, Output, Temporary };
  struct Ref {
    const Form* form;
    union {
      void* data;     // Fixed
      int64_t offset; // bytes from the base
    };
    Base base;
    int32_t index; // Input, Output: which one
    int32_t limit; // the parameter that limits dimension 2, -1 for none
  };
  struct Copy {
    int32_t input, output;
  };
  struct Call {
    const Spec* spec;
    int32_t refs, n_inputs, n_outputs;
    int32_t copies, n_copies;
    int32_t params, n_params; // -1: those of the program's call
    int32_t end;
    Expected next;
  };

  bool add(const ProgramSpec& program, const Layout& layout, size_t s);
  const Form* form_of(const accel_array& array);

  std::vector<Call> calls_;
  std::vector<Ref> refs_;
  std::vector<accel_param> params_;
  std::vector<Copy> copies_;
  std::deque<Form> forms_; // they do not move
};

} // namespace accel
