/* backend_core._native: the one place that touches mlx's C++ ABI. */
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "call.h"
#include "cpus.h"
#include "isa.h"
#include "mlx/version.h"
#include "scratch.h"
#include "task.h"
#include "thread_pool.h"

using namespace nanobind::literals;
namespace nb = nanobind;

namespace accel {
namespace {

std::string version(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

nb::dict build_info() {
  nb::dict info;
  info["mlx"] = version(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  info["nanobind"] = version(NB_VERSION_MAJOR, NB_VERSION_MINOR, NB_VERSION_PATCH);
  info["kernel_abi"] = ACCEL_ABI_VERSION;
#if defined(__clang__)
  info["compiler"] = "clang " __VERSION__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  return info;
}

/* What the compiled-in layout says about an array, to be compared with what Python says. */
nb::tuple abi_probe(const mx::array& a) {
  nb::list shape;
  for (int d : a.shape()) shape.append(d);
  return nb::make_tuple(nb::tuple(shape), a.size(), a.itemsize(), a.ndim(), int(a.dtype().val()));
}

/* Plain loops through the pool, for tests: the sum of (i * i) mod 2^64 over [0, n), all pieces as they were run,
 * and how many threads took part. */
nb::tuple selftest_parallel(int64_t n, int64_t grain, bool nested) {
  std::mutex mutex;
  std::vector<std::pair<int64_t, int64_t>> pieces;
  std::set<std::thread::id> threads;
  std::atomic<uint64_t> sum{0};
  {
    nb::gil_scoped_release release;
    pool::for_range(n, grain, [&](int64_t begin, int64_t end) {
      std::atomic<uint64_t> part{0};
      auto add = [&](int64_t b, int64_t e) {
        uint64_t p = 0;
        for (int64_t i = b; i < e; ++i) p += uint64_t(i) * uint64_t(i);
        part.fetch_add(p, std::memory_order_relaxed);
      };
      if (nested) {
        pool::for_range(end - begin, 3, [&](int64_t b, int64_t e) { add(begin + b, begin + e); });
      } else {
        add(begin, end);
      }
      sum.fetch_add(part.load(), std::memory_order_relaxed);
      std::lock_guard<std::mutex> lock(mutex);
      pieces.emplace_back(begin, end);
      threads.insert(std::this_thread::get_id());
    });
  }
  nb::list list;
  for (auto& [b, e] : pieces) list.append(nb::make_tuple(b, e));
  return nb::make_tuple(sum.load(), list, threads.size());
}

/* Loops over [0, n) for each n, begun one after the other and finished together: their sums, and how many threads took
 * part. ends: the last one is an ordinary loop, which finishes all. */
nb::tuple selftest_together(const std::vector<int64_t>& lengths, int64_t grain, bool ends) {
  struct One {
    std::atomic<uint64_t> sum{0};
    std::mutex* mutex;
    std::set<std::thread::id>* threads;
  };
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::vector<One> loops(lengths.size());
  {
    nb::gil_scoped_release release;
    auto task = [](void* arg, int64_t begin, int64_t end) {
      One& one = *static_cast<One*>(arg);
      uint64_t p = 0;
      // A loop inside of a task runs there and finishes nothing.
      pool::for_range(end - begin, 2, [&](int64_t b, int64_t e) {
        for (int64_t i = begin + b; i < begin + e; ++i) p += uint64_t(i) * uint64_t(i);
      });
      pool::finish();
      one.sum.fetch_add(p, std::memory_order_relaxed);
      std::lock_guard<std::mutex> lock(*one.mutex);
      one.threads->insert(std::this_thread::get_id());
    };
    for (size_t i = 0; i < loops.size(); ++i) {
      loops[i].mutex = &mutex;
      loops[i].threads = &threads;
      (ends && i + 1 == loops.size() ? pool::parallel_for : pool::begin)(lengths[i], grain, task, &loops[i]);
    }
    if (!ends) pool::finish();
  }
  nb::list sums;
  for (One& one : loops) sums.append(one.sum.load());
  return nb::make_tuple(sums, threads.size());
}

/* Nanoseconds per parallel loop of `pieces` empty pieces, for measuring. */
double selftest_loop_cost(int64_t pieces, int repeat) {
  nb::gil_scoped_release release;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeat; ++i) pool::for_range(pieces, 1, [](int64_t, int64_t) {});
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / repeat;
}

} // namespace
} // namespace accel

/* The kernel of the import-time probe, loaded from this very module: out = 2 * in + param 0. */
ACCEL_KERNEL void accel_selftest(const accel_call* call) {
  const accel_array &in = *call->inputs[0], &out = *call->outputs[0];
  if (in.dtype != ACCEL_FLOAT32 || out.size != in.size) return accel_fail(call, "selftest takes float32");
  for (int64_t i = 0; i < out.size; ++i) {
    static_cast<float*>(out.data)[i] = 2 * static_cast<const float*>(in.data)[i] + float(call->params[0].i);
  }
}

NB_MODULE(_native, m) {
  // Registers mx.array with nanobind's type registry and loads libmlx.
  nb::module_::import_("mlx.core");
  m.doc() = "CPU kernels as lazy mlx operations. Use backend_core.cpu_kernel and backend_core.native.";
  accel::register_bound(m);
  accel::register_program(m);
  accel::register_kernels(m);
  accel::register_tracing(m);
  accel::register_reference(m);
  accel::register_repeated(m);

  m.def("build_info", &accel::build_info, "Versions this module was built against.");
  m.def("abi_probe", &accel::abi_probe, "array"_a, "(shape, size, itemsize, ndim, dtype number) of an array.");
  m.def(
      "isa",
      [] {
        const accel::Isa& isa = accel::isa();
        nb::list names;
        for (const std::string& name : isa.names) names.append(name);
        return nb::make_tuple(isa.bits, isa.level, nb::tuple(names));
      },
      "(bits, level, names) of the instruction sets kernels may use. ValueError if MLX_ACCEL_ISA is not a level.");
  m.def("threads", &accel::pool::threads, nb::call_guard<nb::gil_scoped_release>(),
        "Threads a parallel loop may use, its caller's own included.");
  m.def("set_threads", &accel::pool::set_threads, "n"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Changes the number of threads; 0 asks for the default.");
  m.def("take_errors",
        [] {
          nb::list messages;
          for (const std::string& m : accel::take_errors()) {
            // A kernel may report any bytes.
            messages.append(nb::steal(PyUnicode_DecodeUTF8(m.data(), Py_ssize_t(m.size()), "replace")));
          }
          return messages;
        },
        "Messages of kernels that failed since the last call, oldest first, as \"kernel: message\".");
  m.def("_cgroup_cpus", &accel::cgroup_cpus, "root"_a);
  m.def("_default_threads", &accel::default_threads);
  m.def("_selftest_parallel", &accel::selftest_parallel, "n"_a, "grain"_a, "nested"_a = false);
  m.def("_selftest_together", &accel::selftest_together, "lengths"_a, "grain"_a, "ends"_a);
  m.def("_selftest_loop_cost", &accel::selftest_loop_cost, "pieces"_a, "repeat"_a);
}
