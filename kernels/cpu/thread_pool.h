/* The one thread pool that all kernels share.
 *
 * parallel_for(n, grain, task, arg) runs task over [0, n) in pieces that start at multiples of grain, on the
 * calling thread and on the pool's workers, and returns when all pieces are done. One loop at a time has the
 * workers: a nested loop, or a loop started while another thread's loop is running, runs on its caller alone,
 * in the same pieces. So no call ever waits for another one, and results depend on the pieces only.
 *
 * Of T threads, number t (the caller is number 0) takes pieces t, t + T, ... in this order, and then the last ones of
 * threads that are not through. A kernel that wants a thread to read on where it was, in loop after loop, numbers its
 * pieces so.
 *
 * Workers start with the first loop. Between loops they spin for some microseconds and then sleep. A forked
 * child gets a new pool. The pool is never destroyed: threads end with the process. */
#pragma once

#include <cstddef>
#include <cstdint>

namespace accel::pool {

using Task = void (*)(void* arg, int64_t begin, int64_t end);

/* Threads a loop may use, the caller's own included. */
int threads();

/* Changes that number (at least 1; 0 asks for the default); waits for the loop that is running. */
void set_threads(int n);

void parallel_for(int64_t n, int64_t grain, Task task, void* arg);

/* Loops of one thread that do not depend on each other, as one: begin() hands a loop to the workers and returns,
 * finish() returns when all loops begun by this thread are done. Between the two the caller makes the next loop
 * ready, and threads that are through with one go on to the next without waiting for the others. A parallel_for in
 * between is one of them, and finishes all. `arg` must live until then.
 *
 * A loop that has no claim on the workers (see above) has been run when begin() returns. */
void begin(int64_t n, int64_t grain, Task task, void* arg);
void finish();

/* What a later loop is going to read, front to back. Threads that have to wait anyway, for a loop to begin or for the
 * others to finish, fetch the beginning of their part of it into their caches. A hint and nothing else: it is never
 * dereferenced and may be wrong or out of date. */
void expect(const void* data, size_t bytes);

/* parallel_for with any callable (begin, end). */
template <typename F>
void for_range(int64_t n, int64_t grain, F&& body) {
  parallel_for(n, grain, [](void* f, int64_t b, int64_t e) { (*static_cast<F*>(f))(b, e); }, &body);
}

} // namespace accel::pool
