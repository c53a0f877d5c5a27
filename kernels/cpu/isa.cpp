#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#include "accel/kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#define ACCEL_X86 1
#elif defined(__aarch64__)
#define ACCEL_ARM 1
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace accel {
namespace {

#if ACCEL_X86
uint64_t xcr0() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t(hi) << 32) | lo;
}

/* Linux grants the AMX tile registers to a process only on request. */
bool request_amx() {
#if defined(__linux__)
  constexpr long arch_req_xcomp_perm = 0x1023, xfeature_xtiledata = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
  return false;
#endif
}

uint64_t detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave || !avx) return 0;
  // An instruction set is usable only if the operating system saves its registers.
  const uint64_t saved = xcr0();
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6, tiles = (saved & 0x60000) == 0x60000;
  if (!ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const unsigned b7 = b, c7 = c, d7 = d, leaves = a;
  auto on = [](unsigned word, int bit) { return ((word >> bit) & 1u) != 0; };

  uint64_t bits = 0;
  if (on(b7, 5) && fma && f16c) bits |= ACCEL_ISA_AVX2;
  if (!bits || !zmm) return bits;
  if (!(on(b7, 16) && on(b7, 17) && on(b7, 30) && on(b7, 31))) return bits;
  bits |= ACCEL_ISA_AVX512;
  if (on(c7, 1)) bits |= ACCEL_ISA_AVX512_VBMI;
  if (on(c7, 11)) bits |= ACCEL_ISA_AVX512_VNNI;
  if (on(d7, 23)) bits |= ACCEL_ISA_AVX512_FP16;
  if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && on(a, 5)) bits |= ACCEL_ISA_AVX512_BF16;
  const bool amx_tile = on(d7, 24), amx_int8 = on(d7, 25), amx_bf16 = on(d7, 22);
  if (tiles && amx_tile && (amx_int8 || amx_bf16) && request_amx()) {
    if (amx_int8) bits |= ACCEL_ISA_AMX_INT8;
    if (amx_bf16) bits |= ACCEL_ISA_AMX_BF16;
  }
  return bits;
}
#elif ACCEL_ARM && defined(__APPLE__)
bool feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

uint64_t detect() {
  uint64_t bits = ACCEL_ISA_NEON;
  if (feature("hw.optional.arm.FEAT_FP16")) bits |= ACCEL_ISA_NEON_FP16;
  if (feature("hw.optional.arm.FEAT_DotProd")) bits |= ACCEL_ISA_NEON_DOTPROD;
  if (feature("hw.optional.arm.FEAT_I8MM")) bits |= ACCEL_ISA_NEON_I8MM;
  return bits;
}
#elif ACCEL_ARM && defined(__linux__)
uint64_t detect() {
  const unsigned long cap = getauxval(AT_HWCAP), cap2 = getauxval(AT_HWCAP2);
  uint64_t bits = 0;
  if (cap & (1ul << 1)) bits |= ACCEL_ISA_NEON;                          // ASIMD
  if (cap & (1ul << 10)) bits |= ACCEL_ISA_NEON_FP16;                    // ASIMDHP
  if (cap & (1ul << 20)) bits |= ACCEL_ISA_NEON_DOTPROD;                 // ASIMDDP
  if (cap2 & (1ul << 13)) bits |= ACCEL_ISA_NEON_I8MM;
  return bits;
}
#else
uint64_t detect() { return 0; }
#endif

struct Level {
  const char* name;
  uint64_t mask;     // all that the level admits
  uint64_t required; // what must be there for the level to be reached
};

// Lowest first, of the architecture this was compiled for.
const Level kLevels[] = {
    {"portable", 0, 0},
#if ACCEL_X86
    {"avx2", ACCEL_ISA_AVX2, ACCEL_ISA_AVX2},
    {"avx512", ACCEL_ISA_AVX2 | ACCEL_ISA_AVX512, ACCEL_ISA_AVX512},
    {"avx512_vnni", ACCEL_ISA_AVX2 | ACCEL_ISA_AVX512 | ACCEL_ISA_AVX512_VBMI | ACCEL_ISA_AVX512_VNNI,
     ACCEL_ISA_AVX512 | ACCEL_ISA_AVX512_VNNI},
#elif ACCEL_ARM
    {"neon", ACCEL_ISA_NEON | ACCEL_ISA_NEON_FP16, ACCEL_ISA_NEON},
    {"neon_dotprod", ACCEL_ISA_NEON | ACCEL_ISA_NEON_FP16 | ACCEL_ISA_NEON_DOTPROD,
     ACCEL_ISA_NEON | ACCEL_ISA_NEON_DOTPROD},
#endif
};

struct Name {
  uint64_t bit;
  const char* name;
};
const Name kNames[] = {
    {ACCEL_ISA_AVX2, "avx2"},
    {ACCEL_ISA_AVX512, "avx512"},
    {ACCEL_ISA_AVX512_VBMI, "avx512_vbmi"},
    {ACCEL_ISA_AVX512_VNNI, "avx512_vnni"},
    {ACCEL_ISA_AVX512_BF16, "avx512_bf16"},
    {ACCEL_ISA_AVX512_FP16, "avx512_fp16"},
    {ACCEL_ISA_AMX_INT8, "amx_int8"},
    {ACCEL_ISA_AMX_BF16, "amx_bf16"},
    {ACCEL_ISA_NEON, "neon"},
    {ACCEL_ISA_NEON_FP16, "neon_fp16"},
    {ACCEL_ISA_NEON_DOTPROD, "neon_dotprod"},
    {ACCEL_ISA_NEON_I8MM, "neon_i8mm"},
};

Isa capped() {
  const char* value = std::getenv("MLX_ACCEL_ISA");
  const std::string wanted = value ? value : "";
  uint64_t mask = ~0ull;
  if (!wanted.empty() && wanted != "native") {
    bool known = false;
    std::string accepted;
    for (const Level& level : kLevels) {
      if (wanted == level.name) known = true, mask = level.mask;
      accepted += std::string(level.name) + ", ";
    }
    if (!known) {
      throw std::invalid_argument(
          "MLX_ACCEL_ISA=" + wanted + " is not a level of this processor family; use one of " + accepted +
          "native");
    }
  }
  Isa isa;
  isa.bits = detect_isa() & mask;
  for (const Level& level : kLevels) {
    if ((isa.bits & level.required) == level.required) isa.level = level.name;
  }
  for (const Name& n : kNames) {
    if (isa.bits & n.bit) isa.names.push_back(n.name);
  }
  return isa;
}

} // namespace

uint64_t detect_isa() {
  static const uint64_t bits = detect();
  return bits;
}

const Isa& isa() {
  static const Isa value = capped(); // a throwing initialiser runs again at the next call
  return value;
}

uint64_t isa_bits() noexcept {
  static const uint64_t bits = [] {
    try {
      return isa().bits;
    } catch (...) {
      return uint64_t(0);
    }
  }();
  return bits;
}

} // namespace accel
