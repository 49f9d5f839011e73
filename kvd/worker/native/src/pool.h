// A few threads that share a loop with the calling thread.
//
// The caller does not wait for helpers to begin: it takes pieces itself until none is left, then
// waits only for pieces that helpers have taken. Helpers poll for work briefly before they sleep,
// because the next product of a layer follows within microseconds.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvd {

// Multiplications below which threads do not help: waking one takes as long, and on a small machine
// its processor is busy with the host's own work.
constexpr int64_t SHARED_WORK = 4'000'000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // The process's pool; its threads end with the process.
  static Pool& shared() {
    static Pool* pool = new Pool();
    return *pool;
  }

  // Number of working threads, including the caller.
  int threads() {
    std::lock_guard<std::mutex> alone(callers_);
    return static_cast<int>(helpers_.size()) + 1;
  }

  // Use so many threads; waits for the end of a loop that runs.
  void resize(int threads) {
    std::lock_guard<std::mutex> alone(callers_);
    stop();
    for (int i = 1; i < threads; ++i) {
      helpers_.emplace_back([this] { help(); });
    }
  }

  // Call work(first, last) over pieces of [0, count), `grain` each.
  template <typename Work>
  void share(int count, int grain, Work&& work) {
    std::lock_guard<std::mutex> alone(callers_);
    if (helpers_.empty() || count <= grain) {
      work(0, count);
      return;
    }
    const int pieces = (count + grain - 1) / grain;
    auto piece = [&](int i) { work(i * grain, std::min(count, (i + 1) * grain)); };
    job_ = {[](void* f, int i) { (*static_cast<decltype(piece)*>(f))(i); }, &piece};
    done_.store(0, std::memory_order_relaxed);
    const uint64_t round = (next_.load(std::memory_order_relaxed) >> 32) + 1;
    pieces_.store(pieces, std::memory_order_relaxed);
    next_.store(round << 32 | static_cast<uint32_t>(pieces), std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(bed_);
      wake_.notify_all();
    }
    int mine = take(round);
    int finished = 0;
    for (; mine >= 0; mine = take(round)) {
      piece(mine);
      ++finished;
    }
    done_.fetch_add(finished, std::memory_order_acq_rel);
    for (int spins = 0; done_.load(std::memory_order_acquire) != pieces; ++spins) {
      if (spins < 2000) {
        pause();
      } else {
        std::this_thread::yield();  // a helper was preempted during its piece
      }
    }
  }

 private:
  struct Job {
    void (*call)(void*, int) = nullptr;
    void* what = nullptr;
  };

  // The number of a piece of this round, or -1 if all are taken. One word holds the round and the
  // pieces left, so that a late helper never applies one round's count to another round.
  int take(uint64_t round) {
    uint64_t seen = next_.load(std::memory_order_acquire);
    while (seen >> 32 == round) {
      const auto left = static_cast<uint32_t>(seen);
      if (left == 0) {
        return -1;
      }
      if (next_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
        // The round cannot end before this piece does, so the number of pieces belongs to it.
        return pieces_.load(std::memory_order_relaxed) - static_cast<int>(left);
      }
    }
    return -1;
  }

  void help() {
    uint64_t last = next_.load(std::memory_order_acquire) >> 32;
    while (wait(last)) {
      last = next_.load(std::memory_order_acquire) >> 32;
      int finished = 0;
      for (int piece = take(last); piece >= 0; piece = take(last)) {
        job_.call(job_.what, piece);
        // Count down one by one: the caller's job, and with it `job_`, ends with the last piece.
        done_.fetch_add(1, std::memory_order_acq_rel);
        ++finished;
      }
    }
  }

  bool wait(uint64_t last) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
    do {
      for (int i = 0; i < 64; ++i) {
        if (next_.load(std::memory_order_acquire) >> 32 != last) {
          return !ending_.load();
        }
        pause();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(bed_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] {
      return ending_.load() || next_.load(std::memory_order_seq_cst) >> 32 != last;
    });
    asleep_.fetch_sub(1);
    return !ending_.load();
  }

  // The caller holds `callers_`.
  void stop() {
    ending_.store(true);
    next_.store(((next_.load() >> 32) + 1) << 32);
    {
      std::lock_guard<std::mutex> lock(bed_);
      wake_.notify_all();
    }
    for (auto& helper : helpers_) {
      helper.join();
    }
    helpers_.clear();
    ending_.store(false);
  }

  static constexpr int SPIN_US = 50;

  std::vector<std::thread> helpers_;
  // Held during a loop, and while the number of threads is read or changed.
  std::mutex callers_;
  std::mutex bed_;
  std::condition_variable wake_;
  Job job_;
  // The round in the upper half, the remaining pieces in the lower half.
  std::atomic<uint64_t> next_{0};
  std::atomic<int> pieces_{0};
  std::atomic<int> done_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> ending_{false};
};

// Call work(first, last) over parts of [0, rows), each row by itself: norms, RoPE, gates. Rows are
// shared from 16,384 elements on: helpers are usually awake, from the product before.
template <typename Work>
inline void share_rows(int64_t rows, int64_t size, Work&& work) {
  constexpr int64_t SHARED_ELEMENTS = 1 << 14;
  if (rows * size < SHARED_ELEMENTS) {
    work(int64_t{0}, rows);
    return;
  }
  const int64_t grain = std::max<int64_t>(SHARED_ELEMENTS / 4 / size, (rows + 15) / 16);
  Pool::shared().share(
      static_cast<int>(rows), static_cast<int>(std::max<int64_t>(1, grain)),
      [&](int first, int last) { work(int64_t{first}, int64_t{last}); });
}

}  // namespace kvd
