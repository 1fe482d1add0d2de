// Page choice for a block of prefill queries: one list per kv head, asked by every fourth query of each head.
// (Means of queries would be fewer, but lose the one page that a row copies from.) What is read anyway (window, sinks, fresh
// tokens before the block) is weighed by the headers' estimate.
#pragma once
#include "select.h"

namespace KTX_NS {

constexpr int kSampleStep = 4;                                // one query of this many is asked
constexpr int kSamples = kBlockQueries / kSampleStep;         // of each head
constexpr int kBatch = 4, kBatches = kSamples / kBatch;       // samples that share each pass over the headers
constexpr int kFreshPage = 64;                                // fresh tokens weighed as one page

struct BlockChoice {
  const AttentionArgs& a;
  const SparseArgs& s;
  const Layout& lay;
  const int row, kv_head, begin, end;
  const int heads, group, dim;
  const int pages;
  int first = 0, count = 0;            // candidates: none where everything is read
  int64_t stride = 0;
  float *q = nullptr, *squares = nullptr;      // [kBatch] vectors
  int16_t* words = nullptr;                    // the same as scan_headers takes them
  float steps[2 * kBatch];
  float *known = nullptr, *covered = nullptr;  // [group][kSamples]
  Masses masses{};

  BlockChoice(const AttentionArgs& args, int row_, int head, int from, int to)
      : a(args), s(*args.sparse), lay(*args.layout), row(row_), kv_head(head), begin(from), end(to),
        heads(lay.num_kv_heads), group(a.num_q_heads / heads), dim(lay.head_dim), pages(context_pages(args, row_)) {
    if (a.sparse && end - begin == kBlockQueries) candidates(a, row, begin, &first, &count);
  }

  // Batch i of all heads' samples (kBatches a head), times the softmax scale, and their squares.
  void load_batch(int i) {
    const int g = i / kBatches;
    with_dtype(a.dtype, [&](auto dt) {
      for (int m = 0; m < kBatch; m++) {
        const int token = begin + (i % kBatches * kBatch + m + 1) * kSampleStep - 1;
        const int64_t at = (a.cu_q[row] + token) * a.q_token_stride + int64_t(kv_head * group + g) * dim;
        for (int c = 0; c < dim; c += W) {
          const vf x = load_as<dt.value>(a.q, at + c) * set1(a.scale);
          store(q + m * kQueryStride + c, x);
          store(squares + m * kQueryStride + c, x * x);
        }
      }
    });
    for (int m = 0; m < kBatch; m++)
      fold_header_query(q + m * kQueryStride, dim, words + 2 * m * header_width(dim), steps + 2 * m);
  }

  const uint8_t* header(int page) const {
    const int block = a.block_table[int64_t(row) * a.table_stride + page];
    return s.headers + int64_t(block) * s.header_stride + kv_head * lay.header_head_bytes;
  }

  static void join_mass(float* known, float mass) {
    const float top = max_of(*known, mass);
    if (top > kNegInf) *known = top + __builtin_logf(__builtin_expf(*known - top) + __builtin_expf(mass - top));
  }

  void add_headers(int from, int to, float* sums) const {
    constexpr int kSome = 64;
    alignas(64) float mean[kBatch * kSome], variance[kBatch * kSome];
    for (; from < to; from += kSome) {
      const int n = min_of(kSome, to - from);
      scan_headers<kBatch>([&](int i) { return header(from + i); }, 0, n, n, dim, words, steps, mean, variance, kSome);
      for (int m = 0; m < kBatch; m++)
        for (int i = 0; i < n; i++) add_mass(mean[m * kSome + i], variance[m * kSome + i], lay.page_size, sums + m);
    }
  }

  static void add_mass(float mean, float variance, int tokens, float* known) {
    alignas(64) float out[W];
    store(out, header_mass(set1(mean), set1(variance), __builtin_logf(float(tokens))));
    join_mass(known, out[0]);
  }

  // Keys `rows` of `stride` elements, weighed by their exact mean and deviation.
  template <int DT>
  void add_keys(const void* keys, int64_t offset, int64_t step, int tokens, float* sums) const {
    float a_sum[kBatch] = {}, v_sum[kBatch] = {};
    for (int c = 0; c < dim; c += W) {
      vf sum = zero();
      for (int t = 0; t < tokens; t++) sum = sum + load_as<DT>(keys, offset + t * step + c);
      const vf mean = sum * set1(1.f / tokens);
      vf squares_sum = zero();
      for (int t = 0; t < tokens; t++) {
        const vf x = load_as<DT>(keys, offset + t * step + c) - mean;
        squares_sum = fmadd(x, x, squares_sum);
      }
      for (int m = 0; m < kBatch; m++) {
        a_sum[m] += hsum(mean * load(q + m * kQueryStride + c));
        v_sum[m] += hsum(squares_sum * load(squares + m * kQueryStride + c)) / tokens;
      }
    }
    for (int m = 0; m < kBatch; m++) add_mass(a_sum[m], v_sum[m], tokens, sums + m);
  }

  void weigh_known(float* sums) const {
    const int whole = a.context[row] / lay.page_size;
    for (int m = 0; m < kBatch; m++) sums[m] = kNegInf;
    add_headers(0, min_of(first, whole), sums);
    add_headers(first + count, whole, sums);
    with_dtype(a.dtype, [&](auto dt) {
      if (pages > whole) {
        const PageRef ref = page_at(a, row, whole);
        if (ref.plain)  // always, but for dummy rows
          add_keys<dt.value>(plain_keys(a, ref, kv_head), 0, dim, ref.tokens, sums);
      }
      const int64_t at = a.cu_q[row] * a.kv_token_stride + int64_t(kv_head) * dim;
      for (int t = 0; a.k && t < begin; t += kFreshPage)
        add_keys<dt.value>(a.k, at + t * a.kv_token_stride, a.kv_token_stride, min_of(kFreshPage, begin - t), sums);
    });
  }

  void score_candidates(int g) {
    const int64_t at = g * kBatch * stride;
    scan_headers<kBatch>([&](int i) { return header(first + i); }, 0, count, count, dim, words, steps,
                         masses.log_mass + at, masses.shares + at, stride);
  }

  void estimate_masses() {
    const float log_tokens = __builtin_logf(float(lay.page_size));
    for (int r = 0; r < masses.heads; r++) {
      float *mass = masses.log_mass + r * stride, *variance = masses.shares + r * stride;
      for (int i = 0; i < stride; i += W) {
        const vf estimate = header_mass(load(mass + i), load(variance + i), log_tokens);
        store(mass + i, i < count ? first_lanes(count - i, estimate, set1(kNegInf)) : set1(kNegInf));
      }
    }
  }

  // Plane 0 of probes[from .. to) takes the place of their shares.
  void probe(const int32_t* probes, int from, int to, Workspace& ws) {
    float* scratch = ws.get<float>(kDecodeScores, kBatch * kQueryStride);
    const auto page = [&](int i) { return head_page(lay, scoring_page(a, row, first + probes[i]), kv_head); };
    for (int g = 0; from < to && g < group * kBatches; g++) {
      load_batch(g);
      for (int i = from; i < to; i++) {
        alignas(64) float mass[W];
        score_plane0<kBatch>(lay, page(i), page(min_of(i + 2, to - 1)).plane0, q, scratch, mass);
        for (int m = 0; m < kBatch; m++) masses.shares[(g * kBatch + m) * stride + probes[i]] = mass[m];
      }
    }
  }

  // Shares of a head's samples -> their mean, so that the group's heads stand as rows 0 .. group.
  void average() {
    for (int g = 0; g < group; g++) {
      float* to = masses.shares + g * stride;
      for (int i = 0; i < stride; i += W) {
        vf sum = zero();
        for (int m = 0; m < kSamples; m++) sum = sum + load(masses.shares + (g * kSamples + m) * stride + i);
        store(to + i, sum * set1(1.f / kSamples));
      }
      float sum = 0;
      for (int m = 0; m < kSamples; m++) sum += covered[g * kSamples + m];
      covered[g] = sum / kSamples;
    }
    masses.heads = group;
  }

  int64_t memory_floats() const {
    const int64_t samples = group * kSamples;
    return 3 * kBatch * kQueryStride + 2 * samples + (2 * samples + 1) * ((count + 15) / 16 * 16);
  }

  // Estimates by headers, in `memory` [memory_floats()]; then the pages whose plane 0 is worth reading, ascending, into
  // probes: how many.
  int estimate(float* memory, int32_t* probes) {
    stride = (count + 15) / 16 * 16;
    q = memory, squares = q + kBatch * kQueryStride;
    words = reinterpret_cast<int16_t*>(squares + kBatch * kQueryStride);
    masses.log_mass = squares + 2 * kBatch * kQueryStride;
    masses.shares = masses.log_mass + group * kSamples * stride;
    masses.rank = masses.shares + group * kSamples * stride;
    known = masses.rank + stride, covered = known + group * kSamples;
    masses.count = count, masses.heads = group * kSamples, masses.stride = stride;
    for (int i = 0; i < group * kBatches; i++) {
      load_batch(i);
      weigh_known(known + i * kBatch);
      score_candidates(i);
    }
    const float depth = s.scoring == kScoreCodes ? 1.f
                        : deepening(s, masses.log_mass, masses.shares, count, masses.heads, stride);
    estimate_masses();
    if (s.scoring == kScoreHeader) return 0;
    share_masses(masses, known, covered);
    return best(masses.rank, count, probe_count(depth, count), probes);
  }

  // The pages to read, ascending, into list (room for the row's pages), after `probed` probes: how many. `list + first`
  // may be `probes`.
  int choose_into(int32_t* list, const int32_t* probes, int probed, Workspace& ws) {
    if (s.scoring != kScoreHeader) join_codes(masses, probes, probed);
    share_masses(masses, known, covered);
    average();
    const int most = selection_cap(a, pages, count);
    const bool fixed = s.select != kSelectCoverage;
    int32_t* chosen = list + first;
    int n = choose(masses, fixed ? most : s.min_pages, most, fixed ? 2.f : s.coverage, covered, chosen,
                   ws.get<Ranked>(kSparseRanked, most + 1));
    hand_out(s, int64_t(a.cu_q[row] + begin) * heads + kv_head, chosen, n, first);
    for (int p = 0; p < first; p++) list[p] = p;
    for (int i = 0; i < n; i++) chosen[i] += first;
    n += first;
    for (int p = first + count; p < pages; p++) list[n++] = p;
    report(n);
    return n;
  }

  // All pages, where nothing is left out: how many.
  int take_all(int32_t* list) const {
    for (int p = 0; p < pages; p++) list[p] = p;
    if (a.sparse) report(pages);
    return pages;
  }

  void report(int n) const {
    float lost = 0;
    for (int g = 0; covered && g < group; g++) lost += max_of(0.f, 1 - covered[g]) / group;
    for (int64_t t = a.cu_q[row] + begin; t < a.cu_q[row] + end; t++) {
      if (s.dropped) s.dropped[t * heads + kv_head] = lost;
      if (s.pages_read) s.pages_read[t * heads + kv_head] = n;
    }
  }
};

// The pages of its context that a block's queries read, ascending: how many.
static int block_pages(BlockChoice& choice, int32_t* list, Workspace& ws) {
  if (choice.count == 0) return choice.take_all(list);
  int32_t* probes = list + choice.first;
  const int probed = choice.estimate(ws.get<float>(kSparseBlock, choice.memory_floats()), probes);
  choice.probe(probes, 0, probed, ws);
  return choice.choose_into(list, probes, probed, ws);
}

}  // namespace KTX_NS
