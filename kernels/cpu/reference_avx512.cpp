#define ACCEL_VARIANT avx512
#define ACCEL_VECTOR 64
#include "reference_body.h"
