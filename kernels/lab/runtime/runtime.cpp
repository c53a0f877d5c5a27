// The whole runtime as one translation unit; it is compiled without instrumentation.
#include <array>

#include "state.h"

#include "access.cpp"
#include "schedule.cpp"
#include "hooks.cpp"
#include "launch.cpp"
