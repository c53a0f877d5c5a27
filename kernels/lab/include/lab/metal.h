// The whole library, in place of <metal_stdlib> and its relatives. Kernel text follows, with its address spaces
// defined away: the host has one.
#pragma once

#include "types.h"
#include "vec.h"
#include "geometric.h"
#include "pack.h"
#include "traits.h"
#include "simd.h"
#include "quad.h"
#include "matrix.h"
#include "uniform.h"
#include "atomic.h"
#include "fence.h"
#include "shift.h"
#include "invoke.h"

namespace metal {
using ::as_type;
using ::bfloat;
using ::half;
}  // namespace metal

#define device
#define constant
#define thread
#define threadgroup
#define kernel
#define METAL_FUNC inline
#define METAL_INTERNAL
#define assert(x) ((void)0)
// What functions are given by value is seen where they are inlined only.
#define noinline
// Words of later C++, which are names in Metal.
#define concept lab_word_concept
#define requires lab_word_requires
#define consteval lab_word_consteval
#define constinit lab_word_constinit
#define co_await lab_word_co_await
#define co_return lab_word_co_return
#define co_yield lab_word_co_yield
#define char8_t lab_word_char8_t
