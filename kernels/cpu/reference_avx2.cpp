#define ACCEL_VARIANT avx2
#include "reference_body.h"
