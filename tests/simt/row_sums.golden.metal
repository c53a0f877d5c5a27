#line 4 "rows.metal"
template <typename X>
METAL_FUNC float row_sum(X x, int length, ushort lane) {
float sum = 0.0f;
#line 8 "rows.metal"
for (int i = lane; i < length; i += 32) {
sum += float(x[i]);
}
return simd_sum(sum);
}
template <typename T, int GROUPS, bool TWICE>
[[kernel]] void custom_kernel_row_sums__float16_t_2_0_float_float16_t(
  const device float* x [[buffer(0)]],
  const constant int* x_shape [[buffer(1)]],
  device float16_t* y [[buffer(2)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
#line 15 "rows.metal"
threadgroup float parts[GROUPS];
#line 17 "rows.metal"
const int length = x_shape[1];
const int part = length / GROUPS;
const uint row = threadgroup_position_in_grid.x;
const float sum = row_sum(x + row * length + simdgroup_index_in_threadgroup * part, part, thread_index_in_simdgroup);
if (thread_index_in_simdgroup == 0) {
parts[simdgroup_index_in_threadgroup] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index_in_threadgroup == 0) {
float total = 0.0f;
for (int g = 0; g < GROUPS; g++) {
total += parts[g];
}
y[row] = T(TWICE ? 2.0f * total : total);
}

}

template [[host_name("custom_kernel_row_sums__float16_t_2_0_float_float16_t")]] [[kernel]] decltype(custom_kernel_row_sums__float16_t_2_0_float_float16_t<float16_t, 2, 0>) custom_kernel_row_sums__float16_t_2_0_float_float16_t<float16_t, 2, 0>;

