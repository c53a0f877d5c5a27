/* Attention for 1..16 rows: decode and the verification of drafts. Included once per instruction set.
 *
 * Inputs     q (B, Hq, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) in float32, float16 or bfloat16 each, any strides;
 *            elements of a key and of a value are neighbours in memory.
 * Rows       L = 1..16; any B, Hkv, S, D, Dv, Hq / Hkv.
 * Bytes      each key and value once for all L * Hq / Hkv rows that use it; causally hidden keys are not read, nor
 *            are pieces (below) that a bool mask hides from all rows.
 * Exactness  rounding. Scores, exponentials, sums are float32; the result is rounded once.
 * Rows       Independent of each other, bit for bit: row i of a causal call has the bits of a call with that row
 *            alone and the keys it sees. For that the order of every sum is fixed and counts from key 0:
 *              score    16 interleaved sums over d, added in one tree;
 *              piece    128 keys from a multiple of 128: maximum, exponentials, 16 interleaved sums of them, one sum
 *                       over the piece's keys in order for each column of v;
 *              row      pieces in order, each scaled by e^(its maximum - the row's maximum). A piece of which the row
 *                       sees nothing adds nothing.
 *            Tiles, threads and other rows only change what is in flight at the same time.
 * Method     Work is split over batch, KV heads and pieces. For few rows a score's 16 sums are the lanes of a
 *            register, reduced for 16 keys together. For many rows 16 keys are turned round first, so that keys are
 *            the lanes; the same additions happen in the same order.
 * Source     Written for this library. Splitting keys with later merging, and sharing each key among the heads of its
 *            group, are common knowledge; nothing was taken from another implementation.
 */
#ifndef CIDER_SDPA_SMALL_BODY_H
#define CIDER_SDPA_SMALL_BODY_H

#include "rows.h"

namespace cider {
namespace {

constexpr int64_t kPiece = 128;
constexpr int64_t kTurned = 32; /* keys turned round at a time */

/* The scores of RT rows with 16 keys, of which n exist (the last is repeated). */
template <class I, class T, int RT>
void dot_tile(const float* q, int64_t qs, int64_t depth, const typename T::Element* k, int64_t ks, int64_t n,
              float* scores, const Ahead& ahead, int64_t ahead_row) {
  using V = typename I::V;
  V part[4][RT];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const typename T::Element* key[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) key[j] = k + min64(g + 4 * j, n - 1) * ks;
    if (ahead.at) {
      for (int j = 0; j < 4; ++j) ahead.fetch(ahead_row + 4 * g + j);
    }
    V sum[4][RT];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
      for (int r = 0; r < RT; ++r) sum[j][r] = I::zero();
    }
    int64_t d = 0;
    for (; d + 16 <= depth; d += 16) {
      V x[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) x[j] = I::get(T(), key[j] + d);
#pragma GCC unroll 4
      for (int r = 0; r < RT; ++r) {
        const V w = I::load(q + r * qs + d);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[j][r] = I::fma(w, x[j], sum[j][r]);
      }
    }
    if (d < depth) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const V x = I::get_part(T(), key[j] + d, (int)(depth - d));
#pragma GCC unroll 4
        for (int r = 0; r < RT; ++r) sum[j][r] = I::fma(I::load(q + r * qs + d), x, sum[j][r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < RT; ++r) part[g][r] = I::fold4(sum[0][r], sum[1][r], sum[2][r], sum[3][r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < RT; ++r) {
    I::store(scores + r * kPiece, I::fold16(part[0][r], part[1][r], part[2][r], part[3][r]));
  }
}

template <class I, class T, int RT>
void dot_rows(int64_t rows, const float* q, int64_t qs, int64_t depth, const typename T::Element* k, int64_t ks,
              int64_t n, float* scores, const Ahead& ahead, int64_t ahead_row) {
  if (rows == RT) {
    dot_tile<I, T, RT>(q, qs, depth, k, ks, n, scores, ahead, ahead_row);
  } else if constexpr (RT > 1) {
    dot_rows<I, T, RT - 1>(rows, q, qs, depth, k, ks, n, scores, ahead, ahead_row);
  }
}

/* 16 keys, of which n exist, turned round: out[d][key], zeros in rows beyond depth. */
template <class I, class T>
void turn_keys(const typename T::Element* k, int64_t ks, int64_t n, int64_t depth, float* out, int64_t stride) {
  for (int64_t d = 0; d < depth; d += 16) {
    const int here = (int)min64(16, depth - d);
    typename I::V row[16];
    if (here == 16) {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) row[j] = I::get(T(), k + min64(j, n - 1) * ks + d);
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) row[j] = I::get_part(T(), k + min64(j, n - 1) * ks + d, here);
    }
    I::transpose(row, out + d * stride, stride);
  }
}

/* The tree of a score's 16 sums, for RT rows and CT * 16 keys in the lanes: of sums LANE, LANE + STEP, and so on. */
template <class I, int RT, int CT, int LANE, int STEP>
inline __attribute__((always_inline)) void tree(const float* q, int64_t qs, const float* turned, typename I::V* out) {
  using V = typename I::V;
  V other[RT * CT];
  if constexpr (STEP == 8) {
#pragma GCC unroll 4
    for (int x = 0; x < RT * CT; ++x) out[x] = other[x] = I::zero();
    for (int64_t d = LANE; d < qs; d += 16) {
      V near[CT], far[CT];
#pragma GCC unroll 2
      for (int c = 0; c < CT; ++c) {
        near[c] = I::load(turned + d * kTurned + 16 * c);
        far[c] = I::load(turned + (d + 8) * kTurned + 16 * c);
      }
#pragma GCC unroll 4
      for (int r = 0; r < RT; ++r) {
        const V w = I::set1(q[r * qs + d]), z = I::set1(q[r * qs + d + 8]);
#pragma GCC unroll 2
        for (int c = 0; c < CT; ++c) {
          out[r * CT + c] = I::fma(w, near[c], out[r * CT + c]);
          other[r * CT + c] = I::fma(z, far[c], other[r * CT + c]);
        }
      }
    }
  } else {
    tree<I, RT, CT, LANE, STEP * 2>(q, qs, turned, out);
    tree<I, RT, CT, LANE + STEP, STEP * 2>(q, qs, turned, other);
  }
#pragma GCC unroll 4
  for (int x = 0; x < RT * CT; ++x) out[x] = I::add(out[x], other[x]);
}

template <class I, int RT, int CT>
void tree_rows(int64_t rows, const float* q, int64_t qs, const float* turned, float* scores) {
  if (rows == RT) {
    typename I::V sum[RT * CT];
    tree<I, RT, CT, 0, 1>(q, qs, turned, sum);
#pragma GCC unroll 4
    for (int x = 0; x < RT * CT; ++x) I::store(scores + x / CT * kPiece + x % CT * 16, sum[x]);
  } else if constexpr (RT > 1) {
    tree_rows<I, RT - 1, CT>(rows, q, qs, turned, scores);
  }
}

/* scores[r][j] for all rows and n keys; rows of q have qs floats, `turned` room for kTurned * qs or NULL. */
template <class I, class T>
void score_piece(const float* q, int64_t rows, int64_t qs, int64_t depth, const void* keys, int64_t ks, int64_t n,
                 float* scores, float* turned, const Ahead& ahead) {
  const typename T::Element* k = (const typename T::Element*)keys;
  if (!turned) {
    for (int64_t j = 0; j < n; j += 16) {
      for (int64_t r = 0; r < rows; r += I::kDotRows) {
        dot_rows<I, T, I::kDotRows>(min64(I::kDotRows, rows - r), q + r * qs, qs, depth, k + j * ks, ks,
                                    min64(16, n - j), scores + r * kPiece + j,
                                    ahead.share(r / I::kDotRows, ceil_div(rows, I::kDotRows)), j);
      }
    }
    return;
  }
  for (int64_t j = 0; j < n; j += kTurned) {
    const int64_t here = min64(kTurned, n - j);
    int64_t fetched = 0;
    for (int64_t x = 0; x < here; x += 16) {
      turn_keys<I, T>(k + (j + x) * ks, ks, min64(16, here - x), depth, turned + x, kTurned);
    }
    for (int64_t r = 0; r < rows; r += I::kTreeRows) {
      const int64_t count = min64(I::kTreeRows, rows - r);
      float* to = scores + r * kPiece + j;
      for (; fetched * rows < here * (r + count); ++fetched) ahead.fetch(j + fetched);
      for (int64_t x = 0; x < here; x += 16 * I::kTreeCols) {
        if (here - x > 16 && I::kTreeCols > 1) {
          tree_rows<I, I::kTreeRows, I::kTreeCols>(count, q + r * qs, qs, turned + x, to + x);
        } else {
          tree_rows<I, I::kTreeRows, 1>(count, q + r * qs, qs, turned + x, to + x);
        }
      }
    }
  }
}
using ScorePiece = void (*)(const float*, int64_t, int64_t, int64_t, const void*, int64_t, int64_t, float*, float*,
                            const Ahead&);

template <class I>
struct SmallJob {
  using V = typename I::V;
  const Problem* p;
  int64_t rows;   /* per KV head: L * group; row r is query row r / group of head r % group */
  int64_t qs, as; /* floats per row of q and of sums */
  int64_t pieces;
  bool turn;
  float* q;    /* [batch][KV head][row][qs], scaled */
  float* sums; /* [batch][KV head][piece][row][as] */
  float* top;  /* [batch][KV head][row][piece]: maximum */
  float* total; /* the same: sum of exponentials; 0 with top -inf: nothing seen, sums not written */
  Slots slots;
  ScorePiece score;
  Weigh weigh;
  Widen widen; /* NULL: values are floats, or there are so few rows that it does not pay */
  int64_t element_k, element_v; /* bytes */

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int32_t slot = job.slots.take();
    float* memory = job.slots.memory + job.slots.size * slot;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t bh = item / job.pieces;
      job.piece(bh, item % job.pieces, memory);
      if (job.pieces == 1) {
        for (int64_t r = 0; r < job.rows; ++r) job.finish(bh, r, memory);
      }
    }
    job.slots.give(slot);
  }

  static void run_finish(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int32_t slot = job.slots.take();
    for (int64_t i = begin; i < end; ++i) {
      job.finish(i / job.rows, i % job.rows, job.slots.memory + job.slots.size * slot);
    }
    job.slots.give(slot);
  }

  /* Whether any row sees any of these keys through a bool mask. */
  bool any_seen(int64_t b, int64_t h, int64_t key, int64_t n, float* mask) const {
    if (p->kind != kArray || p->mask.dtype != ACCEL_BOOL) return true;
    const int64_t heads = p->mask.stride[1] ? p->group : 1, lines = p->mask.stride[2] ? p->rows : 1;
    for (int64_t i = 0; i < lines; ++i) {
      for (int64_t g = 0; g < heads; ++g) {
        if (load_mask<I>(*p, b, h * p->group + g, i, key, n, mask)) return true;
      }
    }
    return false;
  }

  void piece(int64_t bh, int64_t index, float* memory) const {
    const int64_t b = bh / p->kv_heads, h = bh % p->kv_heads, first = index * kPiece;
    const int64_t n = min64(kPiece, keys_seen(*p, p->rows - 1) - first); /* that the last row sees */
    float *scores = memory, *mask = memory + rows * kPiece, *wide = mask + 2 * kPiece;
    float* turned = turn ? wide + (widen ? kPiece * as : 0) : NULL;
    float* piece_top = top + bh * rows * pieces + index;
    float* piece_total = total + bh * rows * pieces + index;
    if (n <= 0 || !any_seen(b, h, first, n, mask)) {
      for (int64_t r = 0; r < rows; ++r) {
        piece_top[r * pieces] = -kInf;
        piece_total[r * pieces] = 0.0f;
      }
      return;
    }
    const char *k = row_of(p->k, b, h, first, element_k), *v = row_of(p->v, b, h, first, element_v);
    score(q + bh * rows * qs, rows, qs, p->depth, k, p->k.stride[2], n, scores, turned,
          Ahead{v, p->v.stride[2] * element_v, p->width * element_v});

    int64_t loaded = -1; /* the row whose mask is in `mask` */
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = r / p->group, seen = min64(n, keys_seen(*p, i) - first);
      if (p->kind == kArray) {
        const int64_t line = p->mask.stride[1] ? r : p->mask.stride[2] ? i : 0;
        if (line != loaded) {
          if (!load_mask<I>(*p, b, h * p->group + r % p->group, i, first, n, mask)) {
            for (int64_t j = 0; j < n; ++j) mask[j] = 1.0f;
          }
          loaded = line;
        }
      }
      soften(scores + r * kPiece, seen, p->kind == kArray ? mask : NULL, piece_top + r * pieces,
             piece_total + r * pieces);
    }

    /* The next piece is most likely this thread's too. */
    Ahead next;
    if (first + n < p->keys) {
      next = {k + kPiece * p->k.stride[2] * element_k, p->k.stride[2] * element_k, p->depth * element_k};
    }
    Weigh weigh_values = weigh;
    const void* values = v;
    int64_t vs = p->v.stride[2], element = element_v;
    if (widen) {
      widen(v, vs, n, p->width, wide, as);
      weigh_values = cider::weigh<I, F32>;
      values = wide;
      vs = as;
      element = 4;
    }
    float* sum = sums + (bh * pieces + index) * rows * as;
    for (int64_t r = 0; r < rows; r += I::kRows) {
      const int64_t count = min64(I::kRows, rows - r);
      const int64_t common = max64(0, min64(n, keys_seen(*p, r / p->group) - first));
      weigh_values(count, scores + r * kPiece, kPiece, values, vs, common, p->width, sum + r * as, as, true,
                   next.at ? next.share(r / I::kRows, ceil_div(rows, I::kRows)) : next);
      for (int64_t s = r; s < r + count; ++s) {
        const int64_t more = min64(n, keys_seen(*p, s / p->group) - first) - common;
        if (more > 0) {
          weigh_values(1, scores + s * kPiece + common, kPiece, (const char*)values + common * vs * element, vs, more,
                       p->width, sum + s * as, as, false, Ahead());
        }
      }
    }
  }

  /* Scores to exponentials, in place; those beyond `seen` up to a multiple of 16 become 0. */
  void soften(float* s, int64_t seen, const float* mask, float* top_out, float* total_out) const {
    V high = I::set1(-kInf);
    for (int64_t j = 0; j < seen; j += 16) {
      V x = I::load(s + j);
      if (mask) x = apply_mask<I>(*p, x, mask + j);
      if (seen - j < 16) x = I::keep_first(x, (int)(seen - j), -kInf);
      I::store(s + j, x);
      high = I::max(x, high);
    }
    const float m = I::highest(high);
    const V base = I::set1(base_of(m));
    V sum = I::zero();
    for (int64_t j = 0; j < seen; j += 16) {
      const V e = exponential<I>(I::sub(I::load(s + j), base));
      I::store(s + j, e);
      sum = I::add(sum, e);
    }
    *top_out = m;
    *total_out = I::sum(sum);
  }

  /* Brings the pieces of one row together and writes it. `acc` has room for a row. */
  void finish(int64_t bh, int64_t r, float* acc) const {
    const int64_t b = bh / p->kv_heads, head = bh % p->kv_heads * p->group + r % p->group, i = r / p->group;
    const float *m = top + (bh * rows + r) * pieces, *t = total + (bh * rows + r) * pieces;
    const float sink = sink_of(*p, head);
    float high = -kInf;
    bool some = false;
    for (int64_t j = 0; j < pieces; ++j) {
      high = larger(m[j], high);
      some |= t[j] != 0.0f;
    }
    high = larger(sink, high);
    if (high == -kInf && !some && sink == -kInf) return write_hopeless_row<I>(*p, b, head, i, acc);

    const V base = I::set1(base_of(high));
    const float* from = sums + (bh * pieces * rows + r) * as;
    float all = 0.0f;
    for (int64_t c = 0; c < as; c += 16) I::store(acc + c, I::zero());
    for (int64_t j = 0; j < pieces; j += 16) {
      alignas(64) float weight[16];
      const int64_t count = min64(16, pieces - j);
      I::store(weight, exponential<I>(I::sub(I::load(m + j), base)));
      bool used[16];
      for (int64_t x = 0; x < count; ++x) {
        used[x] = !(m[j + x] == -kInf && t[j + x] == 0.0f);
        if (used[x]) all += t[j + x] * weight[x];
      }
      for (int64_t c = 0; c < as; c += 16) {
        V sum = I::load(acc + c);
        for (int64_t x = 0; x < count; ++x) {
          if (used[x]) sum = I::fma(I::set1(weight[x]), I::load(from + (j + x) * rows * as + c), sum);
        }
        I::store(acc + c, sum);
      }
    }
    if (p->sinks) all += exponential_of<I>(sink - base_of(high));
    write_row<I>(*p, b, head, i, acc, all);
  }
};

/* Fewer multiply-adds than this are not worth waking a thread for, and no piece of a parallel loop has fewer than a
 * quarter of it. */
constexpr int64_t kParallelWork = 131072;

template <class I>
void small_rows(const Problem& p) {
  SmallJob<I> job;
  job.p = &p;
  job.rows = p.rows * p.group;
  job.qs = round_up(p.depth, 16);
  job.as = round_up(p.width, 16);
  job.pieces = ceil_div(p.keys, kPiece);
  job.turn = job.rows >= I::kTurn;
  const int64_t bh = p.batch * p.kv_heads, items = bh * job.pieces;
  const int64_t q_floats = bh * job.rows * job.qs, sum_floats = items * job.rows * job.as;
  const int64_t stat_floats = round_up(items * job.rows, 16) + 16; /* 16 are read at a time */
  job.q = (float*)accel_scratch(p.call, (size_t)(q_floats + sum_floats + 2 * stat_floats) * sizeof(float));
  if (!job.q) return;
  job.sums = job.q + q_floats;
  job.top = job.sums + sum_floats;
  job.total = job.top + stat_floats;
  job.widen = NULL;
  switch (p.k.dtype) {
    case ACCEL_FLOAT32: job.score = score_piece<I, F32>, job.element_k = 4; break;
    case ACCEL_FLOAT16: job.score = score_piece<I, F16>, job.element_k = 2; break;
    default: job.score = score_piece<I, BF16>, job.element_k = 2; break;
  }
  switch (p.v.dtype) {
    case ACCEL_FLOAT32: job.weigh = weigh<I, F32>, job.element_v = 4; break;
    case ACCEL_FLOAT16: job.weigh = weigh<I, F16>, job.widen = widen_rows<I, F16>, job.element_v = 2; break;
    default: job.weigh = weigh<I, BF16>, job.widen = widen_rows<I, BF16>, job.element_v = 2; break;
  }
  if (job.rows <= I::kRows) job.widen = NULL;
  const int64_t slot = (job.rows + 2) * kPiece + (job.widen ? kPiece * job.as : 0) + (job.turn ? kTurned * job.qs : 0);
  if (!job.slots.make(p.call, max64(slot, job.as))) return;
  for (int64_t j = 0; j < bh; ++j) {
    for (int64_t r = 0; r < job.rows; ++r) {
      load_query<I>(p, j / p.kv_heads, j % p.kv_heads * p.group + r % p.group, r / p.group,
                    job.q + (j * job.rows + r) * job.qs);
    }
  }

  const int64_t work = job.rows * min64(kPiece, p.keys) * (p.depth + p.width);
  if (work * items < kParallelWork || p.call->threads < 2) {
    SmallJob<I>::run(&job, 0, items);
    if (job.pieces > 1) SmallJob<I>::run_finish(&job, 0, bh * job.rows);
    return;
  }
  /* Neighbouring pieces are neighbours in memory: a thread takes a run of them, but not more than leaves the threads
   * an even share. */
  const int64_t least = ceil_div(kParallelWork / 4, work), share = items / (8 * (int64_t)p.call->threads);
  accel_parallel_for(p.call, items, max64(least, min64(share, 16)), SmallJob<I>::run, &job);
  if (job.pieces > 1) {
    const int64_t row_work = job.pieces * job.as;
    accel_parallel_for(p.call, bh * job.rows, ceil_div(kParallelWork / 2, row_work), SmallJob<I>::run_finish, &job);
  }
}

}  // namespace
}  // namespace cider
#endif
