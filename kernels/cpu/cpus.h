/* How many processors this process may use. */
#pragma once

#include <string>

namespace accel {

/* CPUs in the affinity mask; performance cores only where the system tells them apart. */
int affinity_cpus();

/* The CPU quota of this process's control group (v1 or v2) rounded up, 0 if there is none. `root` is the root
 * of the file system, for tests. */
int cgroup_cpus(const std::string& root = "");

/* MLX_ACCEL_THREADS if it is a positive number, else the smaller of the two above; at least 1. */
int default_threads();

} // namespace accel
