// A few threads that share a loop with the thread that calls.
//
// The caller waits for nobody to begin: it takes pieces itself until none is left, then waits only
// for pieces that another one has taken. Helpers look for work for a moment before they sleep,
// because the next product of a layer is microseconds away.

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

// Multiplications below which threads are no help: to wake one takes as long, and on a small machine
// the processor that it would run on has the host's own work to do.
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
  // Of the process; its threads end with it.
  static Pool& shared() {
    static Pool* pool = new Pool();
    return *pool;
  }

  // How many threads work, the caller counted.
  int threads() const {
    return static_cast<int>(helpers_.size()) + 1;
  }

  void resize(int threads) {
    stop();
    for (int i = 1; i < threads; ++i) {
      helpers_.emplace_back([this] { help(); });
    }
  }

  // Call work(first, last) over pieces of [0, count) of `grain` each.
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
        std::this_thread::yield();  // a helper was put aside in the middle of its piece
      }
    }
  }

 private:
  struct Job {
    void (*call)(void*, int) = nullptr;
    void* what = nullptr;
  };

  // The number of a piece of this round, or -1 if all are taken. How many are left stands beside the
  // round, in one word: a helper that comes late must not judge one round by another one's pieces.
  int take(uint64_t round) {
    uint64_t seen = next_.load(std::memory_order_acquire);
    while (seen >> 32 == round) {
      const auto left = static_cast<uint32_t>(seen);
      if (left == 0) {
        return -1;
      }
      if (next_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) {
        // The round cannot end before this piece has, so the number of pieces is its own.
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
        // One by one: the caller's job ends with the last piece, and so does `job_`.
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

  void stop() {
    std::lock_guard<std::mutex> alone(callers_);
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
  std::mutex callers_;
  std::mutex bed_;
  std::condition_variable wake_;
  Job job_;
  // The round in the upper half, the pieces that are left in the lower one.
  std::atomic<uint64_t> next_{0};
  std::atomic<int> pieces_{0};
  std::atomic<int> done_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> ending_{false};
};

}  // namespace kvd
