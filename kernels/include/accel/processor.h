/* accel/processor.h: what kernels ask about the processor beyond its instruction sets. C++; part of the kernel SDK.
 */
#ifndef ACCEL_PROCESSOR_H
#define ACCEL_PROCESSOR_H

/* Whether long runs of memory, fetched into the second-level cache, are read faster than neighbouring rows fetched into
 * the first, whose places for lines under way are few: true on AMD's processors (Zen 4: 33 against 29 GB/s with two
 * threads); Intel's were not measured. */
static inline bool accel_fetches_far() {
#if defined(__x86_64__)
  static const bool far = __builtin_cpu_is("amd");
  return far;
#else
  return false;
#endif
}

#endif
