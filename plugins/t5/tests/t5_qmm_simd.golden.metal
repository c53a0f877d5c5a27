template <typename T, typename O, int GS, int TILE_ROWS, bool HAS_BIAS>
[[kernel]] void custom_kernel_t5_qmm_simd__bfloat16_t_bfloat16_t_128_32_0_bfloat16_t_uint8_t_bfloat16_tc_bfloat16_tc_bfloat16_t(
  const device bfloat16_t* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  const constant int& x_ndim [[buffer(2)]],
  const device uint8_t* w [[buffer(3)]],
  const constant bfloat16_t* scales [[buffer(4)]],
  const constant int* scales_shape [[buffer(5)]],
  const constant bfloat16_t* bias [[buffer(6)]],
  device bfloat16_t* y [[buffer(7)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
#line 110 "t5_qmm_simd.metal"
threadgroup vec<T, 4> xs[TILE_ROWS * 8];
threadgroup vec<T, 4> ws[TILE_COLUMNS * 8];
int m_end = 1;
for (int i = 0; i + 1 < x_ndim; i++) {
m_end *= x_shape[i];
}
t5_qmm_simd<T, O, GS, TILE_ROWS, HAS_BIAS>(
x, w, scales, bias, y, xs, ws, m_end, scales_shape[0], x_shape[x_ndim - 1],
threadgroup_position_in_grid.x * TILE_ROWS, threadgroup_position_in_grid.y * TILE_COLUMNS,
simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

}

template [[host_name("custom_kernel_t5_qmm_simd__bfloat16_t_bfloat16_t_128_32_0_bfloat16_t_uint8_t_bfloat16_tc_bfloat16_tc_bfloat16_t")]] [[kernel]] decltype(custom_kernel_t5_qmm_simd__bfloat16_t_bfloat16_t_128_32_0_bfloat16_t_uint8_t_bfloat16_tc_bfloat16_tc_bfloat16_t<bfloat16_t, bfloat16_t, 128, 32, 0>) custom_kernel_t5_qmm_simd__bfloat16_t_bfloat16_t_128_32_0_bfloat16_t_uint8_t_bfloat16_tc_bfloat16_tc_bfloat16_t<bfloat16_t, bfloat16_t, 128, 32, 0>;

