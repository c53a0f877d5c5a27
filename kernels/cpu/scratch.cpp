#include "scratch.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace accel {

Scratch& Scratch::local() {
  thread_local Scratch arena;
  return arena;
}

Scratch::~Scratch() { release(); }

void* Scratch::take(size_t bytes) noexcept {
  if (bytes > SIZE_MAX / 2) return nullptr;
  bytes = (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
  if (chunks_.empty() || chunks_.back().size - chunks_.back().used < bytes) {
    // A chunk never moves, since blocks in it are in use. Several chunks become one at the next call.
    const size_t size = std::max({bytes, chunks_.empty() ? wanted_ : 0, size_t(64) << 10});
    void* data = nullptr;
    if (posix_memalign(&data, 4096, size) != 0) return nullptr;
    try {
      chunks_.push_back({static_cast<char*>(data), size, 0});
    } catch (const std::bad_alloc&) {
      std::free(data);
      return nullptr;
    }
    held_ += size;
  }
  Chunk& chunk = chunks_.back();
  void* block = chunk.data + chunk.used;
  chunk.used += bytes;
  return block;
}

void Scratch::reset() noexcept {
  if (held_ > kKeep) {
    release();
    wanted_ = 0;
  } else if (chunks_.size() > 1) {
    wanted_ = held_;
    release();
  } else if (!chunks_.empty()) {
    chunks_.front().used = 0;
  }
}

void Scratch::release() noexcept {
  for (Chunk& chunk : chunks_) std::free(chunk.data);
  chunks_.clear();
  held_ = 0;
}

} // namespace accel
