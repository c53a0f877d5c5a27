#define ACCEL_VARIANT portable
#define ACCEL_VECTOR 16
#include "reference_body.h"
