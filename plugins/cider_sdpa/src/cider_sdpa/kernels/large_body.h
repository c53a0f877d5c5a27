/* Attention for any number of rows, blocked: prompts. Included once per instruction set.
 *
 * Inputs     As for few rows (small_body.h).
 * Rows       Any L, B, Hkv, S, D, Dv, Hq / Hkv.
 * Bytes      Keys and values are read once per tile of about 192 rows (query rows times heads of the group), 64 keys
 *            at a time. Blocks that no row of a tile sees are not read.
 * Exactness  rounding. Scores, exponentials, sums are float32; the result is rounded once.
 * Rows       A row's bits may depend on where in a tile it lies. They do not depend on the number of threads.
 * Method     Work is split over batch, KV heads and tiles of rows. 64 keys are turned round and, if they are halves,
 *            64 values widened, once per tile; then for a few rows at a time scores (an outer product in registers),
 *            running maximum and sum, and the weighted values follow each other in the first-level cache. Where a
 *            bool mask hides a block from those rows, or the diagonal is crossed, only what is needed is computed.
 * Source     Written for this library. Running maxima and sums over blocks of keys, and register tiling, are common
 *            knowledge; nothing was taken from another implementation.
 */
#ifndef CIDER_SDPA_LARGE_BODY_H
#define CIDER_SDPA_LARGE_BODY_H

#include "rows.h"
#include "small_body.h"

namespace cider {
namespace {

constexpr int64_t kBlock = 64;      /* keys */
constexpr int64_t kTileRows = 192;  /* rows of a tile, about */
constexpr int64_t kLeastRows = 48;  /* below this a tile is not made smaller for the sake of more tiles */
constexpr int64_t kEnoughTiles = 8;

/* scores[r][j] = q[r] . key j for RT rows and CT * 16 turned keys (`stride` floats apart from d to d + 1). */
template <class I, int RT, int CT>
void outer_tile(const float* q, int64_t qs, const float* turned, int64_t stride, int64_t depth, float* scores) {
  using V = typename I::V;
  V sum[RT][CT];
#pragma GCC unroll 8
  for (int r = 0; r < RT; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < CT; ++c) sum[r][c] = I::zero();
  }
  for (int64_t d = 0; d < depth; ++d, turned += stride) {
    V x[CT];
#pragma GCC unroll 8
    for (int c = 0; c < CT; ++c) x[c] = I::load(turned + 16 * c);
#pragma GCC unroll 8
    for (int r = 0; r < RT; ++r) {
      const V w = I::set1(q[r * qs + d]);
#pragma GCC unroll 8
      for (int c = 0; c < CT; ++c) sum[r][c] = I::fma(w, x[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < RT; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < CT; ++c) I::store(scores + r * kBlock + 16 * c, sum[r][c]);
  }
}

template <class I, int CT>
void outer_columns(int64_t cols, const float* q, int64_t qs, const float* turned, int64_t depth, float* scores) {
  if (cols == CT) {
    outer_tile<I, I::kRows, CT>(q, qs, turned, kBlock, depth, scores);
  } else if constexpr (CT > 1) {
    outer_columns<I, CT - 1>(cols, q, qs, turned, depth, scores);
  }
}

template <class I, class T>
void turn_block(const void* keys, int64_t ks, int64_t n, int64_t depth, float* out) {
  for (int64_t j = 0; j < n; j += 16) {
    turn_keys<I, T>((const typename T::Element*)keys + j * ks, ks, min64(16, n - j), depth, out + j, kBlock);
  }
}

template <class I>
struct LargeJob {
  using V = typename I::V;
  const Problem* p;
  int64_t lines, tiles;     /* query rows per tile, tiles per KV head */
  int64_t padded, qs, as;   /* rows of a tile and floats of a row of q and of sums, in whole tiles and vectors */
  Slots slots;
  void (*turn)(const void*, int64_t, int64_t, int64_t, float*);
  Widen widen; /* NULL: values are floats */
  int64_t element_k, element_v;

  int64_t slot_floats() const {
    return padded * (qs + as + 2) + kBlock * (qs + as + (p->quantized ? qs : 0)) + 2 * I::kRows * kBlock;
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const LargeJob& job = *(const LargeJob*)arg;
    const int32_t slot = job.slots.take();
    const int64_t heads = job.p->batch * job.p->kv_heads;
    for (int64_t item = begin; item < end; ++item) {
      /* Last rows first: under the causal mask they see the most. */
      job.tile(item % heads, job.tiles - 1 - item / heads, job.slots.memory + job.slots.size * slot);
    }
    job.slots.give(slot);
  }

  void tile(int64_t bh, int64_t index, float* memory) const {
    const int64_t b = bh / p->kv_heads, h = bh % p->kv_heads, i0 = index * lines;
    const int64_t rows = min64(lines, p->rows - i0) * p->group;
    float *q = memory, *acc = q + padded * qs, *turned = acc + padded * as, *wide = turned + kBlock * qs;
    float *scores = wide + kBlock * as, *mask = scores + I::kRows * kBlock, *top = mask + I::kRows * kBlock;
    float *total = top + padded, *wide_keys = total + padded;
    for (int64_t r = 0; r < rows; ++r) load_query<I>(*p, b, h * p->group + r % p->group, i0 + r / p->group, q + r * qs);
    for (int64_t r = rows; r < round_up(rows, I::kRows); ++r) {
      for (int64_t d = 0; d < qs; ++d) q[r * qs + d] = 0.0f;
    }
    for (int64_t r = 0; r < rows; ++r) {
      top[r] = -kInf;
      total[r] = 0.0f;
    }
    for (int64_t c = 0; c < rows * as; c += 16) I::store(acc + c, I::zero());

    const int64_t end = keys_seen(*p, i0 + (rows - 1) / p->group);
    for (int64_t key = 0; key < end; key += kBlock) {
      const int64_t n = min64(kBlock, end - key);
      bool ready = false;
      const float* values = wide;
      int64_t vs = as;
      for (int64_t r = 0; r < rows; r += I::kRows) {
        const int64_t count = min64(I::kRows, rows - r);
        const int64_t seen = min64(n, keys_seen(*p, i0 + (r + count - 1) / p->group) - key);
        if (seen <= 0) continue;
        if (p->kind == kArray && !masks(b, h, i0, r, count, key, seen, mask)) continue;
        if (!ready) {
          ready = true;
          prepare(b, h, key, n, turned, wide, wide_keys);
          if (!p->quantized && !widen) {
            values = (const float*)row_of(p->v, b, h, key, element_v);
            vs = p->v.stride[2];
          }
        }
        for (int64_t j = 0; j < seen; j += 16 * I::kCols) {
          outer_columns<I, I::kCols>(min64(I::kCols, ceil_div(seen - j, 16)), q + r * qs, qs, turned + j, p->depth,
                                     scores + j);
        }
        for (int64_t s = 0; s < count; ++s) {
          const int64_t mine = min64(seen, keys_seen(*p, i0 + (r + s) / p->group) - key);
          soften(scores + s * kBlock, mine, seen, mask + s * kBlock, top + r + s, total + r + s, acc + (r + s) * as);
        }
        weigh<I, F32>(count, scores, kBlock, values, vs, seen, p->width, acc + r * as, as, false, Ahead());
      }
    }

    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = h * p->group + r % p->group, i = i0 + r / p->group;
      const float sink = sink_of(*p, head), high = larger(sink, top[r]);
      if (high == -kInf && total[r] == 0.0f && sink == -kInf) {
        write_hopeless_row<I>(*p, b, head, i, acc + r * as);
        continue;
      }
      float all = total[r];
      if (p->sinks) {
        const float shrink = exponential_of<I>(top[r] - base_of(high)); /* 0 where nothing was seen */
        for (int64_t c = 0; c < as; c += 16) {
          I::store(acc + r * as + c, I::mul(I::load(acc + r * as + c), I::set1(shrink)));
        }
        all = all * shrink + exponential_of<I>(sink - base_of(high));
      }
      write_row<I>(*p, b, head, i, acc + r * as, all);
    }
  }

  /* A block of keys turned round, and of values as floats unless they are. */
  void prepare(int64_t b, int64_t h, int64_t key, int64_t n, float* turned, float* wide, float* wide_keys) const {
    if (p->quantized) {
      unpack_rows<I>(p->kq, b, h, key, n, p->depth, wide_keys, qs);
      turn_block<I, F32>(wide_keys, qs, n, p->depth, turned);
      unpack_rows<I>(p->vq, b, h, key, n, p->width, wide, as);
      return;
    }
    turn(row_of(p->k, b, h, key, element_k), p->k.stride[2], n, p->depth, turned);
    if (widen) widen(row_of(p->v, b, h, key, element_v), p->v.stride[2], n, p->width, wide, as);
  }

  /* The masks of `count` rows from r; false if a bool mask hides all these keys from all of them. */
  bool masks(int64_t b, int64_t h, int64_t i0, int64_t r, int64_t count, int64_t key, int64_t n, float* mask) const {
    bool any = false;
    for (int64_t s = 0; s < count; ++s) {
      float* out = mask + s * kBlock;
      const int64_t row = r + s;
      if (load_mask<I>(*p, b, h * p->group + row % p->group, i0 + row / p->group, key, n, out)) {
        any = true;
      } else {
        for (int64_t j = 0; j < n; ++j) out[j] = 1.0f;
      }
    }
    return any;
  }

  /* Scores of one row to exponentials, in place; keys from `mine` to `n` get 0. Running maximum, sum and sums of
   * values follow. */
  void soften(float* s, int64_t mine, int64_t n, const float* mask, float* top, float* total, float* acc) const {
    V high = I::set1(-kInf);
    for (int64_t j = 0; j < n; j += 16) {
      V x = I::load(s + j);
      if (p->kind == kArray) x = apply_mask<I>(*p, x, mask + j);
      if (mine - j < 16) x = I::keep_first(x, (int)max64(mine - j, 0), -kInf);
      I::store(s + j, x);
      high = I::max(x, high);
    }
    const float old = *top, now = larger(I::highest(high), old);
    const V base = I::set1(base_of(now));
    V sum = I::zero();
    for (int64_t j = 0; j < n; j += 16) {
      const V e = exponential<I>(I::sub(I::load(s + j), base));
      I::store(s + j, e);
      sum = I::add(sum, e);
    }
    if (now == old || old == -kInf) { /* nothing to shrink, or nothing yet */
      *total += I::sum(sum);
    } else {
      const float shrink = exponential_of<I>(old - now);
      *total = *total * shrink + I::sum(sum);
      const V factor = I::set1(shrink);
      for (int64_t c = 0; c < as; c += 16) I::store(acc + c, I::mul(I::load(acc + c), factor));
    }
    *top = now;
  }
};

template <class I>
void large_rows(const Problem& p) {
  LargeJob<I> job;
  job.p = &p;
  const int64_t heads = p.batch * p.kv_heads;
  job.lines = min64(p.rows, max64(1, kTileRows / p.group));
  while (job.lines > 1 && job.lines * p.group > kLeastRows && heads * ceil_div(p.rows, job.lines) < kEnoughTiles) {
    job.lines = ceil_div(job.lines, 2);
  }
  job.tiles = ceil_div(p.rows, job.lines);
  job.lines = ceil_div(p.rows, job.tiles);
  job.padded = round_up(job.lines * p.group, I::kRows);
  job.qs = round_up(p.depth, 16);
  job.as = round_up(p.width, 16);
  job.widen = NULL;
  switch (p.k.dtype) {
    case ACCEL_FLOAT32: job.turn = turn_block<I, F32>, job.element_k = 4; break;
    case ACCEL_FLOAT16: job.turn = turn_block<I, F16>, job.element_k = 2; break;
    default: job.turn = turn_block<I, BF16>, job.element_k = 2; break;
  }
  switch (p.v.dtype) {
    case ACCEL_FLOAT32: job.element_v = 4; break;
    case ACCEL_FLOAT16: job.widen = widen_rows<I, F16>, job.element_v = 2; break;
    default: job.widen = widen_rows<I, BF16>, job.element_v = 2; break;
  }
  if (!job.slots.make(p.call, job.slot_floats())) return;
  accel_parallel_for(p.call, heads * job.tiles, 1, LargeJob<I>::run, &job);
}

}  // namespace
}  // namespace cider
#endif
