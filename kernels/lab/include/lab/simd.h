// Barriers, SIMD-group and quad-group functions.
//
// Every lane of a SIMD group shows its value and waits for the others; the runtime checks that all of them came
// to the same place, but for the functions that are defined by which lanes are active. The device's order of additions is not specified: here it is a tree (16, 8, 4, 2, 1 apart).
#pragma once

#include "vec.h"

// Not instrumented: boards are the lab's own memory. (Such functions cannot be inlined into kernels.)
#define LAB_HIDDEN __attribute__((noinline, no_sanitize("thread", "undefined")))

// Stands before a loop in which lanes wait for each other (see rewrite_rounds.py), and counts its rounds.
class lab_rounds {
public:
    LAB_INLINE lab_rounds() { lab_loop_enter(); }
    LAB_INLINE ~lab_rounds() { lab_loop_leave(); }
    LAB_INLINE bool once() {
        bool first = first_;
        first_ = false;
        return first;
    }
    LAB_INLINE bool next() {
        lab_loop_round();
        return false;
    }

private:
    bool first_ = true;
};

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
constexpr mem_flags operator&(mem_flags a, mem_flags b) {
    return static_cast<mem_flags>(static_cast<int>(a) & static_cast<int>(b));
}

LAB_INLINE void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
    lab_threadgroup_barrier(static_cast<int>(flags), line);
}
LAB_INLINE void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
    lab_simdgroup_barrier(static_cast<int>(flags), line);
}

// Votes of the lanes of a group. ALL: a bit for each lane that there may be.
template <class V, V ALL>
class lab_vote {
public:
    typedef V vote_t;
    LAB_INLINE explicit constexpr lab_vote(vote_t v = 0, vote_t present = ALL) : v_(v & ALL), present_(present) {}
    LAB_INLINE explicit constexpr operator vote_t() const { return v_; }
    LAB_INLINE constexpr bool all() const { return (v_ & present_) == present_; }
    LAB_INLINE constexpr bool any() const { return v_ != 0; }

private:
    vote_t v_, present_;
};
typedef lab_vote<ulong, ~0ul> simd_vote;

namespace lab_simd_detail {

struct Add {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a + b); }
};
struct Multiply {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a * b); }
};
struct Min {
    template <class T>
    static T of(T a, T b) { return b < a ? b : a; }
};
struct Max {
    template <class T>
    static T of(T a, T b) { return a < b ? b : a; }
};
struct And {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a & b); }
};
struct Or {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a | b); }
};
struct Xor {
    template <class T>
    static T of(T a, T b) { return static_cast<T>(a ^ b); }
};

template <class T>
LAB_HIDDEN T get(const lab_board* board, unsigned lane) {
    T v;
    __builtin_memcpy(&v, board->data[lane], sizeof(T));
    return v;
}

template <class Op, class T>
struct Apply {
    static T of(T a, T b) { return Op::of(a, b); }
};
template <class Op, class T, int N>
struct Apply<Op, vec<T, N>> {
    static vec<T, N> of(vec<T, N> a, vec<T, N> b) {
        vec<T, N> r;
        for (int i = 0; i < N; i++) r[i] = Op::of(a[i], b[i]);
        return r;
    }
};

// Over the active lanes of [first, first + count), as a tree.
template <class Op, class T>
LAB_HIDDEN T tree(const lab_board* board, unsigned first, unsigned count) {
    T v[32];
    bool has[32];
    for (unsigned i = 0; i < count; i++) {
        has[i] = board->active >> (first + i) & 1;
        if (has[i]) __builtin_memcpy(&v[i], board->data[first + i], sizeof(T));
    }
    for (unsigned d = count / 2; d; d /= 2)
        for (unsigned i = 0; i < d; i++) {
            if (!has[i + d]) continue;
            v[i] = has[i] ? Apply<Op, T>::of(v[i], v[i + d]) : v[i + d];
            has[i] = true;
        }
    return v[0];
}

template <class Op, class T>
LAB_HIDDEN T reduced(lab_board* board) {
    T v;
    if (!board->done) {
        v = tree<Op, T>(board, 0, 32);
        __builtin_memcpy(board->result, &v, sizeof(T));
        board->done = 1;
    }
    __builtin_memcpy(&v, board->result, sizeof(T));
    return v;
}

template <class Op, class T>
LAB_HIDDEN T prefix(const lab_board* board, unsigned lane, T start, bool inclusive) {
    T r = start;
    for (unsigned i = 0; i < lane + inclusive; i++) {
        if (!(board->active >> i & 1)) continue;
        T v;
        __builtin_memcpy(&v, board->data[i], sizeof(T));
        r = Apply<Op, T>::of(r, v);
    }
    return r;
}

LAB_HIDDEN inline unsigned lane() { return lab_where()->thread_index_in_simdgroup; }
LAB_HIDDEN inline unsigned active(const lab_board* board) { return board->active; }
LAB_HIDDEN inline unsigned present(const lab_board* board) { return board->present; }

// The value that lane `from` showed; a lane that does not take part has none.
template <class T>
LAB_INLINE T take(const lab_board* board, unsigned from, const T& own) {
    if (from >= 32 || !(active(board) >> from & 1)) {
        lab_read_inactive(from);
        return own;
    }
    return get<T>(board, from);
}
template <class T>
LAB_INLINE const lab_board* show(const T& value, int op) {
    static_assert(sizeof(T) <= 64, "a SIMD operation moves at most 64 bytes a lane");
    return lab_simd(&value, sizeof(T), op);
}

}  // namespace lab_simd_detail

#define LAB_REDUCTION(name, Op)                                                                      \
    template <class T>                                                                               \
    LAB_INLINE T simd_##name(T data) {                                                               \
        return lab_simd_detail::reduced<lab_simd_detail::Op, T>(                                     \
            lab_simd(&data, sizeof(T), LAB_SIMD_REDUCE + 16 * (__COUNTER__ - LAB_FIRST_OP)));        \
    }                                                                                                \
    template <class T>                                                                               \
    LAB_INLINE T quad_##name(T data) {                                                               \
        const lab_board* board = lab_simd_detail::show(data, LAB_QUAD + LAB_SIMD_SHUFFLE + 16 * (__COUNTER__ - LAB_FIRST_OP)); \
        return lab_simd_detail::tree<lab_simd_detail::Op, T>(board, lab_simd_detail::lane() & ~3u, 4); \
    }
enum { LAB_FIRST_OP = __COUNTER__ };
LAB_REDUCTION(sum, Add)
LAB_REDUCTION(product, Multiply)
LAB_REDUCTION(min, Min)
LAB_REDUCTION(max, Max)
LAB_REDUCTION(and, And)
LAB_REDUCTION(or, Or)
LAB_REDUCTION(xor, Xor)
#undef LAB_REDUCTION

#define LAB_PREFIX(name, Op, start)                                                                          \
    template <class T>                                                                                       \
    LAB_INLINE T simd_prefix_inclusive_##name(T data) {                                                      \
        return lab_simd_detail::prefix<lab_simd_detail::Op, T>(lab_simd_detail::show(data, LAB_SIMD_SHUFFLE), \
                                                               lab_simd_detail::lane(), T(start), true);     \
    }                                                                                                        \
    template <class T>                                                                                       \
    LAB_INLINE T simd_prefix_exclusive_##name(T data) {                                                      \
        return lab_simd_detail::prefix<lab_simd_detail::Op, T>(lab_simd_detail::show(data, LAB_SIMD_SHUFFLE), \
                                                               lab_simd_detail::lane(), T(start), false);    \
    }
LAB_PREFIX(sum, Add, 0)
LAB_PREFIX(product, Multiply, 1)
#undef LAB_PREFIX

template <class T>
LAB_INLINE T simd_shuffle(T data, ushort lane) {
    return lab_simd_detail::take(lab_simd_detail::show(data, LAB_SIMD_SHUFFLE), lane, data);
}
template <class T>
LAB_INLINE T simd_broadcast(T data, ushort lane) {
    return lab_simd_detail::take(lab_simd_detail::show(data, LAB_SIMD_SHUFFLE), lane, data);
}
template <class T>
LAB_INLINE T simd_broadcast_first(T data, int line = __builtin_LINE()) {
    static_assert(sizeof(T) <= 64, "a SIMD operation moves at most 64 bytes a lane");
    const lab_board* board = lab_simd_of_active(&data, sizeof(T), line);
    return lab_simd_detail::get<T>(board, static_cast<unsigned>(__builtin_ctz(lab_simd_detail::active(board))));
}
template <class T>
LAB_INLINE T simd_shuffle_xor(T data, ushort mask) {
    return lab_simd_detail::take(lab_simd_detail::show(data, LAB_SIMD_SHUFFLE), lab_simd_detail::lane() ^ mask, data);
}
// Beyond the end there is nothing to take: the lane keeps its own value.
template <class T>
LAB_INLINE T simd_shuffle_down(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE);
    unsigned from = lab_simd_detail::lane() + delta;
    return from >= 32 ? data : lab_simd_detail::take(board, from, data);
}
template <class T>
LAB_INLINE T simd_shuffle_up(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE);
    unsigned lane = lab_simd_detail::lane();
    return delta > lane ? data : lab_simd_detail::take(board, lane - delta, data);
}
template <class T>
LAB_INLINE T simd_shuffle_rotate_down(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE);
    return lab_simd_detail::take(board, (lab_simd_detail::lane() + delta) & 31, data);
}
template <class T>
LAB_INLINE T simd_shuffle_rotate_up(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE);
    return lab_simd_detail::take(board, (lab_simd_detail::lane() - delta) & 31, data);
}
// Within each `modulo` lanes; what would come from beyond comes from `fill`.
template <class T>
LAB_INLINE T simd_shuffle_and_fill_down(T data, T fill, ushort delta, ushort modulo = 32) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE);
    const lab_board* fills = lab_simd_detail::show(fill, LAB_SIMD_SHUFFLE);
    unsigned lane = lab_simd_detail::lane(), first = lane - lane % modulo, from = lane % modulo + delta;
    (void)board;
    if (from >= modulo) return lab_simd_detail::take(fills, first + from - modulo, data);
    return lab_simd_detail::take(board, first + from, data);
}
template <class T>
LAB_INLINE T simd_shuffle_and_fill_up(T data, T fill, ushort delta, ushort modulo = 32) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE);
    const lab_board* fills = lab_simd_detail::show(fill, LAB_SIMD_SHUFFLE);
    unsigned lane = lab_simd_detail::lane(), first = lane - lane % modulo, at = lane % modulo;
    if (at < delta) return lab_simd_detail::take(fills, first + at + modulo - delta, data);
    return lab_simd_detail::take(board, lane - delta, data);
}

LAB_INLINE simd_vote simd_ballot(bool value) {
    unsigned one = value;
    const lab_board* board = lab_simd_detail::show(one, LAB_SIMD_BALLOT);
    ulong votes = 0;
    for (unsigned i = 0; i < 32; i++)
        if ((lab_simd_detail::active(board) >> i & 1) && lab_simd_detail::get<unsigned>(board, i)) votes |= 1ul << i;
    return simd_vote(votes, lab_simd_detail::present(board));
}
LAB_INLINE simd_vote simd_active_threads_mask(int line = __builtin_LINE()) {
    unsigned one = 1;
    const lab_board* board = lab_simd_of_active(&one, sizeof(one), line);
    return simd_vote(lab_simd_detail::active(board), lab_simd_detail::present(board));
}
LAB_INLINE bool simd_all(bool value) {
    unsigned one = value;
    return lab_simd_detail::reduced<lab_simd_detail::And, unsigned>(lab_simd(&one, 4, LAB_SIMD_BALLOT));
}
LAB_INLINE bool simd_any(bool value) {
    unsigned one = value;
    return lab_simd_detail::reduced<lab_simd_detail::Or, unsigned>(lab_simd(&one, 4, LAB_SIMD_BALLOT));
}
LAB_INLINE bool simd_is_first(int line = __builtin_LINE()) {
    unsigned one = 1;
    const lab_board* board = lab_simd_of_active(&one, sizeof(one), line);
    return (lab_simd_detail::active(board) & ((1u << lab_simd_detail::lane()) - 1)) == 0;
}
LAB_INLINE bool simd_is_helper_thread() { return false; }

// Quads: four neighbouring lanes.
template <class T>
LAB_INLINE T quad_shuffle(T data, ushort lane) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    return lab_simd_detail::take(board, (lab_simd_detail::lane() & ~3u) + (lane & 3u), data);
}
template <class T>
LAB_INLINE T quad_broadcast(T data, ushort lane) {
    return quad_shuffle(data, lane);
}
template <class T>
LAB_INLINE T quad_broadcast_first(T data) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    unsigned first = lab_simd_detail::lane() & ~3u;
    unsigned mask = lab_simd_detail::active(board) >> first & 15;
    return lab_simd_detail::get<T>(board, first + static_cast<unsigned>(__builtin_ctz(mask)));
}
template <class T>
LAB_INLINE T quad_shuffle_xor(T data, ushort mask) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    return lab_simd_detail::take(board, lab_simd_detail::lane() ^ (mask & 3u), data);
}
template <class T>
LAB_INLINE T quad_shuffle_down(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    unsigned lane = lab_simd_detail::lane();
    return (lane & 3) + delta >= 4 ? data : lab_simd_detail::take(board, lane + delta, data);
}
template <class T>
LAB_INLINE T quad_shuffle_up(T data, ushort delta) {
    const lab_board* board = lab_simd_detail::show(data, LAB_SIMD_SHUFFLE | LAB_QUAD);
    unsigned lane = lab_simd_detail::lane();
    return delta > (lane & 3) ? data : lab_simd_detail::take(board, lane - delta, data);
}
LAB_INLINE bool quad_all(bool value) { return quad_and(static_cast<unsigned>(value)); }
LAB_INLINE bool quad_any(bool value) { return quad_or(static_cast<unsigned>(value)); }
LAB_INLINE bool quad_is_first() { return (lab_simd_detail::lane() & 3) == 0; }

}  // namespace metal
