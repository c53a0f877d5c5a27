/* y = x @ W.T (+ bias) for few rows of x. Included once per instruction set.
 *
 * Layout     W as in formats.h; x is brought into float32 and into the order in which weights are delivered.
 * Rows       Any; meant for 1 to about 30. Any n and k.
 * Exactness  rounding. A weight is exact in float32 (but for the ends of E8M0's range). Each sum runs in 16
 *            interleaved partial sums of k / 16 terms: for k up to some thousand that is within the bound even if
 *            every addition errs by the most it can, and for terms that are all equal up to k = 65536.
 * Rows       Independent of each other: output (m, r) has one accumulator of 16 lanes, fed with the weights in
 *            order and summed up in one fixed tree, whatever other rows, outputs or threads there are. Tile sizes
 *            only say how many such accumulators are in flight.
 * Method     Decode is bound by reading W, so that W is read once, front to back, and weights go from memory to
 *            products in registers. Several output rows share each load of x and hide the latency of their sums
 *            behind one another; with several rows of x each widened weight is used for all of them. With one row of
 *            x the output rows of a tile are not neighbours but equally far apart in a piece, and the next tile has
 *            those that follow them: each register reads one long run of memory, which the processor's prefetcher
 *            follows, instead of one row. Where k is
 *            long, x passes in blocks that stay in the first-level cache, and the accumulators wait in memory
 *            between blocks, unsummed, so that the order of additions is that of one long pass. More rows of x
 *            than registers have accumulators for are done in tiles: the first leaves the widened weights of a few
 *            outputs, some KB, to the others.
 * Source     Written for this library. Dot products with one accumulator per output, register tiling and
 *            looking codes up in a register are common knowledge; nothing was taken from another implementation.
 */
#ifndef HOST_LINEAR_SMALL_BODY_H
#define HOST_LINEAR_SMALL_BODY_H

#include <accel/processor.h>

#include "problem.h"

namespace linear {
namespace {

/* Outputs whose accumulators are kept while the blocks of k pass, at most. */
constexpr int kPassRows = 32;
/* Accumulators from one row of x to the next: odd, so that they do not all fall into few sets of a cache. */
constexpr int kLine = kPassRows + 1;
/* Floats of a block of x, all rows together: half of a first-level cache, since weights and accumulators pass through
 * too; two thirds for many rows in one tile, whose products per weight leave the time. */
constexpr int64_t kBlockFloats = 6144, kLargeBlockFloats = 8192;
/* The most rows of x that share one reading of W; more are done in turns. */
constexpr int kMostRows = 32;
/* The most weights along k per block of several rows. */
constexpr int64_t kMostDepth = 4096;
/* Bytes from what one row of x reads to what it fetches: to the second-level cache, and to the first. */
constexpr int64_t kFar = 2048, kNear = 512;
/* Floats of the weights that the first tile of rows leaves to the others. */
constexpr int64_t kKept = 4096;

/* Where the rows of W of one tile are, from the first weight of the block on. */
struct Strip {
  const uint8_t* w;
  int64_t w_stride;
  const uint8_t* s; /* scales */
  int64_t s_stride;
  const uint8_t* soon; /* what to fetch: lines of rows that are soon_stride bytes apart */
  int64_t soon_stride;
  int64_t head; /* weights of the first chunk that are not the row's and count as zeros */
};

/* Bytes begin ... end of `from`, zeros around them. */
template <class I>
void copy_part(uint8_t* to, const uint8_t* from, int64_t begin, int64_t end, int64_t size) {
  if constexpr (I::kReadsLines) {
    I::copy_part(to, from, begin, end, size);
  } else {
    memset(to, 0, (size_t)size);
    memcpy(to + begin, from + begin, (size_t)(end - begin));
  }
}

/* Continues the sums of MT rows of x times R rows of W over `depth` weights.
 *   x      [chunk][MT rows][32 weights]
 *   nr     how many of the R rows exist
 *   fresh  sums start at zero
 *   kept   KEEP: gets the weights as floats, in the order of delivery, [chunk][R rows][32 weights]
 *   lanes  accumulators, [m][kLine][16], the first R of each m; read unless fresh, written
 * FETCH rows of weights in format SOON are fetched meanwhile, FAR: not into the first-level cache. KEPT: the weights
 * are what KEEP has left. */
template <class I, Format F, int MT, int R, int FETCH, Format SOON, bool KEEP, bool KEPT, bool FAR = false>
void tile(const Strip& p, const float* x, int64_t nr, bool fresh, int64_t depth, float* kept, float (*lanes)[16]) {
  using V = typename I::V;
  constexpr int64_t kBytes = chunk_bytes(F), kScales = chunk_scales(F);
  constexpr int64_t kStep = KEPT ? R * kBytes : kBytes, kSoonBytes = chunk_bytes(SOON);
  const int64_t chunks = depth / kChunk;
  /* Where a line is used by many products, the first-level cache's few places for lines under way are left to x and
   * the accumulators. */
  constexpr int kLevel = MT < 7 && FETCH == R && !KEEP && !FAR ? 3 : 2;
  const uint8_t *w[R], *s[R], *soon[FETCH > 0 ? FETCH : 1];
  V acc[R][MT];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int64_t row = r < nr ? r : nr - 1; /* surplus rows repeat */
    w[r] = p.w + row * p.w_stride;
    s[r] = kScales ? p.s + row * p.s_stride : NULL;
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) acc[r][m] = fresh ? I::zero() : I::load(lanes[m * kLine + r]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < FETCH; ++i) soon[i] = p.soon + i * p.soon_stride;
  const auto add_chunk = [&](const uint8_t* const* wc, int64_t at, const uint8_t* const* sc,
                             int64_t g) __attribute__((always_inline)) {
    V v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      v[r] = I::template weights<F, 0>(wc[r] + at, sc[r] + g);
      if constexpr (KEEP) I::store(kept + r * kChunk, v[r]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const V xv = I::hold(I::load(x + m * kChunk));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      v[r] = I::template weights<F, 1>(wc[r] + at, sc[r] + g);
      if constexpr (KEEP) I::store(kept + r * kChunk + 16, v[r]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) {
      const V xv = I::hold(I::load(x + m * kChunk + 16));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][m] = I::fma(v[r], xv, acc[r][m]);
    }
    x += MT * kChunk;
    if constexpr (KEEP) kept += R * kChunk;
  };
  const auto fetch = [&](int64_t f) __attribute__((always_inline)) {
    if (FETCH && (kSoonBytes >= 64 || f % 64 == 0)) {
#pragma GCC unroll 8
      for (int i = 0; i < FETCH; ++i) {
        __builtin_prefetch(soon[i] + f, 0, kLevel);
        if constexpr (kSoonBytes > 64) __builtin_prefetch(soon[i] + f + 64, 0, kLevel);
      }
    }
  };
  int64_t at = 0, g = 0, f = 0;
  /* A chunk of which there are only weights from ... to: the end of a dense row or of one of nvfp4, or the beginning
   * of one that is read from the line of memory on in which it begins. */
  const auto add_part = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
    alignas(64) uint8_t part[R][kBytes];
    uint8_t scale[R][2] = {};
    const uint8_t *wp[R], *sp[R];
    for (int r = 0; r < R; ++r) {
      copy_part<I>(part[r], w[r] + at, from * kBytes / kChunk, to * kBytes / kChunk, kBytes);
      if (kScales) scale[r][0] = s[r][g];
      wp[r] = part[r];
      sp[r] = scale[r];
    }
    add_chunk(wp, 0, sp, 0);
  };
  /* Few rows in one tile read rows of W from where they begin. */
  constexpr bool kHead = I::kReadsLines && !kScales && !KEPT && (MT >= 7 || KEEP || FETCH != R);
  int64_t from = kHead ? p.head : 0;
  bool whole = from == 0;
  for (int64_t c = 0;; whole = false, from = 0) {
    if (!whole) {
      fetch(f);
      add_part(from, min64(kChunk, depth - c * kChunk));
      ++c;
      at += kStep;
      f += kSoonBytes;
    }
    for (; c < chunks; ++c, at += kStep, g += kScales, f += kSoonBytes) {
      fetch(f);
      add_chunk(w, at, s, g);
    }
    if (c * kChunk >= depth) break;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m) I::store(lanes[m * kLine + r], acc[r][m]);
  }
}

template <class I, Format F>
struct SmallJob {
  /* Looking codes up takes registers too. */
  static constexpr int kMaxTile = chunk_scales(F) && I::kMaxTile > 12 ? 12 : I::kMaxTile;
  using Tile = void (*)(const Strip&, const float*, int64_t, bool, int64_t, float*, float (*)[16]);
  const Problem* p;
  float* x;       /* [block of depth weights][tile][chunk][row of the tile][weight], as floats */
  int64_t first, rows; /* of the problem, at work */
  int64_t shift;  /* zeros in front of each row of W and x, see shift_of */
  int64_t depth;  /* weights along k per block */
  int tiles;      /* over rows of x; the first `longer` take mt rows, the others one less */
  int mt, longer;
  Tile lead;      /* for the first tile */
  Tile next[2];   /* for others, of mt and mt - 1 rows */
  int lead_fetches; /* rows of W that the first tile fetches; the second fetches the others */
  int step;       /* output rows per tile */
  int pass_rows;  /* output rows whose accumulators are kept while the blocks of k pass */
  int unit;       /* output rows that pieces of a parallel loop are made of */

  int64_t span() const { return p->k + shift; }
  int height(int t) const { return t < longer ? mt : mt - 1; }

  void prepare_x() {
    alignas(64) float line[kMostDepth + 16];
    float* to = x;
    for (int64_t k0 = 0; k0 < span(); k0 += depth) {
      const int64_t n = min64(depth, span() - k0), padded = round_up(n, kChunk), head = k0 ? 0 : shift;
      int64_t row = first;
      for (int t = 0; t < tiles; ++t) {
        const int high = height(t);
        for (int m = 0; m < high; ++m, ++row) {
          float* out = high == 1 ? to : line;
          load_x<I, F>(*p, row, k0 + head - shift, n - head, out + head);
          /* No sum, be it -0, is changed by adding 0 * -0. */
          if (shift) {
            for (int64_t k = 0; k < head; ++k) out[k] = -0.0f;
            for (int64_t k = n; k < padded; ++k) out[k] = -0.0f;
          }
          if (high == 1) continue;
          for (int64_t k = 0; k < padded; k += kChunk) memcpy(to + k * high + m * kChunk, line + k, 4 * kChunk);
        }
        to += high * padded;
      }
    }
  }

  template <int MT>
  void choose_tile() {
    constexpr int r = I::tile_rows(MT);
    if (mt == MT) {
      step = r;
      static_assert(8 % r == 0 || r == 3);
      pass_rows = r == 3 ? 24 : kPassRows; /* a multiple of both 8 and r */
      lead = linear::tile<I, F, MT, r, r, F, false, false>;
      if constexpr (MT == 1) {
        if (accel_fetches_far()) lead = linear::tile<I, F, MT, r, r, F, false, false, true>;
      }
      lead_fetches = r;
      if constexpr (2 * MT > kMaxTile) { /* else one tile is enough */
        /* Tiles share the fetching: a thread can wait for few lines at a time. */
        constexpr bool kKeeps = F != kFloat32;
        constexpr int half = r / 2;
        if (tiles > 1) {
          lead = linear::tile<I, F, MT, r, r - half, F, kKeeps, false>;
          lead_fetches = r - half;
        }
        next[0] = linear::tile<I, kFloat32, MT, r, half, F, false, kKeeps>;
        if constexpr (MT > 1) next[1] = linear::tile<I, kFloat32, MT - 1, r, half, F, false, kKeeps>;
      }
    } else if constexpr (MT > 1) {
      choose_tile<MT - 1>();
    }
  }

  void choose_depth() {
    if (rows == 1) {
      depth = round_up(span(), kChunk);
      return;
    }
    int64_t deepest = (rows < 7 || tiles > 1 ? kBlockFloats : kLargeBlockFloats) / rows;
    /* Blocks of one depth, an eighth more if need be: a short one at the end costs as much time at its ends. */
    if (rows >= 7) deepest = ceil_div(span(), ceil_div(span(), deepest + deepest / 8)) + kChunk - 1;
    if (tiles > 1) deepest = min64(deepest, kKept / step);
    depth = deepest / kChunk * kChunk;
  }

  static void run(void* arg, int64_t begin, int64_t end) {
    const SmallJob& job = *(const SmallJob*)arg;
    if (job.rows == 1) {
      job.one_row(begin * job.unit, min64(end * job.unit, job.p->n));
      return;
    }
    const int64_t stop = min64(end * job.unit, job.p->n), pass = job.depth < job.span() ? job.pass_rows : job.step;
    for (int64_t n0 = begin * job.unit; n0 < stop; n0 += pass) job.pass(n0, min64(n0 + pass, stop));
  }

  /* Outputs n0 ... n1 of one row of x: tiles of rows of W that are `apart` rows apart, then one of what is left. */
  void one_row(int64_t n0, int64_t n1) const {
    const int64_t apart = (n1 - n0) / step;
    for (int64_t i = 0; i < apart; ++i) one_tile(n0 + i, apart, step);
    if (n0 + step * apart < n1) one_tile(n0 + step * apart, 1, n1 - n0 - step * apart);
  }

  /* Outputs n, n + apart, ...: `count` of them. */
  void one_tile(int64_t n, int64_t apart, int64_t count) const {
    alignas(64) float lanes[kLine][16], sums[8];
    const int64_t stride = apart * p->w_stride;
    const uint8_t *w = p->w + n * p->w_stride, *s = chunk_scales(F) ? p->scales + n * p->s_stride : NULL;
    const Strip strip = {w, stride, s, apart * p->s_stride, w + (accel_fetches_far() ? kFar : kNear), stride, 0};
    lead(strip, x, count, true, p->k, NULL, lanes);
    I::sum8(lanes, sums);
    for (int64_t r = 0; r < count; ++r, n += apart) {
      if (const accel_array* b = p->bias) sums[r] += accel_load_float(b->data, n * b->strides[0], b->dtype);
      store_floats<I>(*p, first * p->n + n, sums + r, 1);
    }
  }

  /* Outputs n0 ... n1, all rows of x. */
  void pass(int64_t n0, int64_t n1) const {
    constexpr int64_t kBytes = chunk_bytes(F), kScales = chunk_scales(F);
    alignas(64) float lanes[kLine * kMostRows][16];
    alignas(64) float kept[kKept];
    const uint8_t* w = p->w - shift * kBytes / kChunk;
    for (int64_t k0 = 0; k0 < span(); k0 += depth) {
      const int64_t d = min64(depth, span() - k0), padded = round_up(d, kChunk), block = k0 / kChunk;
      for (int64_t n = n0; n < n1; n += step) {
        const int64_t nr = min64(step, n1 - n);
        Strip strip = {w + n * p->w_stride + block * kBytes, p->w_stride, NULL, p->s_stride, NULL, p->w_stride,
                       k0 == 0 ? shift : 0};
        strip.soon = strip.w + ahead(n0, n1, n, k0);
        if (kScales) strip.s = p->scales + n * p->s_stride + block * kScales;
        const float* from = x + k0 * rows;
        float(*to)[16] = lanes + (n - n0);
        lead(strip, from, nr, k0 == 0, d, kept, to);
        strip.soon += lead_fetches * p->w_stride;
        if (F != kFloat32) {
          strip.w = (const uint8_t*)kept;
          strip.w_stride = kChunk * (int64_t)sizeof(float);
        }
        for (int t = 1; t < tiles; ++t) {
          from += height(t - 1) * padded;
          to += height(t - 1) * kLine;
          next[t < longer ? 0 : 1](strip, from, nr, k0 == 0, F != kFloat32 ? padded : d, NULL, to);
        }
      }
    }
    finish(lanes, n0, n1);
  }

  /* The processor's own prefetcher loses its way at the ends of rows. It is asked for what follows in the row where
   * rows are long and read in one piece, else for the next tile's, which may be in the next block of k. */
  int64_t ahead(int64_t n0, int64_t n1, int64_t n, int64_t k0) const {
    constexpr int64_t kBytes = chunk_bytes(F), kLongRow = 3072, kStretch = 512;
    if (rows < 7 && p->k * kBytes / kChunk >= kLongRow) return kStretch;
    if (n + step < n1) return step * p->w_stride;
    if (k0 + depth < span()) return depth / kChunk * kBytes - (n - n0) * p->w_stride;
    return step * p->w_stride - k0 / kChunk * kBytes;
  }

  /* Sums up, adds the bias and writes outputs n0 ... n1. */
  void finish(const float (*lanes)[16], int64_t n0, int64_t n1) const {
    alignas(64) float bias[kPassRows], sums[kPassRows];
    if (const accel_array* b = p->bias) {
      load_floats<I>(b->data, n0 * b->strides[0], b->strides[0], b->dtype, bias, n1 - n0);
    }
    for (int64_t m = 0; m < rows; ++m, lanes += kLine) {
      for (int64_t r = 0; r < n1 - n0; r += 8) I::sum8(lanes + r, sums + r);
      if (p->bias) {
        for (int64_t r = 0; r < n1 - n0; ++r) sums[r] += bias[r];
      }
      store_floats<I>(*p, (first + m) * p->n + n0, sums, n1 - n0);
    }
  }
};

/* A piece of 64 k weights takes some microseconds, against the tenths of one that handing it out costs; fewer
 * are not worth waking a thread for. Large matrices are cut into larger pieces, since what is fetched ahead at
 * the end of a piece helps another thread or none; with many rows of x small pieces would also fetch x anew too often.
 * A further row of x counts as half a reading of W. */
inline int64_t count_pieces(const Problem& p, int64_t rows) {
  const int64_t work = p.n * p.k * (rows + 1) / 2, fine = work / 65536;
  const int64_t coarse = (rows < 7 ? work : p.n * p.k) / 262144;
  return coarse > 16 ? coarse : min64(fine, 16);
}

/* The weights that lie between the beginning of a line of memory and that of a row of W, if it pays to read rows from
 * there on, with zeros for what is not theirs: loads that cross lines cost more than one. All rows must begin at the
 * same place of a line. Sums keep their bits: lanes are turned by so many, and the tree of sum8 is the same from each
 * lane on. Not for few rows of x, whose time is that of reading W, nor for short rows of W, to which a chunk more is
 * much. */
template <class I, Format F>
int64_t shift_of(const Problem& p, int64_t rows) {
  constexpr int64_t kSize = chunk_bytes(F) / kChunk;
  if (!I::kReadsLines || I::template permutes<F>() || chunk_scales(F) || rows < 7 || p.k < 1024) return 0;
  const int64_t begin = (int64_t)((uintptr_t)p.w % 64);
  if (begin % (16 * kSize) == 0 || begin % kSize || p.w_stride % 64) return 0;
  return begin / kSize;
}

template <class I, Format F>
void small_rows_of(const Problem& p) {
  /* A little x needs no allocation. */
  alignas(64) float local[4096];
  SmallJob<I, F> job;
  job.p = &p;
  const int64_t most = min64(p.rows, kMostRows), size = most * (round_up(p.k, kChunk) + kChunk);
  job.x = local;
  if (size > 4096) {
    job.x = (float*)accel_scratch(p.call, (size_t)size * sizeof(float));
    if (!job.x) return;
  }
  for (job.first = 0; job.first < p.rows; job.first += job.rows) {
    job.rows = min64(p.rows - job.first, kMostRows);
    job.shift = shift_of<I, F>(p, job.rows);
    job.tiles = (int)ceil_div(job.rows, job.kMaxTile);
    job.mt = (int)ceil_div(job.rows, job.tiles);
    job.longer = (int)(job.rows - (int64_t)job.tiles * (job.mt - 1));
    job.template choose_tile<SmallJob<I, F>::kMaxTile>();
    job.unit = job.rows == 1 ? 8 : job.pass_rows;
    job.choose_depth();
    job.prepare_x();
    const int64_t units = ceil_div(p.n, job.unit), pieces = count_pieces(p, job.rows);
    if (pieces < 2 || p.call->threads < 2) {
      SmallJob<I, F>::run(&job, 0, units);
    } else {
      accel_parallel_for(p.call, units, ceil_div(units, pieces), SmallJob<I, F>::run, &job);
    }
  }
}

template <class I>
void small_rows(const Problem& p) {
  switch (p.format) {
    case kFloat32: return small_rows_of<I, kFloat32>(p);
    case kFloat16: return small_rows_of<I, kFloat16>(p);
    case kBfloat16: return small_rows_of<I, kBfloat16>(p);
    case kMxfp4: return small_rows_of<I, kMxfp4>(p);
    case kNvfp4: return small_rows_of<I, kNvfp4>(p);
    default: return small_rows_of<I, kMxfp8>(p);
  }
}

}  // namespace
}  // namespace linear
#endif
