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
 *              run      8 pieces (1024 keys) in order, each scaled by e^(its maximum - the run's maximum);
 *              row      runs in order, in the same way. What the row sees nothing of adds nothing.
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
constexpr int64_t kRun = 8;     /* pieces that are brought together first */
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

/* Partial results of one row: largest score, sum of exponentials, sums of values. Parts lie `ms` and `ss` floats apart.
 * A part with top -inf and total 0 has seen nothing, and its sums were not written. */
struct Parts {
  float *top, *total, *sums;
  int64_t ms, ss;
  bool used(int64_t j) const { return !(top[j * ms] == -kInf && total[j * ms] == 0.0f); }
  Parts from(int64_t j, int64_t row, int64_t as) const {
    return {top + j * ms + row, total + j * ms + row, sums + j * ss + row * as, ms, ss};
  }
};

/* Brings `count` parts together, in order, measured from `high`, which is no less than their maxima. Returns the sum of
 * exponentials; acc[0..as) becomes the sums of values. */
template <class I>
float merge(const Parts& p, int64_t count, float high, float* acc, int64_t as) {
  using V = typename I::V;
  const V base = I::set1(base_of(high));
  float all = 0.0f;
  bool fresh = true;
  for (int64_t j = 0; j < count; j += 16) {
    alignas(64) float weight[16];
    const float* from[16];
    const int64_t n = min64(16, count - j);
    int64_t m = 0;
    for (int64_t x = 0; x < n; ++x) {
      if (!p.used(j + x)) continue;
      weight[m] = p.top[(j + x) * p.ms];
      from[m++] = p.sums + (j + x) * p.ss;
    }
    for (int64_t x = m; x < 16; ++x) weight[x] = 0.0f;
    I::store(weight, exponential<I>(I::sub(I::load(weight), base)));
    for (int64_t x = 0, y = 0; x < n; ++x) {
      if (p.used(j + x)) all += p.total[(j + x) * p.ms] * weight[y++];
    }
    for (int64_t c = 0; c < as; c += 16) {
      V sum = fresh ? I::zero() : I::load(acc + c);
      for (int64_t x = 0; x < m; ++x) sum = I::fma(I::set1(weight[x]), I::load(from[x] + c), sum);
      I::store(acc + c, sum);
    }
    fresh = false;
  }
  return all;
}

/* The largest of the parts' maxima and `high`. */
inline float highest_of(const Parts& p, int64_t count, float high) {
  for (int64_t j = 0; j < count; ++j) {
    if (p.used(j)) high = larger(p.top[j * p.ms], high);
  }
  return high;
}

template <class I>
struct SmallJob {
  using V = typename I::V;
  const Problem* p;
  int64_t rows;   /* per KV head: L * group; row r is query row r / group of head r % group */
  int64_t qs, as; /* floats per row of q and of sums */
  int64_t pieces, runs;
  int64_t span; /* pieces per item of work: kRun, or a power of two below it */
  bool turn;
  float* q; /* [batch][KV head][row][qs], scaled */
  /* Partial results [batch][KV head][run or, if span is not kRun, piece][row]. */
  float *top, *total, *sums;
  Slots slots;
  int64_t local; /* where the parts of a run lie in a slot, in floats */
  ScorePiece score;
  Weigh weigh;
  Widen widen; /* NULL: values are floats, or there are so few rows that it does not pay */
  int64_t element_k, element_v; /* bytes */

  bool widens() const { return widen || p->quantized; }
  bool whole_runs() const { return span == kRun; }
  int64_t items() const { return p->batch * p->kv_heads * (whole_runs() ? runs : ceil_div(pieces, span)); }
  Parts parts(int64_t bh) const {
    const int64_t at = bh * (whole_runs() ? runs : pieces) * rows;
    return {top + at, total + at, sums + at * as, rows, rows * as};
  }
  Parts local_parts(float* memory) const {
    float* at = memory + local;
    return {at, at + kRun * rows, at + 2 * round_up(kRun * rows, 16), rows, rows * as};
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int32_t slot = job.slots.take();
    float* memory = job.slots.memory + job.slots.size * slot;
    for (int64_t item = begin; item < end; ++item) job.item(item, memory);
    job.slots.give(slot);
  }

  void item(int64_t index, float* memory) const {
    const int64_t per_head = ceil_div(pieces, span), bh = index / per_head, first = index % per_head * span;
    const int64_t count = min64(span, pieces - first);
    const Parts all = parts(bh);
    if (!whole_runs()) {
      for (int64_t j = first; j < first + count; ++j) piece(bh, j, j + 1 < first + count, memory, all.from(j, 0, as));
      return;
    }
    const Parts to = all.from(first / kRun, 0, as);
    if (count == 1) return piece(bh, first, false, memory, to);
    const Parts here = local_parts(memory);
    for (int64_t j = 0; j < count; ++j) piece(bh, first + j, j + 1 < count, memory, here.from(j, 0, as));
    for (int64_t r = 0; r < rows; ++r) merge_run(here.from(0, r, as), count, to.from(0, r, as));
  }

  /* The parts of a run to one. */
  void merge_run(const Parts& from, int64_t count, const Parts& to) const {
    bool some = false;
    for (int64_t j = 0; j < count; ++j) some |= from.used(j);
    *to.top = highest_of(from, count, -kInf);
    *to.total = some ? merge<I>(from, count, *to.top, to.sums, as) : 0.0f;
  }

  static void run_finish(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    const int32_t slot = job.slots.take();
    float* memory = job.slots.memory + job.slots.size * slot;
    for (int64_t i = begin; i < end; ++i) job.finish(i / job.rows, i % job.rows, memory);
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

  /* The keys of one piece, for all rows; `more`: the next one follows on this thread. */
  void piece(int64_t bh, int64_t index, bool more, float* memory, const Parts& to) const {
    const int64_t b = bh / p->kv_heads, h = bh % p->kv_heads, first = index * kPiece;
    const int64_t n = min64(kPiece, keys_seen(*p, p->rows - 1) - first); /* that the last row sees */
    float *scores = memory, *mask = memory + rows * kPiece, *wide = mask + 2 * kPiece;
    float *wide_keys = wide + (widens() ? kPiece * as : 0), *turned = wide_keys + (p->quantized ? kPiece * qs : 0);
    if (n <= 0 || !any_seen(b, h, first, n, mask)) {
      for (int64_t r = 0; r < rows; ++r) {
        to.top[r] = -kInf;
        to.total[r] = 0.0f;
      }
      return;
    }
    const char *k = NULL, *v = NULL;
    int64_t ks = p->k.stride[2], vs = p->v.stride[2], element = element_v;
    Ahead coming; /* this piece's values */
    if (p->quantized) {
      unpack_rows<I>(p->kq, b, h, first, n, p->depth, wide_keys, qs);
      k = (const char*)wide_keys;
      ks = qs;
      coming = ahead_of(p->vq, b, h, first, p->width);
    } else {
      k = row_of(p->k, b, h, first, element_k);
      v = row_of(p->v, b, h, first, element_v);
      coming = {v, vs * element_v, p->width * element_v};
    }
    score(q + bh * rows * qs, rows, qs, p->depth, k, ks, n, scores, turn ? turned : NULL, coming);

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
      soften(scores + r * kPiece, seen, p->kind == kArray ? mask : NULL, to.top + r, to.total + r);
    }

    Ahead next; /* the next piece's keys */
    if (more) {
      next = p->quantized ? ahead_of(p->kq, b, h, first + kPiece, p->depth)
                          : Ahead{k + kPiece * ks * element_k, ks * element_k, p->depth * element_k};
    }
    Weigh weigh_values = weigh;
    const void* values = v;
    if (widens()) {
      if (p->quantized) {
        unpack_rows<I>(p->vq, b, h, first, n, p->width, wide, as);
      } else {
        widen(v, vs, n, p->width, wide, as);
      }
      weigh_values = cider::weigh<I, F32>;
      values = wide;
      vs = as;
      element = 4;
    }
    float* sum = to.sums;
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

  /* Brings the runs of one row together and writes it. */
  void finish(int64_t bh, int64_t r, float* memory) const {
    const int64_t b = bh / p->kv_heads, head = bh % p->kv_heads * p->group + r % p->group, i = r / p->group;
    Parts from = parts(bh).from(0, r, as);
    float* acc = memory;
    if (!whole_runs() && pieces > 1) {
      /* Few keys: runs are made here, in the same way. */
      const int64_t stats = round_up(runs, 16);
      const Parts made = {memory + as, memory + as + stats, memory + as + 2 * stats, 1, as};
      for (int64_t j = 0; j < runs; ++j) {
        const Parts part = {from.top + j * kRun * from.ms, from.total + j * kRun * from.ms,
                            from.sums + j * kRun * from.ss, from.ms, from.ss};
        merge_run(part, min64(kRun, pieces - j * kRun), made.from(j, 0, as));
      }
      from = made;
    }
    bool some = false;
    for (int64_t j = 0; j < runs; ++j) some |= from.used(j);
    const float sink = sink_of(*p, head), high = highest_of(from, runs, sink);
    if (!some && sink == -kInf) return write_hopeless_row<I>(*p, b, head, i, acc);
    /* One part measured from its own maximum is the result: sums start at +0, so that not even zeros change sign. */
    if (runs == 1 && !p->sinks) return write_row<I>(*p, b, head, i, from.sums, *from.total);
    float all = merge<I>(from, runs, high, acc, as);
    if (p->sinks) all += exponential_of<I>(sink - base_of(high));
    write_row<I>(*p, b, head, i, acc, all);
  }
};

/* Fewer multiply-adds than this are not worth waking a thread for. */
constexpr int64_t kParallelWork = 131072;

template <class I>
void small_rows(const Problem& p) {
  SmallJob<I> job;
  job.p = &p;
  job.rows = p.rows * p.group;
  job.qs = round_up(p.depth, 16);
  job.as = round_up(p.width, 16);
  job.pieces = ceil_div(p.keys, kPiece);
  job.runs = ceil_div(job.pieces, kRun);
  job.turn = job.rows >= I::kTurn;
  const int64_t bh = p.batch * p.kv_heads, work = job.rows * min64(kPiece, p.keys) * (p.depth + p.width);
  const bool parallel = work * bh * job.pieces >= kParallelWork && p.call->threads > 1;
  /* A few items for each thread, so that they end together; whole runs leave the least to bring together. */
  job.span = kRun;
  while (parallel && job.span > 1 && bh * ceil_div(job.pieces, job.span) < 3 * p.call->threads) job.span /= 2;
  const int64_t units = bh * (job.whole_runs() ? job.runs : job.pieces) * job.rows;
  const int64_t q_floats = bh * job.rows * job.qs, stat_floats = round_up(units, 16);
  job.q = (float*)accel_scratch(p.call, (size_t)(q_floats + units * job.as + 2 * stat_floats) * sizeof(float));
  if (!job.q) return;
  job.sums = job.q + q_floats;
  job.top = job.sums + units * job.as;
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
  if (p.quantized) job.score = score_piece<I, F32>;
  job.local = round_up(
      (job.rows + 2) * kPiece + (job.widens() ? kPiece * job.as : 0) + (p.quantized ? kPiece * job.qs : 0) +
          (job.turn ? kTurned * job.qs : 0),
      16);
  const int64_t in_item = job.whole_runs() ? 2 * round_up(kRun * job.rows, 16) + kRun * job.rows * job.as : 0;
  const int64_t in_finish = job.as + 2 * round_up(job.runs, 16) + job.runs * job.as;
  if (!job.slots.make(p.call, max64(job.local + in_item, in_finish))) return;
  for (int64_t j = 0; j < bh; ++j) {
    for (int64_t r = 0; r < job.rows; ++r) {
      load_query<I>(p, j / p.kv_heads, j % p.kv_heads * p.group + r % p.group, r / p.group,
                    job.q + (j * job.rows + r) * job.qs);
    }
  }

  const int64_t items = job.items(), finish_work = (job.whole_runs() ? job.runs : job.pieces) * job.as;
  if (!parallel) {
    SmallJob<I>::run(&job, 0, items);
    SmallJob<I>::run_finish(&job, 0, bh * job.rows);
    return;
  }
  accel_parallel_for(p.call, items, 1, SmallJob<I>::run, &job);
  accel_parallel_for(p.call, bh * job.rows, ceil_div(kParallelWork / 2, finish_work), SmallJob<I>::run_finish, &job);
}

}  // namespace
}  // namespace cider
#endif
