/* Running a program: its arrays as kernels see them, and the calls one after the other. */
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "program.h"
#include "scratch.h"

namespace accel {

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

  bool is_row_major() const {
    const accel_array a = array();
    return accel_is_row_contiguous(&a) != 0;
  }

  /* An array that has memory, as it lies. */
  void see(const mx::array& a) {
    data = a.size() ? const_cast<char*>(a.data<char>()) : nullptr;
    dtype = accel_dtype_of(a.dtype());
    ndim = int(a.ndim());
    for (int d = 0; d < ndim; ++d) shape[d] = a.shape(d), strides[d] = a.strides(d);
  }

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
      if (merge_copies()) copy();
      if (shape[n - 1] != 1) strides[n - 2] = strides[n - 1];
      shape[n - 2] *= shape[n - 1];
      --ndim;
    }
  }

  /* Whether the last two dimensions are one only in a copy. */
  bool merge_copies() const {
    const int n = ndim;
    return shape[n - 2] != 1 && shape[n - 1] != 1 && strides[n - 2] != shape[n - 1] * strides[n - 1];
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

/* One evaluation, queued on the stream. Whatever it points to is kept alive: inputs and outputs by mlx, the rest
 * here. */
struct Job {
  Job() = default;
  Job(const Job&) = delete;
  ~Job() {
    if (queued) program->queued.remove();
  }

  std::shared_ptr<const ProgramSpec> program;
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<const Params> params;
  std::vector<Seen> inputs; // none: all lie in row-major order, without gaps, at `places`
  std::vector<void*> places;
  std::vector<void*> outputs;
  bool queued = false;

  /* Runs all steps; does not throw. Outputs are filled with NaN if there is no memory. */
  void run() const;

  /* An input as a kernel sees it. */
  Seen input(int i) const;

 private:
  void* place(const Result& r, char* temporary) const {
    return r.output >= 0 ? outputs[r.output] : temporary + r.offset;
  }
  /* Steps that do not depend on each other; false if there is no memory. */
  bool run_steps(size_t begin, size_t end, char* temporary) const;
  void out_of_memory() const;
};

} // namespace accel
