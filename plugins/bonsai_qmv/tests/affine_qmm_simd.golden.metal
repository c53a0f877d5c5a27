template <typename T, typename O, int BITS, int GS, int TILE_ROWS, int SYMMETRIC, bool HAS_BIAS, bool WHOLE>
[[kernel]] void custom_kernel_affine_qmm_simd__bfloat16_t_bfloat16_t_2_128_32_2_0_1_bfloat16_t_uint32_t_bfloat16_tc_bfloat16_tc_bfloat16_tc_bfloat16_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int& x_ndim [[buffer(2)]],
  const device uint32_t* w [[buffer(3)]],
  const constant int* w_shape [[buffer(4)]],
  const constant bfloat16_t* scales [[buffer(5)]],
  const constant bfloat16_t* biases [[buffer(6)]],
  const constant bfloat16_t* bias [[buffer(7)]],
  device bfloat16_t* y [[buffer(8)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
#line 157 "affine_qmm_simd.metal"
threadgroup vec<T, 4> xs[TILE_ROWS * 8];
threadgroup vec<T, 4> ws[TILE_COLUMNS * 8];
threadgroup float totals[TILE_ROWS];
threadgroup float2 factors[TILE_COLUMNS];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
m_end *= x_shape[i];
}
affine_qmm_simd<T, O, BITS, GS, TILE_ROWS, SYMMETRIC, HAS_BIAS, WHOLE>(
x, w, scales, biases, bias, y, xs, ws, totals, factors, m_end, w_shape[0], x_shape[x_ndim - 1],
threadgroup_position_in_grid.x * TILE_ROWS, threadgroup_position_in_grid.y * TILE_COLUMNS,
simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

}

template [[host_name("custom_kernel_affine_qmm_simd__bfloat16_t_bfloat16_t_2_128_32_2_0_1_bfloat16_t_uint32_t_bfloat16_tc_bfloat16_tc_bfloat16_tc_bfloat16_t")]] [[kernel]] decltype(custom_kernel_affine_qmm_simd__bfloat16_t_bfloat16_t_2_128_32_2_0_1_bfloat16_t_uint32_t_bfloat16_tc_bfloat16_tc_bfloat16_tc_bfloat16_t<bfloat16_t, bfloat16_t, 2, 128, 32, 2, 0, 1>) custom_kernel_affine_qmm_simd__bfloat16_t_bfloat16_t_2_128_32_2_0_1_bfloat16_t_uint32_t_bfloat16_tc_bfloat16_tc_bfloat16_tc_bfloat16_t<bfloat16_t, bfloat16_t, 2, 128, 32, 2, 0, 1>;

