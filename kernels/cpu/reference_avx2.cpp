#define ACCEL_VARIANT avx2
#define ACCEL_VECTOR 32
#include "reference_body.h"
