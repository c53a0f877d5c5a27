// Quad-group functions beside those of simd.h. Quads: four neighbouring lanes.
#pragma once

#include "simd.h"

namespace metal {

typedef lab_vote<uint, 15> quad_vote;

namespace lab_simd_detail {
LAB_INLINE unsigned first_of_quad() { return lane() & ~3u; }
LAB_INLINE quad_vote quad_vote_of(const lab_board* board, unsigned votes) {
    return quad_vote(votes >> first_of_quad(), present(board) >> first_of_quad() & 15);
}
}  // namespace lab_simd_detail

LAB_INLINE quad_vote quad_ballot(bool value) {
    unsigned one = value;
    const lab_board* board = lab_simd_detail::show(one, LAB_SIMD_BALLOT | LAB_QUAD);
    unsigned first = lab_simd_detail::first_of_quad(), votes = 0;
    for (unsigned i = first; i < first + 4; i++)
        if ((lab_simd_detail::active(board) >> i & 1) && lab_simd_detail::get<unsigned>(board, i)) votes |= 1u << i;
    return lab_simd_detail::quad_vote_of(board, votes);
}
LAB_INLINE quad_vote quad_active_threads_mask() {
    unsigned one = 1;
    const lab_board* board = lab_simd_detail::show(one, LAB_SIMD_BALLOT | LAB_QUAD);
    return lab_simd_detail::quad_vote_of(board, lab_simd_detail::active(board));
}
LAB_INLINE bool quad_is_helper_thread() { return false; }

#define LAB_QUAD_PREFIX(name, Op, start)                                                                      \
    template <class T>                                                                                        \
    LAB_INLINE T quad_prefix_inclusive_##name(T data) {                                                       \
        const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);                    \
        return lab_simd_detail::quad_prefix<lab_simd_detail::Op, T>(board, lab_simd_detail::lane(), T(start), true);  \
    }                                                                                                         \
    template <class T>                                                                                        \
    LAB_INLINE T quad_prefix_exclusive_##name(T data) {                                                       \
        const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);                    \
        return lab_simd_detail::quad_prefix<lab_simd_detail::Op, T>(board, lab_simd_detail::lane(), T(start), false); \
    }
namespace lab_simd_detail {
template <class Op, class T>
LAB_HIDDEN T quad_prefix(const lab_board* board, unsigned lane, T start, bool inclusive) {
    T r = start;
    for (unsigned i = lane & ~3u; i < lane + inclusive; i++)
        if (board->active >> i & 1) r = Apply<Op, T>::of(r, get<T>(board, i));
    return r;
}
}  // namespace lab_simd_detail
LAB_QUAD_PREFIX(sum, Add, 0)
LAB_QUAD_PREFIX(product, Multiply, 1)
#undef LAB_QUAD_PREFIX

template <class T>
LAB_INLINE T quad_shuffle_rotate_down(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    unsigned lane = lab_simd_detail::lane();
    return lab_simd_detail::take(board, (lane & ~3u) + ((lane + delta) & 3), data);
}
template <class T>
LAB_INLINE T quad_shuffle_rotate_up(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    unsigned lane = lab_simd_detail::lane();
    return lab_simd_detail::take(board, (lane & ~3u) + ((lane - delta) & 3), data);
}
// Within each `modulo` lanes, 2 or 4; what would come from beyond comes from `fill`. A board lasts until the next one.
template <class T>
LAB_INLINE T quad_shuffle_and_fill_down(T data, T fill, ushort delta, ushort modulo = 4) {
    unsigned lane = lab_simd_detail::lane(), first = lane - lane % modulo, from = lane % modulo + delta;
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    T inside = from >= modulo ? data : lab_simd_detail::take(board, first + from, data);
    board = lab_simd_detail::show(fill, LAB_SIMD_SHUFFLE | LAB_QUAD);
    return from >= modulo ? lab_simd_detail::take(board, first + from - modulo, data) : inside;
}
template <class T>
LAB_INLINE T quad_shuffle_and_fill_up(T data, T fill, ushort delta, ushort modulo = 4) {
    unsigned lane = lab_simd_detail::lane(), first = lane - lane % modulo, at = lane % modulo;
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    T inside = at < delta ? data : lab_simd_detail::take(board, lane - delta, data);
    board = lab_simd_detail::show(fill, LAB_SIMD_SHUFFLE | LAB_QUAD);
    return at < delta ? lab_simd_detail::take(board, first + at + modulo - delta, data) : inside;
}

}  // namespace metal
