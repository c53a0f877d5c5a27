// simdgroup_matrix: 8x8 values held by the 32 lanes of a SIMD group, two neighbours of one row each.
//
// Lane l holds row (l/16)*4 + (l/2)%4 and columns ((l/8)%2)*4 + (l%2)*2 and the next, as Apple's GPUs do.
// Products are added in float from k = 0 to 7 and rounded to the type of the result once.
#pragma once

#include "simd.h"

namespace metal {

template <class T, int Cols, int Rows = Cols>
struct simdgroup_matrix {
    static_assert(Cols == 8 && Rows == 8, "a SIMD-group matrix has 8 columns and 8 rows");
    static_assert(lab_types::Floating<T>, "elements of a SIMD-group matrix are half, bfloat or float");
    typedef vec<T, 2> storage_type;

    simdgroup_matrix() = default;
    LAB_INLINE explicit simdgroup_matrix(T diagonal) {
        unsigned r = row(), c = column();
        elements = storage_type(r == c ? diagonal : T(0), r == c + 1 ? diagonal : T(0));
    }
    LAB_INLINE storage_type& thread_elements() { return elements; }
    LAB_INLINE const storage_type& thread_elements() const { return elements; }

    static LAB_INLINE unsigned row() {
        unsigned lane = lab_simd_detail::lane();
        return (lane / 16) * 4 + (lane / 2) % 4;
    }
    static LAB_INLINE unsigned column() {
        unsigned lane = lab_simd_detail::lane();
        return (lane / 8) % 2 * 4 + lane % 2 * 2;
    }

    storage_type elements;
};

template <class T, int C, int R = C>
LAB_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> m;
    m.elements = vec<T, 2>(value);
    return m;
}

template <class T, int C, int R, class P>
LAB_INLINE void simdgroup_load(simdgroup_matrix<T, C, R>& m, const P* from, ulong elements_per_row = C,
                               vec<ulong, 2> origin = vec<ulong, 2>(0), bool transpose = false) {
    static_assert(lab_types::same<lab_types::bare_t<P>, T>, "simdgroup_load: pointer and matrix have one type");
    lab_simd(&elements_per_row, 8, LAB_SIMD_MATRIX);  // all lanes take part
    ulong r = m.row(), c = m.column();
    if (transpose) {
        m.elements[0] = from[(origin.y + c) * elements_per_row + origin.x + r];
        m.elements[1] = from[(origin.y + c + 1) * elements_per_row + origin.x + r];
    } else {
        m.elements[0] = from[(origin.y + r) * elements_per_row + origin.x + c];
        m.elements[1] = from[(origin.y + r) * elements_per_row + origin.x + c + 1];
    }
}

template <class T, int C, int R>
LAB_INLINE void simdgroup_store(const simdgroup_matrix<T, C, R>& m, T* to, ulong elements_per_row = C,
                                vec<ulong, 2> origin = vec<ulong, 2>(0), bool transpose = false) {
    lab_simd(&elements_per_row, 8, LAB_SIMD_MATRIX);
    ulong r = m.row(), c = m.column();
    if (transpose) {
        to[(origin.y + c) * elements_per_row + origin.x + r] = m.elements[0];
        to[(origin.y + c + 1) * elements_per_row + origin.x + r] = m.elements[1];
    } else {
        to[(origin.y + r) * elements_per_row + origin.x + c] = m.elements[0];
        to[(origin.y + r) * elements_per_row + origin.x + c + 1] = m.elements[1];
    }
}

namespace lab_simd_detail {

// The lane that holds (row, column) and which of its two values that is.
inline constexpr unsigned holder(unsigned row, unsigned column) {
    return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column % 4 / 2;
}

template <class A, class B>
struct Pair {
    vec<A, 2> a;
    vec<B, 2> b;
};

template <class A, class B>
LAB_HIDDEN void multiply(const lab_board* board, unsigned row, unsigned column, float* sums) {
    for (unsigned k = 0; k < 8; k++) {
        Pair<A, B> left, right;
        __builtin_memcpy(&left, board->data[holder(row, k)], sizeof(left));
        __builtin_memcpy(&right, board->data[holder(k, column)], sizeof(right));
        float a = static_cast<float>(left.a[k % 2]);
        for (int j = 0; j < 2; j++) sums[j] += a * static_cast<float>(right.b[j]);
    }
}

}  // namespace lab_simd_detail

template <class D, class A, class B, class C>
LAB_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c) {
    lab_simd_detail::Pair<A, B> mine{a.elements, b.elements};
    const lab_board* board = lab_simd(&mine, sizeof(mine), LAB_SIMD_MATRIX + 16);
    float sums[2] = {static_cast<float>(c.elements[0]), static_cast<float>(c.elements[1])};
    lab_simd_detail::multiply<A, B>(board, a.row(), a.column(), sums);
    d.elements = vec<D, 2>(sums[0], sums[1]);
}

template <class D, class A, class B>
LAB_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
    simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0.0f));
    simdgroup_multiply_accumulate(d, a, b, zero);
}

template <class T>
LAB_INLINE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                               const simdgroup_matrix<T, 8, 8>& b) {
    simdgroup_matrix<T, 8, 8> d;
    simdgroup_multiply(d, a, b);
    return d;
}

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

}  // namespace metal
