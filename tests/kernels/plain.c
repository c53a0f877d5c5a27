/* A library that does not include accel/kernel.h. */
void kernel(const void* call) { (void)call; }
