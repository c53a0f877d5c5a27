// Pieces of work of a threadgroup that makes tiles of columns: an octet of groups of one tile each, which its SIMD
// groups take in turns. Included by kernels that fetch pieces ahead.

// Tiles first, first + step ... of `tiles`, `at_once` of them in a turn, of `octets` pieces each.
struct Pieces {
  int octets, at_once, step, tiles;
  uint reciprocal;
};

// Room for the sums of `room` pieces, at least `octets`.
METAL_FUNC Pieces pieces_of(int room, int octets, int step, int tiles) {
  Pieces p;
  p.octets = octets;
  p.at_once = room / octets;
  p.step = step;
  p.tiles = tiles;
  // piece / octets == piece * reciprocal >> 16 for the few pieces there are.
  p.reciprocal = 65536u / uint(octets) + 1u;
  return p;
}

METAL_FUNC int tile_in_turn(thread const Pieces& pieces, int piece) {
  return int(uint(piece) * pieces.reciprocal >> 16);
}

// A piece of the turn that begins with tile `first`; not `there` behind the last one.
struct Place {
  int first, piece, tile, octet;
  bool there;
};

METAL_FUNC Place place_of(thread const Pieces& pieces, int first, int piece) {
  Place p;
  const int in_turn = tile_in_turn(pieces, piece);
  p.first = first;
  p.piece = piece;
  p.tile = first + in_turn * pieces.step;
  p.octet = piece - in_turn * pieces.octets;
  p.there = piece < pieces.at_once * pieces.octets && p.tile < pieces.tiles;
  return p;
}

// What the SIMD group takes next: of this turn, or its first of the next one.
METAL_FUNC Place place_after(thread const Pieces& pieces, Place p, int simd_groups, int simd_group) {
  const Place next = place_of(pieces, p.first, p.piece + simd_groups);
  if (next.there) {
    return next;
  }
  return place_of(pieces, p.first + pieces.at_once * pieces.step, simd_group);
}

// Tiles and pieces of the turn that begins with tile `first`.
METAL_FUNC int tiles_of_turn(thread const Pieces& pieces, int first) {
  return min(pieces.at_once, (pieces.tiles - first + pieces.step - 1) / pieces.step);
}
METAL_FUNC int pieces_in_turn(thread const Pieces& pieces, int first) {
  return tiles_of_turn(pieces, first) * pieces.octets;
}

// The sum of a column over the pieces of a tile, in their order: part[piece][row][16 columns].
template <int ROWS>
METAL_FUNC float sum_of_pieces(threadgroup const float* part, int tile_in_turn, int octets, int row, int column) {
  float sum = 0.0f;
  for (int octet = 0; octet < octets; octet++) {
    sum += part[((tile_in_turn * octets + octet) * ROWS + row) * 16 + column];
  }
  return sum;
}

// How far the rows of columns are apart in threadgroup memory, in vectors: an odd number, so that neighbours lie in
// different banks.
constexpr METAL_FUNC int pitch_of(int vectors) {
  return vectors | 1;
}

// Scales of all groups of the columns of the turn that begins with tile `first`, in rows of ROW vectors: whole rows at
// a time, by all lanes of the threadgroup, eight for a row. Columns beyond the end are the last one again, groups
// beyond the end have zeros.
template <typename S, int ROW, int SIMD_GROUPS, bool VECTORS, typename SP>
METAL_FUNC void fetch_rows(threadgroup uint4* to, SP from, thread const Pieces& pieces, int first, int n_end,
                           int groups, ushort simd_group, ushort lane) {
  constexpr int EACH = 16 / int(sizeof(S));
  const int columns = tiles_of_turn(pieces, first) * 16;
#pragma unroll 1
  for (int column = simd_group * 4 + lane / 8; column < columns; column += SIMD_GROUPS * 4) {
    const int n = min((first + column / 16 * pieces.step) * 16 + column % 16, n_end - 1);
    const auto row = from + long(n) * groups;
#pragma unroll
    for (int i = 0; i < (ROW + 7) / 8; i++) {
      const int v = i * 8 + lane % 8;
      if (v < ROW) {
        threadgroup uint4* place = to + (column * pitch_of(ROW) + v);
        if (VECTORS) {
          copy_words<4>((threadgroup uint*)place, row + v * EACH);
        } else {
#pragma unroll
          for (int j = 0; j < EACH; j++) {
            ((threadgroup S*)place)[j] = v * EACH + j < groups ? row[v * EACH + j] : S(0.0f);
          }
        }
      }
    }
  }
}
