/* Temporary memory of one kernel call.
 *
 * Every thread keeps one arena between calls, so that a call finds memory whose pages are already mapped. Blocks
 * are 64-byte aligned and live until the Scope that was open when they were asked for ends. What exceeds
 * kKeep bytes is given back then. */
#pragma once

#include <cstddef>
#include <vector>

namespace accel {

class Scratch {
 public:
  static constexpr size_t kAlign = 64, kKeep = size_t(64) << 20;

  /* The calling thread's arena. */
  static Scratch& local();

  /* NULL if there is no memory. Zero bytes give a valid, distinct pointer. */
  void* take(size_t bytes) noexcept;

  /* Ends the life of all blocks. */
  void reset() noexcept;

  /* Ends the life of the blocks taken since a mark. */
  struct Mark {
    size_t chunks, used;
  };
  Mark mark() const { return {chunks_.size(), chunks_.empty() ? 0 : chunks_.back().used}; }
  void rewind(Mark m) noexcept {
    if (!chunks_.empty()) chunks_.back().used = chunks_.size() == m.chunks ? m.used : 0;
  }

  /* Bytes the arena holds. */
  size_t held() const { return held_; }

  struct Scope {
    ~Scope() { local().reset(); }
  };

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch();

 private:
  struct Chunk {
    char* data;
    size_t size, used;
  };
  void release() noexcept;

  std::vector<Chunk> chunks_;
  size_t held_ = 0, wanted_ = 0;
};

} // namespace accel
