/* Lines of sixteen rows of W on their way to the other side (accel/lines.h): codes are ready from the beginning of a line
 * on, and other work goes between the quarters. And scales that are fetched little by little.
 *
 * Source     Written for this library.
 */
#ifndef BONSAI_QMV_AMX_LINES_H
#define BONSAI_QMV_AMX_LINES_H

#include <immintrin.h>

#include "planes.h"

namespace bonsai {
namespace {

using accel_lines::scales_to_lanes;

struct Lines : accel_lines::Square {
  /* Those of sixteen rows at `byte`, of which `bytes` are there; zeros behind. Fetches lines at `near` and `far`. */
  inline __attribute__((always_inline)) void load(const uint8_t* const* w, int64_t byte, int64_t bytes, int64_t near,
                                                  int64_t far) {
    const __mmask16 have = bytes >= 64 ? (__mmask16)0xffff : (__mmask16)((1u << (bytes / 4)) - 1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i row[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        row[r] = _mm512_maskz_loadu_epi32(have, w[4 * r + i] + byte);
        __builtin_prefetch(w[4 * r + i] + near);
        __builtin_prefetch(w[4 * r + i] + far, 0, 2);
      }
      put(i, row);
    }
  }
};

/* What is read once for every set of outputs, in as many parts as W is read in. */
struct Soon {
  const char* from;
  int64_t bytes, part; /* of a set; of a part, whole lines, four at most */

  Soon(const void* data, int32_t dtype, int64_t numbers, int64_t parts)
      : from((const char*)data), bytes(numbers * (dtype == ACCEL_FLOAT32 ? 4 : 2)),
        part(bytes > 0 ? min64(ceil_div(bytes, parts * 64), 4) * 64 : 0) {}
  inline __attribute__((always_inline)) void fetch(int64_t set, int64_t i) const {
    const char* at = from + set * bytes + i * part;
    for (int64_t b = 0; b < part; b += 64) __builtin_prefetch(at + b, 0, 2);
  }
};

}  // namespace
}  // namespace bonsai
#endif
