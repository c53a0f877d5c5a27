/* The entry for many rows with AMX: blocks of rows of x, and which way they go (amx_body.h, amx_bf16_body.h). */
#ifndef BONSAI_QMV_AMX_ROWS_H
#define BONSAI_QMV_AMX_ROWS_H

#include "amx_bf16_body.h"

namespace bonsai {
namespace {

/* x in pieces is exact, but sums are rounded with the largest x in them, which may meet a weight of zero: at most once for
 * each 32 numbers, by 2^-24 of what they have come to. In the measure of spread, 2 / (4 * sqrt(32)). */
constexpr float kPieces = 0.1f;

inline void amx_large_rows(const Problem& p) {
  if (!(p.spread < INFINITY)) {
    large_rows<Avx512>(p);
    return;
  }
  AmxJob job;
  job.p = &p;
  job.stretches = ceil_div(p.k, 64);
  job.unit = (float*)accel_scratch(p.call, (size_t)p.rows * sizeof(float));
  if (!job.unit || !job.slots.make(p.call, job.stretches * 64)) return;
  /* Sums in bfloat16 tiles are float32: what is added to the weights must not be much larger than they are. */
  const bool able = accel_has(p.call, ACCEL_ISA_AMX_BF16) && p.spread * 4 <= sqrtf((float)p.k);
  auto unfit_rows = [&](float of_one) {
    job.of_one = of_one;
    accel_parallel_for(p.call, p.rows, 16, amx_units, &job);
    int64_t n = 0;
    for (int64_t m = 0; m < p.rows; ++m) n += job.unit[m] == 0;
    return n;
  };
  bool pieces = able && p.group == 32;
  int64_t unfit = unfit_rows(pieces ? kPieces : 1.0f);
  if (able && !pieces && unfit) { /* rows that are not finite fit neither way and are no reason to change it */
    const int64_t neither = unfit_rows(kPieces);
    pieces = neither < unfit;
    unfit = pieces ? neither : unfit_rows(1.0f);
  }
  if (unfit > p.rows / 8 + 1) {
    large_rows<Avx512>(p);
    return;
  }
  if (pieces) {
    for (int64_t m = 0; m < p.rows; ++m) job.unit[m] = job.unit[m] != 0; /* x itself */
  }
  job.groups = pieces ? p.k / 32 : p.k / p.group;
  job.expand = pieces ? __builtin_ctz((unsigned)(p.group / 32)) : 0;
  const Order order(p.bits, pieces ? 32 : p.group);
  job.order = &order;
  const int64_t row_bytes = pieces ? job.groups * 192 : job.stretches * 192, most = kBlockBytes / (16 * row_bytes);
  const int64_t block = min64(ceil_div(p.rows, 16), most < 2 ? 2 : most) * 16;
  /* Tiles of outputs at a time: what fits, and enough pieces that threads end together. */
  const int64_t columns = ceil_div(p.n, 16), fair = columns / (4 * job.slots.count);
  const int64_t code_bytes = pieces ? job.groups * 1024 : job.stretches * 1024;
  int64_t grain = min64(fair, min64(kCodeBytes / code_bytes, 16));
  if (grain < 1) grain = 1;
  const int64_t slot_bytes = grain * (job.groups * 128 + code_bytes + 1024) + (pieces ? job.stretches * 1024 : 0);
  job.x = (int8_t*)accel_scratch(p.call, (size_t)(block * row_bytes));
  job.totals = (float*)accel_scratch(p.call, (size_t)(block * job.groups) * sizeof(float));
  if (!job.x || !job.totals || !job.slots.make(p.call, ceil_div(slot_bytes, 4))) return;
  const accel_task run = p.bits == 1   ? (pieces ? bf16_run<1> : amx_run<1>)
                         : p.bits == 2 ? (pieces ? bf16_run<2> : amx_run<2>)
                         : p.bits == 3 ? (pieces ? bf16_run<3> : amx_run<3>)
                         : p.bits == 4 ? (pieces ? bf16_run<4> : amx_run<4>)
                         : p.bits == 5 ? (pieces ? bf16_run<5> : amx_run<5>)
                         : p.bits == 6 ? (pieces ? bf16_run<6> : amx_run<6>)
                                       : (pieces ? bf16_run<8> : amx_run<8>);
  for (job.m0 = 0; job.m0 < p.rows; job.m0 += block) {
    job.rows = min64(block, p.rows - job.m0);
    job.tiles = ceil_div(job.rows, 16);
    accel_parallel_for(p.call, job.tiles, 1, pieces ? bf16_pieces : amx_digits, &job);
    accel_parallel_for(p.call, columns, grain, run, &job);
  }
  for (int64_t m = 0; unfit && m < p.rows; ++m) {
    if (job.unit[m] != 0) continue;
    Problem one = p;
    one.row0 = m;
    one.rows = 1;
    small_rows<Avx512>(one);
    --unfit;
  }
}

}  // namespace
}  // namespace bonsai
#endif
