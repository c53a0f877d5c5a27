// Products of 1 to 16 rows with affine weights of 1 bit by binary matrix instructions: weights are taken as they lie in
// memory, a bit each, and x as 24 planes of bits.
//
//   y[m, n] = sum_k x[m, k] * (scales[n, k / 128] * code[n, k] + biases[n, k / 128])  (+ bias[n])
//
// Inputs     x (..., K) of T: half or bfloat; w (N, K / 32) uint; scales, biases (N, K / 128) of S; bias (N) of B: as
//            in affine_qmv.metal, biases unread if SYMMETRIC, bias unread unless HAS_BIAS
// Output     y (..., N) of O
//
// Template   ROWS 1, 2, 4 or 8, rows of x at a time; ROOM is K / 1024 rounded up, octets of groups; ITEMS pieces of
//            work at a time, at least ROOM; DEPTH pieces, at least 2, that a SIMD group has memory for; WHOLE if K is a
//            multiple of 1024
// Edges      any N; any M; K is a multiple of 128; N * K / 128 is less than 2^31
// Bytes      as in affine_qmv.metal, read once for each ROWS rows of x
// Numbers    x in group g becomes integers v of 23 bits, x ~ v * unit with unit = 2^-21 of the highest power of two in
//            the largest number of the group: half and bfloat keep all their bits down to 2^-11 and 2^-14 of it. Sums
//            of v over a group's codes are exact but for half a unit; they meet scales as float32, in four parts of six
//            bits. `rounding` holds where no weight of a group is more than sqrt(K) / 57 times as large as another: a
//            rounding error of v has standard deviation 0.5 unit at most, with ties, and five of them for a group, 5 *
//            0.5 * unit * sqrt(128) * max|w|, stay below 4 * sqrt(K) * 2^-24 * max|x| * min|w|. That takes errors for
//            independent of the weights. Rows of x with infinities, NaN or groups of numbers whose products or sums
//            float32 may not hold are summed up in float32, group by group.
//            Row-invariant: the order of sums does not depend on M, ROWS, ROOM, ITEMS, DEPTH or SIMD_GROUPS
// Geometry   threadgroups of 32 * SIMD_GROUPS lanes, as many as the device holds at once. Threadgroup (i, j) of (I, J)
//            makes columns [t, t + 1) * 16 of rows [j, j + 1) * ROWS for t = i, i + I, i + 2 I ... An octet of groups
//            of 16 columns is a piece of work; SIMD groups take them in turns
// Threadgroup memory   SIMD_GROUPS * DEPTH * 2304 bytes; ITEMS * 64 * ROWS; for each octet ROWS * (3072 + 192); and
//            scales of the ITEMS / ROOM tiles of a turn, and biases if they are read: 256 bytes or a bit more for each
//            octet of 16 columns
//
// Plane p of a group is bit p of all its v + 2^22, and plane 23, which counts for -2^22, has all bits; what it adds up
// to over the codes that are 1 is the number of bits that both have. A matrix instruction takes 16 columns and 8 planes
// of one group. Lane (r, q) of 8 x 4 is given its sums of columns r and r + 8 for planes 6 q ... 6 q + 5 by three of
// them, which it puts together with shifts.

#include "pieces.h"
#include "affine_planes.metal"

// A piece of work in threadgroup memory, in vectors: codes of 16 columns of 9, of which the last is not used, so that 8
// columns lie in different banks.
constant constexpr int PIECE = 144;

// Where a lane's vectors of a piece are, in words from the first column's octet on.
struct Offsets {
  int codes[4];
};
METAL_FUNC Offsets offsets_of(int groups, ushort lane) {
  Offsets o;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    o.codes[i] = ((i * 4 + lane / 8) * groups + lane % 8) * 4;
  }
  return o;
}

// Columns beyond the end are the last one again; groups beyond the end are the last one, and meet zeros.
template <bool VECTORS, bool WHOLE, typename WP>
METAL_FUNC void fetch_piece(threadgroup uint4* to, WP w, thread const Place& at, thread const Offsets& offsets,
                            int n_end, int groups, ushort lane) {
  const int tile = at.tile, octet = at.octet;
  threadgroup uint4* places = to + (lane / 8 * 9 + lane % 8);
  if (VECTORS && WHOLE && tile * 16 + 16 <= n_end) {
    const auto codes = w + (long(tile * 16) * groups + octet * 8) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      copy_words<4>((threadgroup uint*)(places + i * 36), codes + offsets.codes[i]);
    }
    return;
  }
  const int group = min(octet * 8 + lane % 8, groups - 1);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const long n = min(tile * 16 + i * 4 + lane / 8, n_end - 1);
    threadgroup uint4* place = places + i * 36;
    if (VECTORS) {
      copy_words<4>((threadgroup uint*)place, w + (n * groups + group) * 4);
    } else {
      uint words[4];
      stream_words<4, false>(words, w + (n * groups + group) * 4);
      place->x = words[0];
      place->y = words[1];
      place->z = words[2];
      place->w = words[3];
    }
  }
}

template <typename S>
METAL_FUNC void take_eight(thread float* to, threadgroup const uint4* from) {
#pragma unroll
  for (int v = 0; v < int(sizeof(S)) / 2; v++) {
    const uint4 words = from[v];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint word = part_of(words, i);
      if (sizeof(S) == 4) {
        to[(v * 4 + i) % 8] = as_type<float>(word);
      } else {
        to[2 * i] = low_value<S>(word);
        to[2 * i + 1] = high_value<S>(word);
      }
    }
  }
}

// Neighbours 2 q and 2 q + 1 of these eight.
template <typename S>
METAL_FUNC void take_two(thread float* to, threadgroup const uint* from, int q) {
  if (sizeof(S) == 4) {
    to[0] = as_type<float>(from[2 * q]);
    to[1] = as_type<float>(from[2 * q + 1]);
  } else {
    to[0] = low_value<S>(from[q]);
    to[1] = high_value<S>(from[q]);
  }
}

template <typename T, typename S, typename O, int ROWS, int SIMD_GROUPS, int ROOM, int ITEMS, int DEPTH, int SYMMETRIC,
          bool HAS_BIAS, bool VECTORS, bool WHOLE, typename XP, typename WP, typename SP, typename BP>
METAL_FUNC void affine_bits(XP x, WP w, SP scales, SP biases, BP bias, device O* y, threadgroup uint4* planes,
                            threadgroup float4* units, threadgroup float4* totals, threadgroup float* sums,
                            threadgroup uint4* stage, threadgroup uint4* scales_here,
                            threadgroup float* part, threadgroup uint* odd, int m_end, int n_end, int k_end,
                            int m_begin, int first, int step, ushort simd_group, ushort lane) {
  constexpr int PER = int(sizeof(S)) / 2, PITCH = pitch_of(ROOM * PER), BIASES = ITEMS / ROOM * 16 * PITCH;
  constexpr int octets = ROOM;
  const int r = lane / 4, q = lane % 4, groups = k_end / 128;
  threadgroup uint4* own = stage + simd_group * (DEPTH * PIECE);
  // x first: the pieces of all threadgroups together keep memory busy for some time.
  constexpr int AHEAD = SIMD_GROUPS * 4 < ROOM * 8 * ROWS ? 2 : 1;
  uint raw[AHEAD * 8];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    load_x<ROWS, VECTORS>(raw + i * 8, x, (i * SIMD_GROUPS + simd_group) * 4, m_begin, m_end, groups, lane);
  }
  simdgroup_barrier(mem_flags::mem_device);
  const Pieces pieces = pieces_of(ITEMS, octets, step, (n_end + 15) / 16);
  const Offsets offsets = offsets_of(groups, lane);
  fetch_rows<S, ROOM * PER, SIMD_GROUPS, VECTORS && WHOLE>(scales_here, scales, pieces, first, n_end, groups,
                                                           simd_group, lane);
  if (SYMMETRIC == 0) {
    fetch_rows<S, ROOM * PER, SIMD_GROUPS, VECTORS && WHOLE>(scales_here + BIASES, biases, pieces, first, n_end, groups,
                                                             simd_group, lane);
  }
  copies_end();
  Place ahead = place_of(pieces, first, simd_group);
#pragma unroll
  for (int d = 0; d < DEPTH - 1; d++) {
    if (ahead.there) {
      fetch_piece<VECTORS, WHOLE>(own + d * PIECE, w, ahead, offsets, n_end, groups, lane);
      ahead = place_after(pieces, ahead, SIMD_GROUPS, simd_group);
    }
    copies_end();
  }
  stage_bits<T, ROWS, SIMD_GROUPS, AHEAD, VECTORS>((threadgroup ushort*)planes, (threadgroup float*)units,
                                            (threadgroup float*)totals, sums, odd, raw, x, m_begin,
                                            m_end, groups, simd_group, lane);
  copies_wait<DEPTH - 1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float weight = as_type<float>((127u + 6u * uint(q)) << 23), unweighted = 1.0f / weight;
  // The last plane counts for less than nothing: modulo 2^32.
  const uint top = q == 3 ? uint(-16) : 32u;
  // Three times this is 1.5 * 2^23 as bits, to which integers are added to be floats.
  constexpr uint THIRD = 0xc3c00000u;
  int slot = 0;
  for (; first < pieces.tiles; first += pieces.at_once * step) {
    const int here = pieces_in_turn(pieces, first);
#pragma unroll 1
    for (int item = simd_group; item < here; item += SIMD_GROUPS) {
      copies_wait<DEPTH - 2>();
      simdgroup_barrier(mem_flags::mem_threadgroup);
      // Into the place of the piece before, which all lanes are done with.
      if (ahead.there) {
        fetch_piece<VECTORS, WHOLE>(own + (slot == 0 ? DEPTH - 1 : slot - 1) * PIECE, w, ahead, offsets, n_end,
                                    groups, lane);
        ahead = place_after(pieces, ahead, SIMD_GROUPS, simd_group);
      }
      copies_end();
      threadgroup const uint4* piece = own + slot * PIECE;
      threadgroup const uint* words = (threadgroup const uint*)piece;
      slot = slot == DEPTH - 1 ? 0 : slot + 1;
      const int tile = item / octets, octet = item % octets;
      float scale[2][8], parts[ROWS][2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        threadgroup const uint4* scales_of = scales_here + ((tile * 16 + h * 8 + r) * PITCH + octet * PER);
        // What is left of the biases: lane q begins with those of groups 2 q and 2 q + 1.
        float offset[2];
        if (SYMMETRIC == 0) {
          float own_scale[2];
          take_two<S>(own_scale, (threadgroup const uint*)scales_of, q);
          take_two<S>(offset, (threadgroup const uint*)(scales_of + BIASES), q);
          offset[0] = fma(0.5f, own_scale[0], offset[0]);
          offset[1] = fma(0.5f, own_scale[1], offset[1]);
        } else if (SYMMETRIC > 1) {
          take_two<S>(offset, (threadgroup const uint*)scales_of, q);
          offset[0] *= 0.5f - 0.5f * float(SYMMETRIC);
          offset[1] *= 0.5f - 0.5f * float(SYMMETRIC);
        }
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
          parts[m][h] = 0.0f;
          if (SYMMETRIC != 1) {
            threadgroup const float* xs = sums + (((octet * 2 + q / 2) * ROWS + m) * 4 + q % 2 * 2);
            parts[m][h] = fma(offset[1], xs[1], offset[0] * xs[0]) * unweighted;
          }
        }
        take_eight<S>(scale[h], scales_of);
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        uint a[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          a[i][0] = words[r * 36 + (e * 4 + i) * 4 + q];
          a[i][1] = words[(r + 8) * 36 + (e * 4 + i) * 4 + q];
        }
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
          const int at = (octet * 2 + e) * ROWS + m;
          const uint4 b0 = planes[at * 96 + lane], b1 = planes[at * 96 + 32 + lane], b2 = planes[at * 96 + 64 + lane];
          const float4 unit = units[at], total = totals[at * 4 + q];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            int d0[4], d1[4], d2[4];
            mma_bits_first(d0, a[i][0], a[i][1], part_of(b0, i), THIRD, lane);
            mma_bits_first(d1, a[i][0], a[i][1], part_of(b1, i), 0u, lane);
            mma_bits_first(d2, a[i][0], a[i][1], part_of(b2, i), 0u, lane);
            const float u = i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
            const float all = i == 0 ? total.x : i == 1 ? total.y : i == 2 ? total.z : total.w;
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const uint sum = ((uint(d0[2 * h]) + 2u * uint(d0[2 * h + 1])) +
                                4u * (uint(d1[2 * h]) + 2u * uint(d1[2 * h + 1]))) +
                               (16u * uint(d2[2 * h]) + top * uint(d2[2 * h + 1]));
              parts[m][h] = fma(scale[h][e * 4 + i], fma(as_type<float>(sum), u, -all), parts[m][h]);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float sum = parts[m][h] * weight;
          sum += simd_shuffle_xor(sum, 1);
          sum += simd_shuffle_xor(sum, 2);
          if (q == 0) {
            part[(item * ROWS + m) * 16 + h * 8 + r] = sum;
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int next = first + pieces.at_once * step;
    if (next < pieces.tiles) {
      fetch_rows<S, ROOM * PER, SIMD_GROUPS, VECTORS && WHOLE>(scales_here, scales, pieces, next, n_end, groups,
                                                               simd_group, lane);
      if (SYMMETRIC == 0) {
        fetch_rows<S, ROOM * PER, SIMD_GROUPS, VECTORS && WHOLE>(scales_here + BIASES, biases, pieces, next, n_end,
                                                                 groups, simd_group, lane);
      }
      copies_end();
    }
    for (int i = simd_group * 32 + lane; i < here / octets * 16 * ROWS; i += SIMD_GROUPS * 32) {
      const int column = i % 16, m = i / 16 % ROWS, tile = i / 16 / ROWS;
      const int n = (first + tile * step) * 16 + column;
      float sum = sum_of_pieces<ROWS>(part, tile, octets, m, column);
      uint unusual = 0;
#pragma unroll
      for (int s = 0; s < SIMD_GROUPS; s++) {
        unusual |= odd[s * ROWS + m];
      }
      if (n < n_end && m_begin + m < m_end) {
        if (unusual != 0) {
          sum = 0.0f;
          for (int k = 0; k < k_end; k += 128) {
            const long g = long(n) * groups + k / 128;
            const float s = float(scales[g]);
            const float b = SYMMETRIC > 0 ? s * (-0.5f * float(SYMMETRIC)) : float(biases[g]);
            // Sums of all K one after the other would drift.
            float some = 0.0f;
            for (int i = 0; i < 128; i++) {
              const float code = float(w[g * 4 + i / 32] >> (i % 32) & 1u);
              some = fma(float(x[long(m_begin + m) * k_end + k + i]), fma(s, code, b), some);
            }
            sum += some;
          }
        }
        y[long(m_begin + m) * n_end + n] = O(HAS_BIAS ? sum + float(bias[n]) : sum);
      }
    }
    if (next < pieces.tiles) {
      copies_wait<0>();
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// --- kernel affine_bits ---
threadgroup uint4 planes[ROOM * ROWS * 192];
threadgroup float4 units[ROOM * ROWS * 2];
threadgroup float4 totals[ROOM * ROWS * 8];
threadgroup float sums[ROOM * ROWS * 8];
threadgroup uint4 stage[SIMD_GROUPS * DEPTH * 144];
threadgroup uint4 scales_here[ITEMS / ROOM * 16 * pitch_of(ROOM * int(sizeof(S)) / 2) * (SYMMETRIC == 0 ? 2 : 1)];
threadgroup float part[ITEMS * ROWS * 16];
threadgroup uint odd[SIMD_GROUPS * ROWS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
  m_end *= x_shape[i];
}
// Arrays that begin between multiples of 16 bytes are views, and rare.
if (aligned(x) && aligned(w) && aligned(scales) && aligned(biases)) {
  affine_bits<T, S, O, ROWS, SIMD_GROUPS, ROOM, ITEMS, DEPTH, SYMMETRIC, HAS_BIAS, true, WHOLE>(
      x, w, scales, biases, bias, y, planes, units, totals, sums, stage, scales_here, part, odd, m_end, w_shape[0],
      x_shape[x_ndim - 1], threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x,
      threadgroups_per_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
} else {
  affine_bits<T, S, O, ROWS, SIMD_GROUPS, ROOM, ITEMS, DEPTH, SYMMETRIC, HAS_BIAS, false, WHOLE>(
      x, w, scales, biases, bias, y, planes, units, totals, sums, stage, scales_here, part, odd, m_end, w_shape[0],
      x_shape[x_ndim - 1], threadgroup_position_in_grid.y * ROWS, threadgroup_position_in_grid.x,
      threadgroups_per_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
}
