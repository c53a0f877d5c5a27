/* One queued kernel call: the views of its arrays, and running it on the stream's thread. */
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "accel/kernel.h"
#include "library.h"

namespace accel {

struct Task {
  std::shared_ptr<const Kernel> kernel;
  std::string name;
  std::shared_ptr<const std::vector<accel_param>> params;
  bool ensure_row_contiguous = true;

  void reserve(size_t inputs, size_t outputs, size_t dims);
  void add_input(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim);
  void add_output(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim);

  /* Runs the kernel. If it fails, fills the outputs with NaN or zeros and records the message. */
  void run();

 private:
  void add(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim);

  std::vector<int64_t> dims_;        // shape and strides of all arrays; never reallocated after reserve()
  std::vector<accel_array> arrays_;  // inputs, then outputs
  size_t n_inputs_ = 0;
};

/* Copies a strided array to row-major order. */
void copy_row_major(const accel_array& from, void* to);

std::vector<std::string> take_errors();

} // namespace accel
