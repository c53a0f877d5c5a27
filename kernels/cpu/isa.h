/* Which instruction sets kernels may use: what the processor and the operating system support, capped by
 * the environment variable MLX_ACCEL_ISA. Plain C++, no Python and no mlx. */
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accel {

struct Isa {
  uint64_t bits = 0;              // ACCEL_ISA_ bits of accel/kernel.h
  std::string level;              // the highest named level that `bits` reaches, "portable" if none
  std::vector<std::string> names; // one name per bit
};

/* What processor and operating system support. */
uint64_t detect_isa();

/* detect_isa() capped by MLX_ACCEL_ISA, read once. Throws std::invalid_argument, naming the accepted values,
 * if the variable holds anything else. */
const Isa& isa();

/* isa().bits, or 0 where isa() would throw. */
uint64_t isa_bits() noexcept;

} // namespace accel
