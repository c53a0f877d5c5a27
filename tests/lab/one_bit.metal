// Body: y = (bits * scales + biases) x for one row a SIMD group; groups of 128, K a template parameter.
uint row = threadgroup_position_in_grid.y * 4 + simdgroup_index_in_threadgroup;
uint lane = thread_index_in_simdgroup;
float sum = 0;
for (uint k = lane * 32; k < uint(K); k += 32 * 32) {
    uint word = w[(row * K + k) / 32];
    float s = scales[(row * K + k) / 128], b = biases[(row * K + k) / 128];
    for (uint i = 0; i < 32; i++) sum += (word >> i & 1 ? s + b : b) * float(x[k + i]);
}
sum = simd_sum(sum);
if (lane == 0) y[row] = T(sum);
