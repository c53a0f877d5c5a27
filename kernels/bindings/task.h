/* One queued kernel call: the views of its arrays, and running it on the stream's thread. */
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>
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
  /* Output `output` is to hold the elements of input `input` when the kernel is entered. */
  void add_copy(size_t input, size_t output) { copies_.emplace_back(input, output); }
  void add_output(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim);

  /* Runs the kernel. If it fails, fills the outputs with NaN or zeros and records the message. It does not throw:
   * mlx would pass the exception on to whoever waits for the stream, but leaves arrays of the same evaluation
   * behind whose events are never signalled, and reading one of those would wait for ever. Nothing is run if all
   * outputs are empty. */
  void run();

 private:
  void add(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim);

  std::vector<int64_t> dims_;        // shape and strides of all arrays; never reallocated after reserve()
  std::vector<accel_array> arrays_;  // inputs, then outputs
  std::vector<std::pair<size_t, size_t>> copies_;
  size_t n_inputs_ = 0;
};

/* Calls a kernel on arrays, inputs first, on this thread and the pool. Temporary memory comes from the thread's arena
 * and stays taken. `strides` of inputs may be written to. If the kernel fails, fills the outputs and records.
 *
 * meanwhile: run from within the kernel's first parallel loop, once the workers have that loop, so that the two are one
 * to the pool (pool::begin). Not run if the kernel has no such loop: `run` is null afterwards if it was. */
struct Meanwhile {
  void (*run)(void* arg) noexcept;
  void* arg;
};
void run_kernel(const Kernel& kernel, const std::string& name, const std::vector<accel_param>& params,
                bool ensure_row_contiguous, accel_array* arrays, size_t n_inputs, size_t n_outputs,
                const std::vector<std::pair<size_t, size_t>>& copies, Meanwhile* meanwhile = nullptr);

/* The last part of that: calls the kernel on arrays that are as it wants them. Not all outputs are empty. */
void enter_kernel(const Kernel& kernel, const std::string& name, const accel_param* params, int32_t n_params,
                  accel_array* const* arrays, int32_t n_inputs, int32_t n_outputs, Meanwhile* meanwhile);

/* Copies a strided array to row-major order. */
void copy_row_major(const accel_array& from, void* to);

/* Adds a message to those of take_errors(). */
void record_error(std::string message);

/* Messages of kernels that failed, "name: message" each, oldest first; empties the list. */
std::vector<std::string> take_errors();

/* True if that list is not empty. */
extern std::atomic<bool> pending_errors;

/* Takes the messages and throws them as one std::runtime_error, if there are any. */
void raise_errors();

} // namespace accel
