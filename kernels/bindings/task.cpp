#include "task.h"

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>

#include "isa.h"
#include "scratch.h"
#include "thread_pool.h"

namespace accel {

std::atomic<bool> pending_errors{false};

namespace {

/* Failures of kernels on any thread, until somebody asks. */
struct Errors {
  static constexpr size_t kMax = 256; // a kernel that fails in a loop must not eat the memory
  std::mutex mutex;
  std::deque<std::string> messages;
};
std::atomic<Errors*> errors_now{nullptr};

Errors& errors() {
  Errors* e = errors_now.load(std::memory_order_acquire);
  if (e) return *e;
  // A forked child starts with an empty list: another thread may have held the lock at the fork.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { errors_now.store(nullptr); });
  (void)registered;
  Errors* fresh = new Errors;
  if (errors_now.compare_exchange_strong(e, fresh)) return *fresh;
  delete fresh;
  return *e;
}

/* What the host's functions find behind the accel_call they are given. */
struct Running {
  accel_call call;
  Meanwhile* meanwhile = nullptr;
  std::mutex mutex;
  bool failed = false;
  std::string message;

  static Running& of(const accel_call* call) {
    static_assert(offsetof(accel_call, struct_size) == 0);
    return *reinterpret_cast<Running*>(const_cast<accel_call*>(call));
  }
  void fail(const char* why) {
    std::lock_guard<std::mutex> lock(mutex);
    if (failed) return;
    failed = true;
    try {
      message = why && *why ? why : "the kernel gave no reason";
    } catch (...) {
    }
  }
};

void host_parallel_for(const accel_call* call, int64_t n, int64_t grain, accel_task task, void* arg) {
  Running& running = Running::of(call);
  Meanwhile* meanwhile = running.meanwhile;
  if (!meanwhile || !meanwhile->run) {
    pool::parallel_for(n, grain, task, arg);
    return;
  }
  const auto run = meanwhile->run;
  meanwhile->run = nullptr; // before any task runs, which may have loops of its own
  pool::begin(n, grain, task, arg);
  run(meanwhile->arg);
  pool::finish();
}

void* host_scratch(const accel_call* call, size_t bytes) {
  void* block = Scratch::local().take(bytes);
  if (!block) Running::of(call).fail("out of memory");
  return block;
}

void host_fail(const accel_call* call, const char* message) { Running::of(call).fail(message); }

const accel_host kHost = {sizeof(accel_host), ACCEL_ABI_VERSION, host_parallel_for, host_scratch, host_fail};

/* The value of a failed output: NaN where the type has one. */
void fill_invalid(const accel_array& a) {
  auto all = [&](auto value) {
    auto* p = static_cast<decltype(value)*>(a.data);
    for (int64_t i = 0; i < a.size; ++i) p[i] = value;
  };
  switch (a.dtype) {
    case ACCEL_FLOAT16: all(uint16_t(0x7e00)); break;
    case ACCEL_BFLOAT16: all(uint16_t(0x7fc0)); break;
    case ACCEL_FLOAT32: all(std::numeric_limits<float>::quiet_NaN()); break;
    case ACCEL_FLOAT64: all(std::numeric_limits<double>::quiet_NaN()); break;
    case ACCEL_COMPLEX64: {
      auto* p = static_cast<float*>(a.data);
      for (int64_t i = 0; i < 2 * a.size; ++i) p[i] = std::numeric_limits<float>::quiet_NaN();
      break;
    }
    default:
      if (a.size) std::memset(a.data, 0, size_t(a.size) * accel_itemsize(a.dtype));
  }
}

template <typename T>
void copy_strided(const accel_array& from, T* to) {
  // Dimensions of length 1 say nothing; neighbours that lie one behind the other are one dimension.
  std::vector<int64_t> shape, strides;
  for (int d = 0; d < from.ndim; ++d) {
    if (from.shape[d] == 1) continue;
    if (!shape.empty() && strides.back() == from.shape[d] * from.strides[d]) {
      shape.back() *= from.shape[d];
      strides.back() = from.strides[d];
    } else {
      shape.push_back(from.shape[d]);
      strides.push_back(from.strides[d]);
    }
  }
  if (shape.empty()) shape.push_back(1), strides.push_back(1);
  const int outer = int(shape.size()) - 1;
  const int64_t length = shape[outer], step = strides[outer], rows = from.size / length;
  const T* base = static_cast<const T*>(from.data);
  const int64_t grain = std::max<int64_t>(1, 32768 / length);
  pool::for_range(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t offset = 0, rest = row;
      for (int d = outer - 1; d >= 0; --d) {
        offset += rest % shape[d] * strides[d];
        rest /= shape[d];
      }
      const T* src = base + offset;
      T* dst = to + row * length;
      if (step == 1) {
        std::memcpy(dst, src, size_t(length) * sizeof(T));
      } else {
        for (int64_t i = 0; i < length; ++i) dst[i] = src[i * step];
      }
    }
  });
}

} // namespace

void copy_row_major(const accel_array& from, void* to) {
  if (from.size == 0) return;
  switch (accel_itemsize(from.dtype)) {
    case 1: copy_strided(from, static_cast<uint8_t*>(to)); break;
    case 2: copy_strided(from, static_cast<uint16_t*>(to)); break;
    case 4: copy_strided(from, static_cast<uint32_t*>(to)); break;
    default: copy_strided(from, static_cast<uint64_t*>(to)); break;
  }
}

void Task::reserve(size_t inputs, size_t outputs, size_t dims) {
  arrays_.reserve(inputs + outputs);
  dims_.reserve(2 * dims);
}

void Task::add(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim) {
  accel_array a;
  a.dtype = dtype;
  a.ndim = ndim;
  a.size = 1;
  a.shape = dims_.data() + dims_.size();
  for (int d = 0; d < ndim; ++d) {
    dims_.push_back(shape[d]);
    a.size *= shape[d];
  }
  a.strides = dims_.data() + dims_.size();
  for (int d = 0; d < ndim; ++d) dims_.push_back(strides[d]);
  a.data = a.size ? data : nullptr;
  arrays_.push_back(a);
}

void Task::add_input(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim) {
  add(data, dtype, shape, strides, ndim);
  ++n_inputs_;
}

void Task::add_output(void* data, int dtype, const int32_t* shape, const int64_t* strides, int ndim) {
  add(data, dtype, shape, strides, ndim);
}

void Task::run() {
  Scratch::Scope scope;
  run_kernel(*kernel, name, *params, ensure_row_contiguous, arrays_.data(), n_inputs_, arrays_.size() - n_inputs_,
             copies_);
}

void run_kernel(const Kernel& kernel, const std::string& name, const std::vector<accel_param>& params,
                bool ensure_row_contiguous, accel_array* arrays, size_t n_inputs, size_t n_outputs,
                const std::vector<std::pair<size_t, size_t>>& copies, Meanwhile* meanwhile) {
  const size_t n = n_inputs + n_outputs;
  bool work = n_outputs == 0;
  for (size_t i = n_inputs; i < n; ++i) work |= arrays[i].size != 0;
  if (!work) return; // all outputs are empty

  constexpr size_t kInline = 16;
  accel_array* few[kInline];
  std::vector<accel_array*> many;
  accel_array** pointers = few;
  if (n > kInline) {
    many.resize(n);
    pointers = many.data();
  }
  for (size_t i = 0; i < n; ++i) {
    accel_array& a = arrays[i];
    pointers[i] = &a;
    if (i >= n_inputs || !ensure_row_contiguous || accel_is_row_contiguous(&a)) continue;
    void* copy = Scratch::local().take(size_t(a.size) * accel_itemsize(a.dtype));
    if (!copy) {
      for (size_t o = n_inputs; o < n; ++o) fill_invalid(arrays[o]);
      record_error(name + ": out of memory for a row-contiguous copy of an input");
      return;
    }
    copy_row_major(a, copy);
    a.data = copy;
    int64_t* strides = const_cast<int64_t*>(a.strides);
    int64_t expect = 1;
    for (int d = a.ndim - 1; d >= 0; --d) {
      strides[d] = expect;
      expect *= a.shape[d];
    }
  }
  for (const auto& [input, output] : copies) copy_row_major(arrays[input], arrays[n_inputs + output].data);
  enter_kernel(kernel, name, params.data(), int32_t(params.size()), pointers, int32_t(n_inputs), int32_t(n_outputs),
               meanwhile);
}

void enter_kernel(const Kernel& kernel, const std::string& name, const accel_param* params, int32_t n_params,
                  accel_array* const* arrays, int32_t n_inputs, int32_t n_outputs, Meanwhile* meanwhile) {
  Running running;
  running.meanwhile = meanwhile;
  accel_call& call = running.call;
  call.struct_size = sizeof(accel_call);
  call.abi_version = ACCEL_ABI_VERSION;
  call.host = &kHost;
  call.inputs = arrays;
  call.outputs = arrays + n_inputs;
  call.n_inputs = n_inputs;
  call.n_outputs = n_outputs;
  call.params = params;
  call.n_params = n_params;
  call.threads = pool::threads();
  call.isa = isa_bits();
  kernel.fn(&call);
  if (running.failed) {
    for (int32_t i = n_inputs; i < n_inputs + n_outputs; ++i) fill_invalid(*arrays[i]);
    record_error(name + ": " + running.message);
  }
}

void record_error(std::string message) {
  Errors& e = errors();
  std::lock_guard<std::mutex> lock(e.mutex);
  if (e.messages.size() < Errors::kMax) e.messages.push_back(std::move(message));
  pending_errors.store(true, std::memory_order_release);
}

std::vector<std::string> take_errors() {
  Errors& e = errors();
  std::lock_guard<std::mutex> lock(e.mutex);
  std::vector<std::string> taken(e.messages.begin(), e.messages.end());
  e.messages.clear();
  pending_errors.store(false, std::memory_order_release);
  return taken;
}

void raise_errors() {
  std::string all;
  for (const std::string& message : take_errors()) all += (all.empty() ? "" : "; ") + message;
  if (!all.empty()) throw std::runtime_error("a CPU kernel failed: " + all);
}

} // namespace accel
