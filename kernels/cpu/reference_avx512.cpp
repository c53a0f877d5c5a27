#define ACCEL_VARIANT avx512
#include "reference_body.h"
