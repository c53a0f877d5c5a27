#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpus.h"

namespace accel::pool {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough to span the small ops between two kernels of a decode step, short enough not to take a core
// from the thread that builds the next step.
constexpr auto kSpin = std::chrono::microseconds(30);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// What a thread fetches at most while it waits: a part of its second-level cache.
constexpr size_t kFetch = 384 << 10;

thread_local bool in_loop = false;
thread_local bool begun = false; // this thread has loops that are not finished

void run_inline(int64_t n, int64_t grain, Task task, void* arg) {
  const bool outer = in_loop;
  in_loop = true;
  for (int64_t begin = 0; begin < n; begin += grain) task(arg, begin, std::min(begin + grain, n));
  in_loop = outer;
}

class Pool {
 public:
  int threads() {
    int n = size_.load(std::memory_order_relaxed);
    if (n == 0) {
      int expected = 0;
      n = default_threads();
      if (!size_.compare_exchange_strong(expected, n)) n = expected;
    }
    return n;
  }

  void expect(const void* data, size_t bytes) {
    // Two stores that may be seen apart: addresses are only ever prefetched, which cannot fault.
    soon_bytes_.store(bytes, std::memory_order_relaxed);
    soon_.store(static_cast<const char*>(data), std::memory_order_relaxed);
  }

  void set_threads(int n) {
    n = n > 0 ? std::min(n, 1024) : default_threads();
    std::lock_guard<std::mutex> owner(owner_);
    if (n == size_.load()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false);
    size_.store(n);
  }

  void parallel_for(int64_t n, int64_t grain, Task task, void* arg) {
    if (begin(n, grain, task, arg, true)) finish();
  }

  // False if the loop has been run. last: finish() follows at once.
  bool begin(int64_t n, int64_t grain, Task task, void* arg, bool last) {
    grain = std::max<int64_t>(grain, 1);
    if (in_loop) {
      run_inline(n, grain, task, arg);
      return false;
    }
    if (begun && count_.load(std::memory_order_relaxed) == kLoops) finish();
    if (n <= grain || threads() == 1 || (!begun && !owner_.try_lock())) {
      run_inline(n, grain, task, arg);
      return last && begun;
    }
    if (!begun) start_workers();
    const int at = begun ? count_.load(std::memory_order_relaxed) : 0;
    // Nobody looks at a loop before the count says that it is there.
    Loop& loop = loops_[at];
    loop.n = n;
    loop.grain = grain;
    loop.task = task;
    loop.arg = arg;
    loop.share(int64_t(workers_.size()) + 1);
    if (begun) {
      count_.store(at + 1, std::memory_order_release);
      if (last) more_.store(false, std::memory_order_release);
      return true;
    }
    // The gate is closed and nobody is inside.
    begun = true;
    count_.store(1, std::memory_order_relaxed);
    more_.store(!last, std::memory_order_relaxed);
    const int64_t pieces = last ? (n + grain - 1) / grain : INT64_MAX;
    const uint64_t places = uint64_t(std::min<int64_t>(pieces - 1, int64_t(workers_.size())));
    epoch_ = (epoch_ + 1) & kEpochMask;
    // seq_cst here and in sleep(): either we see the sleeper or the sleeper sees the open gate.
    gate_.store(kOpen | (epoch_ << kEpochShift) | (places << kPlaceShift), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    return true;
  }

  // For the thread that has begun loops.
  void finish() {
    more_.store(false, std::memory_order_release);
    int at = 0;
    while (work(at, 0)) {
    }
    // No more workers in; wait for those inside. Their pieces are claimed, so this is short unless the
    // system took their processor away.
    uint64_t gate = gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    const Clock::time_point start = Clock::now();
    for (int i = 0; (gate & kInsideMask) != 0; ++i) {
      if (i < 1000) {
        if (!fetch(caller_, 0)) relax();
      } else if (Clock::now() - start < std::chrono::milliseconds(1)) {
        sched_yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      gate = gate_.load(std::memory_order_acquire);
    }
    begun = false;
    owner_.unlock();
  }

 private:
  // The gate: open bit | epoch (31 bits) | places left (16 bits) | workers inside (16 bits).
  static constexpr uint64_t kOpen = 1ull << 63, kInsideMask = 0xffff, kPlaceMask = 0xffff,
                            kEpochMask = 0x7fffffff;
  static constexpr int kPlaceShift = 16, kEpochShift = 32;

  static uint64_t epoch_of(uint64_t gate) { return (gate >> kEpochShift) & kEpochMask; }
  static bool has_place(uint64_t gate) { return (gate & kOpen) && ((gate >> kPlaceShift) & kPlaceMask); }

  void start_workers() {
    while (int(workers_.size()) < threads() - 1) {
      try {
        const int index = int(workers_.size()) + 1;
        for (Loop& loop : loops_) {
          if (int(loop.lane.size()) <= index) loop.lane = std::vector<Lane>(size_t(threads()));
        }
        workers_.emplace_back([this, index] { worker(index); });
      } catch (const std::exception&) {
        // The system gives no more threads or memory: be content with what there is.
        size_.store(int(workers_.size()) + 1);
        return;
      }
    }
  }

  // Helps with the loops from number `at` on, as thread number `index`. True if it was one and there may be more.
  bool work(int& at, int index) {
    if (at >= count_.load(std::memory_order_acquire)) return false;
    in_loop = true;
    Loop& loop = loops_[at++];
    const int64_t n = loop.n, grain = loop.grain, lanes = loop.lanes, own = index % lanes;
    auto run = [&](int64_t lane, int64_t turn) {
      const int64_t begin = (turn * lanes + lane) * grain;
      loop.task(loop.arg, begin, std::min(begin + grain, n));
    };
    for (int64_t turn; (turn = loop.lane[own].first()) >= 0;) run(own, turn);
    for (int64_t i = 1; i < lanes; ++i) {
      const int64_t other = (own + i) % lanes;
      for (int64_t turn; (turn = loop.lane[other].last()) >= 0;) run(other, turn);
    }
    in_loop = false;
    return true;
  }

  // How far a thread has come with what it fetches.
  struct Fetched {
    const char* data = nullptr;
    size_t at = 0;
  };

  // Fetches a little of part number `index` of what is expected. False if there is nothing left to do.
  bool fetch(Fetched& done, int index) const {
    const char* data = soon_.load(std::memory_order_relaxed);
    if (data != done.data) done = {data, 0};
    const size_t part = soon_bytes_.load(std::memory_order_relaxed) / size_t(size_.load(std::memory_order_relaxed));
    if (!data || done.at >= std::min(part, kFetch)) return false;
    const char* from = data + part * size_t(index) + done.at;
    for (int i = 0; i < 256; i += 64) __builtin_prefetch(from + i, 0, 2);
    done.at += 256;
    return true;
  }

  void worker(int index) {
    uint64_t seen = 0; // epoch of the last loop this worker took part in or saw full
    Fetched fetched;
    while (!stop_.load(std::memory_order_relaxed)) {
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if (!has_place(gate) || epoch_of(gate) == seen) {
        wait(seen, fetched, index);
        continue;
      }
      const uint64_t inside = gate + 1 - (1ull << kPlaceShift);
      if (!gate_.compare_exchange_weak(gate, inside, std::memory_order_acq_rel)) continue;
      seen = epoch_of(gate);
      stay(fetched, index);
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  // A worker inside the gate: helps with all loops, and waits for those that are still to come.
  void stay(Fetched& fetched, int index) {
    int at = 0;
    for (int idle = 0;; ++idle) {
      // Asked first: loops that were begun before this was said are seen below.
      const bool more = more_.load(std::memory_order_acquire);
      while (work(at, index)) idle = 0;
      if (!more) return;
      if (!fetch(fetched, index)) relax();
      if (idle >= 1000) sched_yield();
    }
  }

  bool ready(uint64_t seen, std::memory_order order) const {
    const uint64_t gate = gate_.load(order);
    return has_place(gate) && epoch_of(gate) != seen;
  }

  void wait(uint64_t seen, Fetched& fetched, int index) {
    const Clock::time_point start = Clock::now();
    do {
      for (int i = 0; i < 64; ++i) {
        if (ready(seen, std::memory_order_relaxed)) return;
        if (!fetch(fetched, index)) relax();
      }
      sched_yield(); // somebody else may have better use for this processor
      if (stop_.load(std::memory_order_relaxed)) return;
    } while (Clock::now() - start < kSpin);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return ready(seen, std::memory_order_seq_cst) || stop_.load(); });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  std::mutex owner_; // held by the thread whose loop has the workers
  std::vector<std::thread> workers_;
  std::atomic<int> size_{0}; // 0: not asked for yet
  uint64_t epoch_ = 0;
  Fetched caller_; // of the thread that holds owner_

  // Pieces lane, lane + lanes, ... of a loop: those of one thread, which takes them in order. Who has none left takes
  // the last ones of others. So a thread that is not held up works on the same part of every matrix, and what it has
  // fetched ahead is what it needs.
  struct alignas(128) Lane {
    std::atomic<uint64_t> left{0}; // turns from the lower half up to the upper half
    static constexpr uint64_t kLow = 0xffffffff;

    int64_t first() {
      uint64_t now = left.load(std::memory_order_relaxed);
      do {
        if ((now & kLow) >= now >> 32) return -1;
      } while (!left.compare_exchange_weak(now, now + 1, std::memory_order_relaxed));
      return int64_t(now & kLow);
    }
    int64_t last() {
      uint64_t now = left.load(std::memory_order_relaxed);
      do {
        if ((now & kLow) >= now >> 32) return -1;
      } while (!left.compare_exchange_weak(now, now - (uint64_t(1) << 32), std::memory_order_relaxed));
      return int64_t(now >> 32) - 1;
    }
  };

  // The loops that are running; all but the lanes' turns written before the count says that they are there.
  struct Loop {
    int64_t n = 0, grain = 1, lanes = 1;
    Task task = nullptr;
    void* arg = nullptr;
    std::vector<Lane> lane{1};

    void share(int64_t threads) {
      const int64_t pieces = (n + grain - 1) / grain;
      lanes = std::min({pieces, threads, int64_t(lane.size())});
      for (int64_t i = 0; i < lanes; ++i) {
        lane[i].left.store(uint64_t((pieces - i + lanes - 1) / lanes) << 32, std::memory_order_relaxed);
      }
    }
  };
  static constexpr int kLoops = 8;
  Loop loops_[kLoops];
  std::atomic<int> count_{0};
  std::atomic<bool> more_{false}; // loops may still be added

  std::atomic<const char*> soon_{nullptr};
  std::atomic<size_t> soon_bytes_{0};
  alignas(128) std::atomic<uint64_t> gate_{0};
  alignas(128) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

std::atomic<Pool*> current{nullptr};

// The threads of the old pool do not exist in the child and its locks may be held for ever: leave it behind.
void after_fork_in_child() {
  current.store(nullptr);
  in_loop = begun = false;
}

Pool& pool() {
  Pool* p = current.load(std::memory_order_acquire);
  if (p) return *p;
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
  (void)registered;
  Pool* fresh = new Pool; // never deleted
  if (current.compare_exchange_strong(p, fresh)) return *fresh;
  delete fresh;
  return *p;
}

} // namespace

int threads() { return pool().threads(); }
void set_threads(int n) { pool().set_threads(n); }
void expect(const void* data, size_t bytes) { pool().expect(data, bytes); }
void parallel_for(int64_t n, int64_t grain, Task task, void* arg) { pool().parallel_for(n, grain, task, arg); }
void begin(int64_t n, int64_t grain, Task task, void* arg) { pool().begin(n, grain, task, arg, false); }
void finish() {
  if (begun && !in_loop) pool().finish();
}

} // namespace accel::pool
