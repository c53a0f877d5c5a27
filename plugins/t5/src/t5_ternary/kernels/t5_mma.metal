// Products of 1 to 4 rows with t5 weights by matrix instructions on bytes: weights of 16 columns are one operand, rows
// of x as integers in three bytes the other.
//
//   y[m, n] = sum_k x[m, k] * scales[n, k / GS] * trit[n, k]  (+ bias[n])        trit in -1, 0, 1
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K / GS * BYTES) uint8; scales (N, K / GS) of T; bias (N) of B:
//            as in t5_qmv.metal, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   GS 64 or 128; ROWS 1, 2 or 4, rows of x at a time; ROOM is K / 1024 rounded up, octets; ITEMS pieces of
//            work at a time, at least ROOM; DEPTH pieces, at least 2, that a SIMD group has memory for; ALIGN 16 if K
//            is a multiple of 1024, else 8, 4 or 1, which the bytes of a row of w are a multiple of; RATIO: scales of
//            a row of w differ by no more than RATIO / 16 times; ZEROS: no group of w has more than ZEROS of 128
//            weights of zero
// Edges      any N; any M; K is a multiple of GS; N * K / GS is less than 2^31
// Bytes      as in t5_qmv.metal, read once for each ROWS rows of x
// Numbers    exactness `rounding`. x in a group becomes integers v of 22 bits, x ~ v * unit with unit 2^-20 of the
//            highest power of two in the largest number of the group (1/128 above it counts as the next one). Sums over
//            a group are exact and meet its scale in float32. Five standard deviations of what v loses, 0.5 unit at
//            most, are within the bound if for the row of x, taking losses for independent of the weights,
//              28.3 * RATIO / 16 * sqrt(sum over groups of unit^2) <= 4 * sqrt(K) * 2^-24 * sum over groups of A
//            where A is 0.95 * sum(min(|x|, c)) - GS * ZEROS / 128 * c, c = 2^-5 of the group's largest number: no
//            more than what is left of |x| if the largest meet weights of zero. Other rows, those with infinities and
//            NaN and those too small or large for squares of units among them, are summed up in float32 by all lanes.
//            Row-invariant: no order of sums depends on M, ROWS, ROOM, ITEMS, DEPTH or SIMD_GROUPS
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes, as many as the device holds at once. Threadgroup (i, j) of (I, J)
//            makes columns [t, t + 1) * 16 of rows [j, j + 1) * ROWS for t = i, i + I, i + 2 I ... An octet, 1024
//            weights or 208 bytes, of 16 columns is a piece of work; SIMD groups take them in turns (pieces.h)
// Threadgroup memory   SIMD_GROUPS * (DEPTH * 3328 + 128) bytes; ITEMS * 64 * ROWS; 16; for each octet ROWS * (3600 +
//            96), with GS 64 ROWS * (4080 + 192); scales of the ITEMS / ROOM tiles of a turn; up to 112 * ROWS
//
// A byte b of five trits t0 ... t4 gives b, b / 3, b / 9, b / 27, b / 81 rounded down, and tj = (b / 3^j) - 3 (b /
// 3^(j+1)). So sum tj vj = sum (b / 3^j) (vj - 3 v(j-1)): the quotients are operands as they are, and what they meet is
// made of x once. Quotients come by one multiplication in half, two at a time: 1280 + b times a third plus 853 rounds
// to 1280 + b / 3, whose lower byte is the quotient.
//
// Four lanes take a word each of a column, whatever group it is of: 16 bytes at a time, thirteen times, and none idles.
// Groups lie across these steps. What a word meets has a slot for each group that it has bytes of, with zeros for the
// others. With one row and groups of 128, the other operand's columns 0 ... 2 are the three bytes of x's integers for
// even groups and columns 4 ... 6 those for odd ones; else steps in which one group ends and one begins are made twice.
// Two rows have columns 0 ... 2 and 4 ... 6; row m of four has columns 2 m, 2 m + 1 and, in another block, 2 m, all of
// whose sums one lane is given. Where a group ends, its sums are put together and multiplied with its scale; even and
// odd groups are added up apart.

#include "pieces.h"
#include "t5_integers.metal"

// Where a lane's vectors of a piece are, in bytes from the first column's octet on.
struct Offsets {
  int vectors[7];
};
METAL_FUNC Offsets offsets_of(int columns, ushort lane) {
  Offsets o;
#pragma unroll
  for (int i = 0; i < 7; i++) {
    const int at = lane + 32 * i;
    o.vectors[i] = at / 13 * columns + at % 13 * 16;
  }
  return o;
}

// Rows of w have `columns` bytes. Columns beyond the end are the last one again; bytes beyond the end of K are zero.
template <int ALIGN, typename WP>
METAL_FUNC void fetch_piece(threadgroup uint4* to, WP w, thread const Place& at, thread const Offsets& offsets,
                            int n_end, int columns, ushort lane) {
  if (ALIGN == 16 && at.tile * 16 + 16 <= n_end) {
    const auto from = w + (long(at.tile * 16) * columns + at.octet * 208);
#pragma unroll
    for (int i = 0; i < 7; i++) {
      if (i < 6 || lane < 16) {
        copy_words<4>((threadgroup uint*)(to + lane + 32 * i), from + offsets.vectors[i]);
      }
    }
    return;
  }
  constexpr int EACH = 208 / ALIGN;
  const int begin = at.octet * 208;
  threadgroup uchar* bytes = (threadgroup uchar*)to;
#pragma unroll 4
  for (int i = lane; i < 16 * EACH; i += 32) {
    const int column = i / EACH, part = i % EACH * ALIGN;
    const long row = min(at.tile * 16 + column, n_end - 1);
    const auto from = w + (row * columns + begin + part);
    threadgroup uchar* place = bytes + (column * 208 + part);
    if (ALIGN == 16) {
      copy_words<4>((threadgroup uint*)place, from);
    } else if (begin + part < columns) {
      if (ALIGN == 1) {
        *place = *from;
      } else {
        copy_words<(ALIGN > 4 ? 2 : 1)>((threadgroup uint*)place, from);
      }
    } else {
#pragma unroll
      for (int b = 0; b < ALIGN; b++) {
        place[b] = 0;
      }
    }
  }
}

// The quotients of four bytes by 1, 3, 9, 27 and 81.
METAL_FUNC void quotients_of(thread uint* quotients, uint word) {
  uint low = bytes_as_halves(word, false), high = bytes_as_halves(word, true);
  quotients[0] = word;
#pragma unroll
  for (int i = 1; i < 5; i++) {
    low = f16_pair_fused(low, 0x35553555u, 0x62aa62aau);
    high = f16_pair_fused(high, 0x35553555u, 0x62aa62aau);
    quotients[i] = even_bytes(low, high);
  }
}

// The product of one column with one row of x, by a SIMD group.
template <int GS, typename XP, typename WP, typename SP>
METAL_FUNC float plain_product(XP x, WP w, SP scales, long n, long m, int groups, int k_end, ushort lane) {
  constexpr int BYTES = Format<GS>::BYTES;
  float sum = 0.0f;
  for (int i = lane; i < groups * BYTES; i += 32) {
    const int group = i / BYTES, first = i % BYTES * 5;
    const float scale = float(scales[n * groups + group]);
    int code = w[n * (groups * BYTES) + i];
#pragma unroll
    for (int j = 0; j < 5; j++) {
      if (first + j < GS) {
        sum = fma(float(x[m * k_end + group * GS + first + j]), scale * float(code % 3 - 1), sum);
      }
      code /= 3;
    }
  }
  return simd_sum(sum);
}

// Adds what a group gave to the sums of two columns. `whole` is what the groups so far gave, modulo 2^32, `before` what
// that was where the last group ended, `known` the sum of the group's integers.
METAL_FUNC void end_group(thread float* sums, thread uint* before, thread const uint* whole, thread const float* scale,
                          float unit, int known, bool mine) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = float(int(whole[h] - before[h] - uint(known)));
    before[h] = mine ? whole[h] : before[h];
    sums[h] = fma(sum, unit * scale[h], sums[h]);
  }
}

template <typename T, typename O, int GS, int ROWS, int SIMD_GROUPS, int ROOM, int ITEMS, int DEPTH, int ALIGN,
          int RATIO, int ZEROS, bool HAS_BIAS, bool VECTORS, typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void t5_mma(XP x, WP w, SP scales, BP bias, device O* y, threadgroup uint4* fours, threadgroup uint* fifths,
                       threadgroup Group* facts, threadgroup float* lefts, threadgroup uint4* stage,
                       threadgroup uint4* scales_here, threadgroup float* part, threadgroup uint* unfit, int m_end,
                       int n_end, int k_end, int m_begin, int first, int step, ushort simd_group, ushort lane) {
  typedef Format<GS> F;
  // Columns of the other operand: with one row, for even and for odd groups; with four, those of two bytes of all rows
  // in one block and those of the third in another; else those of each row.
  constexpr bool APART = ROWS == 1 && GS == 128, SPREAD = ROWS == 4;
  constexpr int BLOCKS = SPREAD ? 2 : 1;
  constexpr int octets = ROOM;
  const int r = lane / 4, q = lane % 4, groups = k_end / GS;
  const int thread_index = simd_group * 32 + lane;
  // x first: the pieces of all threadgroups together keep memory busy for some time. A copy of several rows has the
  // last places of all SIMD groups, which are not used yet, if there is room.
  constexpr bool COPIED = ROWS > 1 && VECTORS && 128 * ROOM * ROWS <= SIMD_GROUPS * (F::VECTORS + 8);
  threadgroup uint4* copy = stage + (DEPTH - 1) * (SIMD_GROUPS * F::VECTORS);
  threadgroup const uint* xs = (threadgroup const uint*)copy;
  constexpr int TURN = 32 * SIMD_GROUPS, LANES_IN_ALL = ROOM * F::GROUPS * Turn<GS, ROWS>::LANES * ROWS;
  constexpr int AHEAD = !COPIED && TURN < LANES_IN_ALL ? 2 : 1;
  uint raw[AHEAD * 10];
  if (COPIED) {
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      const auto row = x + long(min(m_begin + m, m_end - 1)) * k_end;
#pragma unroll 1
      for (int i = thread_index; i < k_end / 8; i += 32 * SIMD_GROUPS) {
        copy_words<4>((threadgroup uint*)(copy + m * (k_end / 8) + i), row + i * 8);
      }
    }
    copies_end();
  } else {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      load_x<GS, ROWS, VECTORS>(raw + i * 10, x, i * TURN + thread_index, groups, m_begin, m_end, k_end);
    }
    simdgroup_barrier(mem_flags::mem_device);
  }
  const Pieces pieces = pieces_of(ITEMS, octets, step, (n_end + 15) / 16);
  const Offsets offsets = offsets_of(groups * F::BYTES, lane);
  fetch_rows<T, ROOM * F::SCALES, SIMD_GROUPS, ALIGN == 16>(scales_here, scales, pieces, first, n_end, groups,
                                                            simd_group, lane);
  copies_end();
  threadgroup uint4* own = stage + simd_group * F::VECTORS;
  Place ahead = place_of(pieces, first, simd_group);
#pragma unroll
  for (int d = 0; d < DEPTH - 1; d++) {
    if (ahead.there) {
      fetch_piece<ALIGN>(own + d * (SIMD_GROUPS * F::VECTORS), w, ahead, offsets, n_end, groups * F::BYTES, lane);
      ahead = place_after(pieces, ahead, SIMD_GROUPS, simd_group);
    }
    copies_end();
  }
  if (COPIED) {
    copies_wait<DEPTH>();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_x<GS, ROWS>(raw, xs, thread_index, groups, k_end);
  }
  stage_x<T, GS, ROWS, SIMD_GROUPS, ZEROS, AHEAD, COPIED, VECTORS>(fours, fifths, facts, lefts, raw, xs, x, octets,
                                                                   m_begin, m_end, k_end, thread_index);
  // Where this lane's words of the other operand are in an octet. Columns that stand for nothing are zeros.
  const int row = SPREAD ? r / 2 : ROWS > 1 ? r / 4 : 0, gap = row * gap_of(ROWS, octets * 3 * F::SLOTS);
  const int first_byte = row * (octets * 3 * F::SLOTS) + (SPREAD ? r % 2 : r % 4) * F::SLOTS;
  bool there[BLOCKS];
  int base[BLOCKS];
  there[0] = SPREAD || (r % 4 < 3 && (APART || ROWS > 1 || r < 4));
  // With one row, zeros come from memory: loads then do not wait for the instructions that took what was there before.
  base[0] = ROWS > 1 || there[0] ? first_byte : 0;
  if (SPREAD) {
    there[BLOCKS - 1] = r % 2 == 0;
    base[BLOCKS - 1] = first_byte + 2 * F::SLOTS;
  }
  // What they hold. In lanes with a column that stands for nothing it stays zero.
  uint4 taken[BLOCKS];
  uint taken_last[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    taken[b].x = taken[b].y = taken[b].z = taken[b].w = taken_last[b] = 0;
  }
  int places[13];
  if (APART) {
#pragma unroll
    for (int i = 0; i < 13; i++) {
      const int a = 16 * i / F::BYTES, b = min((16 * i + 15) / F::BYTES, F::GROUPS - 1);
      const int even = slot_of<GS>(i, a % 2 == 0 ? a : b, q), odd = slot_of<GS>(i, a % 2 == 1 ? a : b, q);
      const int slot = r < 4 ? (a % 2 == 0 || b % 2 == 0 ? even : F::USED) : (a % 2 == 1 || b % 2 == 1 ? odd : F::USED);
      places[i] = base[0] + (there[0] ? slot : F::USED);
    }
  }
  copies_wait<DEPTH - 1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // What is not known before the first sums are there.
  for (int m = simd_group; m < ROWS; m += SIMD_GROUPS) {
    const int at = m * octets * F::GROUPS;
    const bool is = is_unfit<GS, RATIO>(facts + at, lefts + at, octets, k_end, lane);
    if (lane == 0) {
      unfit[m] = is ? 1 : 0;
    }
  }
  int at = 0;
  for (; first < pieces.tiles; first += pieces.at_once * step) {
    const int here = pieces_in_turn(pieces, first);
#pragma unroll 1
    for (int item = simd_group; item < here; item += SIMD_GROUPS) {
      copies_wait<DEPTH - 2>();
      simdgroup_barrier(mem_flags::mem_threadgroup);
      // Into the place of the piece before, which all lanes are done with.
      if (ahead.there) {
        fetch_piece<ALIGN>(own + (at == 0 ? DEPTH - 1 : at - 1) * (SIMD_GROUPS * F::VECTORS), w, ahead, offsets, n_end,
                           groups * F::BYTES, lane);
        ahead = place_after(pieces, ahead, SIMD_GROUPS, simd_group);
      }
      copies_end();
      threadgroup const uint4* piece = own + at * (SIMD_GROUPS * F::VECTORS);
      threadgroup const uint* words = (threadgroup const uint*)piece;
      at = at == DEPTH - 1 ? 0 : at + 1;
      const int tile = item / octets, octet = item % octets;
      constexpr int PITCH = pitch_of(ROOM * F::SCALES);
      // Two groups' scales in a word.
      threadgroup const uint* pairs =
          (threadgroup const uint*)(scales_here + ((tile * 16 + r) * PITCH + octet * F::SCALES));
      threadgroup const uint4* four = fours + octet * (F::SLOTS * 3);
      threadgroup const uint* fifth = fifths + octet * (F::SLOTS * 3);
      threadgroup const Group* known_of = facts + ((SPREAD ? q : ROWS == 2 ? q / 2 : 0) * octets + octet) * F::GROUPS;
      int d[BLOCKS][4];
      uint before[2];
      float sums[2][2];
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        d[b][0] = d[b][1] = d[b][2] = d[b][3] = 0;
      }
      before[0] = before[1] = 0;
      sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 13; i++) {
        uint a[2][5];
        quotients_of(a[0], words[r * 52 + 4 * i + q]);
        quotients_of(a[1], words[(8 + r) * 52 + 4 * i + q]);
        const int begin = 16 * i / F::BYTES, end = min((16 * i + 15) / F::BYTES, F::GROUPS - 1);
#pragma unroll
        for (int g = begin; g <= end; g++) {
          if (!APART || g == begin) {
            const int slot = APART ? 0 : slot_of<GS>(i, g, q);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
              const int place = APART ? places[i] : base[b] + (ROWS > 1 || there[b] ? slot : F::USED);
              if (ROWS == 1 || there[b]) {
                taken[b] = four[place];
                taken_last[b] = fifth[place + gap];
              }
              const uint4 v = taken[b];
              mma_bytes(d[b], a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y, lane);
              mma_bytes(d[b], a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w, lane);
              mma_bytes(d[b], a[0][4], a[1][4], taken_last[b], lane);
            }
          }
          if (F::BYTES * (g + 1) <= 16 * i + 16) {
            // Integers of what the bytes gave: by every lane for its row, or by lanes with the lower bytes, q = 0, 2.
            uint whole[2];
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int high = SPREAD ? d[BLOCKS - 1][2 * h] : simd_shuffle_xor(d[0][2 * h], 1);
              whole[h] = uint(d[0][2 * h]) + (uint(d[0][2 * h + 1]) << 8) + (uint(high) << 16);
              const uint pair = pairs[h * (32 * PITCH) + g / 2];
              scale[h] = g % 2 == 0 ? low_value<T>(pair) : high_value<T>(pair);
            }
            const Group known = known_of[g];
            const bool own = !APART || q / 2 == g % 2;
            end_group(sums[APART ? 0 : g % 2], before, whole, scale, own ? known.unit : 0.0f, known.sum, own);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        // Odd groups' sums are other lanes' or this one's.
        const float odd = APART ? simd_shuffle_xor(sums[0][h], 2) : sums[1][h];
        const int m = SPREAD ? q : q / 2;
        if (SPREAD || (q % 2 == 0 && m < ROWS)) {
          part[(item * ROWS + m) * 16 + h * 8 + r] = sums[0][h] + odd;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int next = first + pieces.at_once * step;
    if (next < pieces.tiles) {
      fetch_rows<T, ROOM * F::SCALES, SIMD_GROUPS, ALIGN == 16>(scales_here, scales, pieces, next, n_end, groups,
                                                                simd_group, lane);
      copies_end();
    }
    for (int i = thread_index; i < here / octets * 16 * ROWS; i += SIMD_GROUPS * 32) {
      const int column = i % 16, m = i / 16 % ROWS, tile = i / 16 / ROWS;
      const int n = (first + tile * step) * 16 + column;
      if (n < n_end && m_begin + m < m_end && unfit[m] == 0u) {
        const float sum = sum_of_pieces<ROWS>(part, tile, octets, m, column);
        y[long(m_begin + m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
      }
    }
    for (int m = 0; m < ROWS; m++) {
      if (unfit[m] != 0u && m_begin + m < m_end) {
        for (int i = simd_group; i < here / octets * 16; i += SIMD_GROUPS) {
          const int n = (first + i / 16 * step) * 16 + i % 16;
          if (n < n_end) {
            const float sum = plain_product<GS>(x, w, scales, n, m_begin + m, groups, k_end, lane);
            if (lane == 0) {
              y[long(m_begin + m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
            }
          }
        }
      }
    }
    if (next < pieces.tiles) {
      copies_wait<0>();
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// --- kernel t5_mma ---
constexpr int SLOTS = 1024 / GS * (GS == 128 ? 7 : 4) + 4;
threadgroup uint4 fours[ROOM * SLOTS * 3 * ROWS];
threadgroup uint4 stage[SIMD_GROUPS * (DEPTH * 208 + 8)];
threadgroup uint4 scales_here[ITEMS / ROOM * 16 * pitch_of(ROOM * 128 / GS)];
threadgroup uint fifths[(ROOM * SLOTS * 3 + gap_of(ROWS, ROOM * SLOTS * 3)) * ROWS];
threadgroup Group facts[ROOM * (1024 / GS) * ROWS];
threadgroup float lefts[ROOM * (1024 / GS) * ROWS];
threadgroup float part[ITEMS * ROWS * 16];
threadgroup uint unfit[ROWS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
// Arrays that begin between multiples of 16 bytes are views, and rare.
if (aligned(x) && aligned(w) && aligned(scales)) {
  t5_mma<T, O, GS, ROWS, SIMD_GROUPS, ROOM, ITEMS, DEPTH, ALIGN, RATIO, ZEROS, HAS_BIAS, true>(
      x, w, scales, bias, y, fours, fifths, facts, lefts, stage, scales_here, part, unfit, m_end, scales_shape[0],
      x_shape[x_ndim - 1], threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x,
      threadgroups_per_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
} else {
  t5_mma<T, O, GS, ROWS, SIMD_GROUPS, ROOM, ITEMS, DEPTH, 1, RATIO, ZEROS, HAS_BIAS, false>(
      x, w, scales, bias, y, fours, fifths, facts, lefts, stage, scales_here, part, unfit, m_end, scales_shape[0],
      x_shape[x_ndim - 1], threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x,
      threadgroups_per_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
