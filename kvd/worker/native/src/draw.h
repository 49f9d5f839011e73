// Draws the token of one row from its logits: filters, random numbers, and the Gumbel maximum.
//
// The rules are those of `kvd.worker.sampling.draws`. Random numbers are MLX's: Threefry-2x32 with
// 20 rounds (Salmon et al. 2011) over token ids, so the tokens are those of MLX's operations.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "elementwise.h"
#include "simd.h"

namespace kvd {

struct DrawSettings {
  float inverse;  // of the temperature; 0: greedy
  float least;    // logarithm of min-p; minus infinity: no limit
  float top_p;    // 1 or more: no limit
  float top_k;    // 0: no limit
};

struct Drawn {
  int32_t token;
  int32_t valid;  // whether the logits are finite (minus infinity is allowed) and not all equal
};

// The random numbers of a row with `size` tokens. One call of Threefry gives two words: for a token
// and for the token that is pairs() behind it.
class RandomPlaces {
 public:
  RandomPlaces(uint32_t key0, uint32_t key1, int64_t size)
      : keys_{key0, key1, key0 ^ key1 ^ 0x1BD11BDA}, size_(size), pairs_((size + 1) / 2) {}

  int64_t pairs() const {
    return pairs_;
  }

  // Numbers in [0, 1) of the places from `first` on and from `first + pairs()` on.
  void numbers(int64_t first, int64_t count, float* low, float* high) const {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t at = static_cast<uint32_t>(first + i);
      const int64_t other = first + i + pairs_;
      const std::array<uint32_t, 2> words = hash(at, static_cast<uint32_t>(other < size_ ? other : 0));
      low[i] = number(words[0]);
      high[i] = number(words[1]);
    }
  }

  float gumbel(int64_t place) const {
    const int64_t first = place < pairs_ ? place : place - pairs_;
    float low, high;
    numbers(first, 1, &low, &high);
    return gumbel_of(place < pairs_ ? low : high);
  }

  static float gumbel_of(float number) {
    return -std::log(-std::log(number));
  }

 private:
  std::array<uint32_t, 3> keys_;
  int64_t size_, pairs_;

  static float number(uint32_t word) {
    return std::min(static_cast<float>(word) * 0x1p-32f, 0x1.fffffep-1f);
  }

  std::array<uint32_t, 2> hash(uint32_t x, uint32_t y) const {
    x += keys_[0];
    y += keys_[1];
    round<13, 15, 26, 6>(x, y, 1);
    round<17, 29, 16, 24>(x, y, 2);
    round<13, 15, 26, 6>(x, y, 3);
    round<17, 29, 16, 24>(x, y, 4);
    round<13, 15, 26, 6>(x, y, 5);
    return {x, y};
  }

  template <int... By>
  void round(uint32_t& x, uint32_t& y, uint32_t number) const {
    ((x += y, y = (y << By | y >> (32 - By)) ^ x), ...);
    x += keys_[number % 3];
    y += keys_[(number + 1) % 3] + number;
  }
};

// Tokens by their distance to the most likely one, to find thresholds without sorting them all.
class Distances {
 public:
  // `logits`: the largest is `peak`; they are read later, too.
  Distances(const float* logits, int64_t size, float peak)
      : logits_(logits), size_(size), peak_(peak) {
    constexpr int64_t BLOCK = 256;
    float weights[BLOCK];
    int32_t bins[BLOCK];
    for (int64_t start = 0; start < size; start += BLOCK) {
      const int64_t count = std::min(BLOCK, size - start);
      for (int64_t i = 0; i < count; ++i) {
        weights[i] = logits[start + i] - peak;
        bins[i] = bin_of(weights[i]);
      }
      std::fill(weights + count, weights + BLOCK, 0.0f);
      for (int64_t i = 0; i < count; i += LANES) {
        store(weights + i, exp(load(weights + i)));
      }
      for (int64_t i = 0; i < count; ++i) {
        ++counts_[bins[i]];
        masses_[bins[i]] += weights[i];
      }
    }
  }

  // The threshold of top-p, as a logit less the peak. A token is left out if the probabilities of
  // those above it already reach `share`.
  float nucleus(float share) const {
    double total = 0.0, above = 0.0;
    for (double mass : masses_) {
      total += mass;
    }
    const double wanted = share * total;
    int bin = 0;
    for (int next = 0; next < BINS; ++next) {
      if (counts_[next]) {
        bin = next;
        if (above + masses_[next] >= wanted) {
          break;
        }
        above += masses_[next];
      }
    }
    float found = 0.0f;
    for (float shifted : sorted(bin)) {
      if (above >= wanted) {
        break;
      }
      found = shifted;
      above += std::exp(static_cast<double>(shifted));
    }
    return found;
  }

  struct Last {
    float shifted;
    int64_t equal;  // how many tokens with this logit belong to the largest ones
  };

  // The last of the `count` largest logits, less the peak. `count` is below the number of tokens.
  Last largest(int64_t count) const {
    int64_t before = 0;
    int bin = 0;
    while (before + counts_[bin] < count) {
      before += counts_[bin++];
    }
    const std::vector<float> values = sorted(bin);
    const float last = values[count - before - 1];
    const auto first = std::find(values.begin(), values.end(), last);
    return {last, count - before - (first - values.begin())};
  }

 private:
  static constexpr int BINS = 2048;
  static constexpr float PER_UNIT = 64.0f;  // so the last bin has all tokens below exp(-32)
  const float* logits_;
  int64_t size_;
  float peak_;
  std::array<int64_t, BINS> counts_{};
  std::array<double, BINS> masses_{};

  static int32_t bin_of(float shifted) {
    return static_cast<int32_t>(std::min(-shifted * PER_UNIT, BINS - 1.0f));
  }

  // The logits of a bin, less the peak, in descending order.
  std::vector<float> sorted(int bin) const {
    std::vector<float> found;
    const float from = static_cast<float>(bin);
    const float to = bin == BINS - 1 ? std::numeric_limits<float>::infinity() : from + 1.0f;
    for (int64_t start = 0; start < size_; start += LANES) {
      const int64_t end = std::min(start + LANES, size_);
      if (end - start == LANES) {
        const F8 place = (splat(peak_) - load(logits_ + start)) * splat(PER_UNIT);
        if (!any((place >= splat(from)) & (place <= splat(to)))) {
          continue;
        }
      }
      for (int64_t i = start; i < end; ++i) {
        if (bin_of(logits_[i] - peak_) == bin) {
          found.push_back(logits_[i] - peak_);
        }
      }
    }
    std::sort(found.begin(), found.end(), std::greater<float>());
    return found;
  }
};

// Logits of excluded tokens. Their score is that of a token whose random number is 0.
constexpr float EXCLUDED = -std::numeric_limits<float>::infinity();

// The best token so far; of equal ones the first.
struct Best {
  float score = -std::numeric_limits<float>::infinity();
  int64_t token = std::numeric_limits<int64_t>::max();

  void offer(float other, int64_t at) {
    if (other > score || (other == score && at < token)) {
      score = other;
      token = at;
    }
  }
};

// Offer neighboring tokens with their random numbers u, except those below `floor`. Tokens that
// cannot become the best are skipped: that takes -log(u) < exp(scaled - best), and 1 - u <= -log(u).
inline void offer_some(
    const float* logits, int64_t first, int64_t count, const float* numbers, float peak,
    float floor, float inverse, Best& best) {
  const auto score = [&](int64_t i) {
    const float shifted = logits[first + i] - peak;
    if (shifted >= floor && shifted > EXCLUDED) {
      best.offer(shifted * inverse + RandomPlaces::gumbel_of(numbers[i]), first + i);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const F8 scaled = (load(logits + first + i) - splat(peak)) * splat(inverse);
    const F8 bound = exp(scaled - splat(best.score)) * splat(1.001f);  // more than its error
    if (any(splat(1.0f) - load(numbers + i) < bound)) {
      for (int64_t lane = i; lane < i + LANES; ++lane) {
        score(lane);
      }
    }
  }
  for (; i < count; ++i) {
    score(i);
  }
}

// Offer all tokens whose logit, less the peak, is at least `floor`.
inline void offer_all(
    const float* logits, int64_t size, float peak, float floor, float inverse,
    const RandomPlaces& random, Best& best) {
  constexpr int64_t BLOCK = 256;
  float low[BLOCK], high[BLOCK];
  for (int64_t start = 0; start < random.pairs(); start += BLOCK) {
    const int64_t count = std::min(BLOCK, random.pairs() - start);
    random.numbers(start, count, low, high);
    offer_some(logits, start, count, low, peak, floor, inverse, best);
    const int64_t other = start + random.pairs();
    const int64_t others = std::min(count, size - other);
    offer_some(logits, other, others, high, peak, floor, inverse, best);
  }
}

// Offer the tokens that top-p and top-k leave, of those at or above `floor`.
inline void offer_largest(
    const float* logits, int64_t size, float peak, float floor, const DrawSettings& settings,
    const RandomPlaces& random, Best& best) {
  const Distances distances(logits, size, peak);
  if (settings.top_p < 1.0f) {
    floor = std::max(floor, distances.nucleus(settings.top_p));
  }
  Distances::Last last{-std::numeric_limits<float>::infinity(), size};
  const int64_t top_k = static_cast<int64_t>(settings.top_k);
  if (top_k > 0 && top_k < size) {
    last = distances.largest(top_k);
    floor = std::max(floor, last.shifted);
  }
  for (int64_t start = 0; start < size; start += LANES) {
    const int64_t end = std::min(start + LANES, size);
    if (end - start == LANES && !any(load(logits + start) - splat(peak) >= splat(floor))) {
      continue;
    }
    for (int64_t i = start; i < end; ++i) {
      const float shifted = logits[i] - peak;
      if (shifted == EXCLUDED || shifted < floor ||
          (shifted == last.shifted && last.equal-- <= 0)) {
        continue;
      }
      best.offer(shifted * settings.inverse + random.gumbel(i), i);
    }
  }
}

struct Extremes {
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
  bool broken = false;  // whether any logit is NaN
};

inline Extremes extremes_of(const float* x, int64_t size) {
  Extremes found;
  F8 low = splat(found.low), high = splat(found.high);
  I8 broken = low != low;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const F8 some = load(x + i);
    low = min(some, low);  // if `some` is NaN, the other stays
    high = max(some, high);
    broken |= some != some;
  }
  found.low = -greatest(-low);
  found.high = greatest(high);
  found.broken = any(broken);
  for (; i < size; ++i) {
    found.low = x[i] < found.low ? x[i] : found.low;
    found.high = x[i] > found.high ? x[i] : found.high;
    found.broken |= x[i] != x[i];
  }
  return found;
}

// The token of a row. `mask`: a bit for each token that may be drawn, or null. `room`: scratch for
// the masked logits. A row without any allowed token has token 0.
inline Drawn draw(
    const float* logits, const uint8_t* mask, int64_t size, const DrawSettings& settings,
    uint32_t key0, uint32_t key1, std::vector<float>& room) {
  constexpr float INFINITE = std::numeric_limits<float>::infinity();
  const auto [low, high, broken] = extremes_of(logits, size);
  Drawn found{0, !broken && high < INFINITE && high > -INFINITE && low < high};
  float peak = high;
  if (mask != nullptr) {
    room.resize(size);
    masked(logits, mask, size, room.data());
    logits = room.data();
    peak = extremes_of(logits, size).high;
  }
  if (broken || !(peak > -INFINITE && peak < INFINITE)) {
    return found;
  }
  const float* first = std::find(logits, logits + size, peak);
  Best best;
  if (settings.inverse == 0.0f) {
    found.token = static_cast<int32_t>(first - logits);
    return found;
  }
  const RandomPlaces random(key0, key1, size);
  best.offer(random.gumbel(first - logits), first - logits);  // first, so that most others are skipped
  if (settings.top_p < 1.0f || settings.top_k > 0.0f) {
    offer_largest(logits, size, peak, settings.least, settings, random, best);
  } else {
    offer_all(logits, size, peak, settings.least, settings.inverse, random, best);
  }
  found.token = static_cast<int32_t>(best.token);
  return found;
}

}  // namespace kvd
