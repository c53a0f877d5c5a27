// The whole library, in place of <metal_stdlib> and its relatives. Kernel text follows, with its address spaces
// defined away: the host has one.
#pragma once

#include "types.h"
#include "vec.h"
#include "math.h"
#include "traits.h"
#include "simd.h"
#include "matrix.h"
#include "uniform.h"
#include "atomic.h"
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
