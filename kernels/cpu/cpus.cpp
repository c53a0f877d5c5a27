#include "cpus.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace accel {
namespace {

constexpr int kMaxThreads = 1024;

int ceil_div(double quota, double period) {
  return quota > 0 && period > 0 ? std::max(1, int(std::ceil(quota / period - 1e-9))) : 0;
}

int smaller(int a, int b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

int quota_v2(const std::string& dir) {
  std::ifstream file(dir + "/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max") return 0;
  return ceil_div(std::atof(quota.c_str()), period);
}

int quota_v1(const std::string& dir) {
  std::ifstream quota_file(dir + "/cpu.cfs_quota_us"), period_file(dir + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period)) return 0;
  return ceil_div(quota, period);
}

/* The smallest quota of the group at `path` and of the groups above it, up to the root of the hierarchy. (In a
 * container the path often names a group outside the mounted part; then only the root counts.) */
template <typename Quota>
int smallest(const std::string& mount, std::string path, Quota quota) {
  int best = 0;
  while (true) {
    if (path == "/") path.clear();
    best = smaller(best, quota(mount + path));
    if (path.empty()) return best;
    const size_t slash = path.rfind('/');
    path = slash == std::string::npos ? "" : path.substr(0, slash);
  }
}

} // namespace

int affinity_cpus() {
#if defined(__linux__)
  // Machines with more CPUs than cpu_set_t holds need a larger set.
  for (int cpus = 1024; cpus <= 65536; cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    if (!set) break;
    const size_t size = CPU_ALLOC_SIZE(cpus);
    const bool ok = sched_getaffinity(0, size, set) == 0;
    const int count = ok ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
#elif defined(__APPLE__)
  for (const char* name : {"hw.perflevel0.physicalcpu", "hw.physicalcpu"}) {
    int count = 0;
    size_t size = sizeof count;
    if (sysctlbyname(name, &count, &size, nullptr, 0) == 0 && count > 0) return count;
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int cgroup_cpus(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  int best = 0;
  while (std::getline(groups, line)) {
    // hierarchy:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) {
      best = smaller(best, smallest(root + "/sys/fs/cgroup", path, quota_v2));
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name != "cpu") continue;
      for (const std::string& mount : {controllers, std::string("cpu")}) {
        const int quota = smallest(root + "/sys/fs/cgroup/" + mount, path, quota_v1);
        best = smaller(best, quota);
        if (quota) break;
      }
    }
  }
  return best;
}

int default_threads() {
  if (const char* value = std::getenv("MLX_ACCEL_THREADS")) {
    const long wanted = std::strtol(value, nullptr, 10);
    if (wanted > 0) return int(std::min<long>(wanted, kMaxThreads));
  }
  return std::clamp(smaller(affinity_cpus(), cgroup_cpus()), 1, kMaxThreads);
}

} // namespace accel
