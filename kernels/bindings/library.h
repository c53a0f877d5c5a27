/* Kernel libraries: opening them, finding a kernel, and saying clearly what is wrong. No Python, no mlx. */
#pragma once

#include <cstdint>
#include <string>

#include "accel/kernel.h"

namespace accel {

using KernelFn = void (*)(const accel_call*);

/* One kernel function of a shared library. The library stays open for the life of the process, since kernels
 * may still be queued on a stream when the last Python object that names them goes away. */
struct Kernel {
  std::string path, symbol;
  KernelFn fn = nullptr;
  uint32_t abi_version = 0; // what the library was built against

  /* Throws std::runtime_error. */
  Kernel(std::string path, std::string symbol);
};

} // namespace accel
