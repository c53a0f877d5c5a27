#include "library.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <stdexcept>

namespace accel {

Kernel::Kernel(std::string path_, std::string symbol_) : path(std::move(path_)), symbol(std::move(symbol_)) {
  auto refuse = [&](const std::string& why) {
    return std::runtime_error("cannot load kernel " + symbol + " from " + path + ": " + why);
  };
  struct stat st;
  if (stat(path.c_str(), &st) != 0) throw refuse("there is no such file");
  if (!S_ISREG(st.st_mode)) throw refuse("it is not a file");
  // A name without a slash would be looked for in the system's library directories.
  const std::string file = path.find('/') == std::string::npos ? "./" + path : path;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* error = dlerror();
    throw refuse(error ? error : "dlopen failed");
  }
  auto version = reinterpret_cast<uint32_t (*)()>(dlsym(handle, "accel_library_abi_version"));
  if (!version) {
    throw refuse(
        "the library does not say which kernel ABI it was built for (accel_library_abi_version is missing); "
        "a kernel's source includes accel/kernel.h");
  }
  abi_version = version();
  if (abi_version > ACCEL_ABI_VERSION) {
    throw refuse("it was built for version " + std::to_string(abi_version) +
                 " of the kernel ABI, and this mlx-accel knows version " + std::to_string(ACCEL_ABI_VERSION) +
                 "; upgrade mlx-accel");
  }
  fn = reinterpret_cast<KernelFn>(dlsym(handle, symbol.c_str()));
  if (!fn) {
    throw refuse("the library has no such symbol; a kernel is declared with ACCEL_KERNEL, which gives it C linkage");
  }
}

} // namespace accel
