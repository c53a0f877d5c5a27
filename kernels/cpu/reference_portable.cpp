#define ACCEL_VARIANT portable
#include "reference_body.h"
