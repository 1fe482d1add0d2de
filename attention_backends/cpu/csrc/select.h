// Which pages a query group reads: ranked by the share of attention they are estimated to hold, summed over the group's
// heads; as few as give every head of the group its coverage.
#pragma once
#include "gemm.h"
#include "score.h"

namespace KTX_NS {

// Pages that a query chooses from (first .. first + count), as SparseSettings.candidates; none where it reads everything.
static void candidates(const AttentionArgs& a, int row, int query, int* first, int* count) {
  const SparseArgs& s = *a.sparse;
  const int64_t size = a.layout->page_size, context = a.context[row], before = context + query - s.window;
  const int64_t last = before < 0 ? 0 : min_of(before / size, context / size);
  *first = min_of(s.sink_pages, context_pages(a, row));
  *count = last - s.sink_pages > s.min_pages ? int(last - s.sink_pages) : 0;
  if (s.select == kSelectCoverage && s.coverage >= 1) *count = 0;
}

// Most candidates that a selection takes.
KTX_INLINE int selection_cap(const AttentionArgs& a, int pages, int count) {
  const SparseArgs& s = *a.sparse;
  return min_of(count, s.ratio > 0 ? int(__builtin_ceil(double(s.ratio) * pages - 1e-3)) : s.max_pages);
}

constexpr int kBlockQueries = 64;  // queries of a prefill chunk that share one list of pages

// Log-masses of `count` candidate pages for `heads` vectors, rows `stride` apart; `shares` has the same shape.
struct Masses {
  float *log_mass, *shares, *rank;  // rank: [count]
  int count, heads;
  int64_t stride;                   // at least `count` rounded up to 16; what lies behind `count` is -inf
};

// exp(mass - peak) of `padded` log-masses, whole vectors. Returns the factor that makes shares of them, where `known` is
// the log-mass of what is read anyway; its share goes to *covered.
static float exponentials(const float* mass, int padded, float known, float* out, float* covered) {
  vf top = set1(known), sum = zero();
  for (int i = 0; i < padded; i += W) top = vmax(load(mass + i), top);
  float peak = hmax(top);
  if (!(peak > -3e38f && peak < 3e38f)) peak = 0;  // nothing finite to compare: all shares 0
  for (int i = 0; i < padded; i += W) {
    const vf e = vexp(load(mass + i) - set1(peak));
    const vf clean = select_nan(e, zero(), e);
    sum = sum + clean;
    store(out + i, clean);
  }
  const float own = known == kNegInf ? 0.f : __builtin_expf(known - peak), total = hsum(sum) + own;
  *covered = total > 0 ? own / total : 1.f;
  return total > 0 ? 1.f / total : 0.f;
}

// Shares of each head's total mass: fills shares and rank, and `covered`, by head, with the share of what is known.
static void share_masses(const Masses& m, const float* known, float* covered) {
  const int padded = (m.count + W - 1) / W * W;
  for (int i = 0; i < padded; i += W) store(m.rank + i, zero());
  for (int h = 0; h < m.heads; h++) {
    float* share = m.shares + h * m.stride;
    const vf inverse = set1(exponentials(m.log_mass + h * m.stride, padded, known[h], share, covered + h));
    for (int i = 0; i < padded; i += W) {
      const vf s = load(share + i) * inverse;
      store(share + i, s);
      store(m.rank + i, load(m.rank + i) + s);
    }
  }
}

// A bound that the k largest of x[0 .. count) reach and no others but equals of the k-th (all >= 0, 0 behind up to a
// multiple of W), 1 <= k <= count: bisection over bit patterns, which order as the numbers do.
static float kth_largest(const float* x, int count, int k) {
  int32_t low = 0, high = 0x7F7FFFFF;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    float bound;
    std::memcpy(&bound, &middle, 4);
    vf above = zero();
    for (int i = 0; i < count; i += W) above = above + select_lt(load(x + i), set1(bound), zero(), set1(1.f));
    const float found = hsum(above);
    if (found == float(k)) return bound;  // parts the k best from the rest as well as the k-th itself
    if (found > float(k)) low = middle;
    else high = middle - 1;
  }
  float found;
  std::memcpy(&found, &low, 4);
  return found;
}

// Indices of the k best ranks in ascending order, ties by the lower index; returns how many (k or all).
static int best(const float* rank, int count, int k, int32_t* out) {
  if (k >= count) {
    for (int i = 0; i < count; i++) out[i] = i;
    return count;
  }
  if (k <= 0) return 0;
  const float bound = kth_largest(rank, count, k);
  int above = 0;
  for (int i = 0; i < count; i++) above += rank[i] > bound;
  int n = 0, ties = k - above;
  for (int i = 0; i < count; i++)
    if (rank[i] > bound || (rank[i] == bound && ties-- > 0)) out[n++] = i;
  return n;
}

struct Ranked {
  float rank;
  int32_t index;
};
static int by_rank(const void* x, const void* y) {
  const Ranked &a = *static_cast<const Ranked*>(x), &b = *static_cast<const Ranked*>(y);
  if (a.rank != b.rank) return a.rank < b.rank ? 1 : -1;
  return a.index - b.index;
}
// The pages to read, ascending, into out (room for `most`); `covered` goes from the known share to the covered one.
static int choose(const Masses& m, int least, int most, float coverage, float* covered, int32_t* out, Ranked* scratch) {
  const int n = best(m.rank, m.count, min_of(most, m.count), out);
  for (int i = 0; i < n; i++) scratch[i] = {m.rank[out[i]], out[i]};
  std::qsort(scratch, n, sizeof(Ranked), by_rank);
  int taken = 0, kept = 0;
  const auto enough = [&] {
    for (int h = 0; h < m.heads; h++)
      if (!(covered[h] >= coverage)) return false;
    return true;
  };
  while (taken < n && (taken < least || !enough())) {
    const int page = scratch[taken++].index;
    for (int h = 0; h < m.heads; h++) covered[h] += m.shares[h * m.stride + page];
  }
  for (int i = 0; i < n && kept < taken; i++) {  // out is in order already: keep what ranks no lower than the last taken
    const Ranked mine{m.rank[out[i]], out[i]};
    if (by_rank(&mine, &scratch[taken - 1]) <= 0) out[kept++] = out[i];
  }
  return taken;
}

// How many of `count` candidates get their plane 0 read, at a depth of 0 to 1.
KTX_INLINE int probe_count(float depth, int count) {
  return min_of(count, int(__builtin_ceil(double(depth) * count - 1e-3)));
}

// Sums over pages of mean scores, their squares and the variances within pages.
struct Spread {
  vf sum = zero(), squares = zero(), within = zero();
  KTX_MEMBER void add(vf mean, vf variance) {
    sum = sum + mean;
    squares = fmadd(mean, mean, squares);
    within = within + variance;
  }
};

// The share of `count` candidates whose plane 0 is worth reading: the usual one where headers explain the scores, all
// where they leave a wide spread unexplained.
static float deepening(const SparseArgs& s, const Spread* spreads, int count, int heads) {
  float spread = 0, explained = 1;
  for (int h = 0; h < heads; h++) {
    const float mean = hsum(spreads[h].sum) / count;
    const float between = max_of(0.f, hsum(spreads[h].squares) / count - mean * mean);
    const float unexplained = hsum(spreads[h].within) / count, all = between + unexplained;
    spread += unexplained / heads;
    explained = min_of(explained, all > 0 ? between / all : 1.f);
  }
  const auto ramp = [](float x, float from, float to) {
    return to == from ? float(x >= to) : min_of(1.f, max_of(0.f, (x - from) / (to - from)));
  };
  const float bad = ramp(__builtin_sqrtf(spread), s.spread_low, s.spread_high) *
                    ramp(-explained, -s.explained_high, -s.explained_low);
  return s.share + (1 - s.share) * bad;
}

// Replaces header estimates by what plane 0 said of the pages in `list` (there in m.shares). What it found more than the
// headers of the same pages said, the other pages are taken to hide too: theirs are raised by that factor, head by head.
static void join_codes(const Masses& m, const int32_t* list, int n) {
  const int padded = (m.count + W - 1) / W * W;
  float* deep = m.rank;  // 1 where codes were read; ranks are made again from what comes out of this
  for (int i = 0; i < padded; i += W) store(deep + i, zero());
  for (int i = 0; i < n; i++) deep[list[i]] = 1;
  const auto log_sum = [&](const float* x) {
    const auto read = [&](int i) { return select_lt(zero(), load(deep + i), load(x + i), set1(kNegInf)); };
    vf top = set1(kNegInf), sum = zero();
    for (int i = 0; i < padded; i += W) top = vmax(read(i), top);
    const float base = hmax(top);
    for (int i = 0; i < padded; i += W) sum = sum + vexp(read(i) - set1(base));
    return base + __builtin_logf(hsum(sum));
  };
  for (int h = 0; h < m.heads; h++) {
    float *mass = m.log_mass + h * m.stride, *codes = m.shares + h * m.stride;
    const float more = log_sum(codes) - log_sum(mass), bias = more > 0 && more < 3e38f ? more : 0;
    for (int i = 0; i < padded; i += W)
      store(mass + i, select_lt(zero(), load(deep + i), load(codes + i), load(mass + i) + set1(bias)));
  }
}

// Hands the chosen candidates (indices from `first` on) out to the caller who asked for them.
static void hand_out(const SparseArgs& s, int64_t row, const int32_t* list, int count, int first) {
  if (!s.chosen) return;
  int32_t* to = s.chosen + row * s.chosen_stride;
  for (int64_t i = 0; i < s.chosen_stride; i++) to[i] = i < count ? list[i] + first : -1;
}

}  // namespace KTX_NS
