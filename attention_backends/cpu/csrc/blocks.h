// Page choice for a block of prefill queries: one list per kv head, asked by every fourth query of each head.
// (Means of queries would be fewer, but lose the one page that a row copies from.) What is read anyway (window, sinks,
// fresh tokens before the block) is weighed by the headers' estimate, fresh tokens by a header made for each 64 of them.
#pragma once
#include "seal.h"
#include "select.h"
#include "tiles.h"

namespace KTX_NS {

constexpr int kSampleStep = 4;                                // one query of this many is asked
constexpr int kSamples = kBlockQueries / kSampleStep;         // of each head
constexpr int kBatch = 4, kBatches = kSamples / kBatch;       // samples that share each pass over plane 0
constexpr int kFreshPage = 64;                                // fresh tokens weighed as one page

struct BlockChoice {
  const AttentionArgs& a;
  const SparseArgs& s;
  const Layout& lay;
  const int row, kv_head, begin, end;
  const int heads, group, dim;
  const int pages;
  const int samples, rows, half;       // of the group; padded to whole blocks of the product; words of a header's half
  int first = 0, count = 0;            // candidates: none where everything is read
  int probed = 0;
  int64_t stride = 0;
  float* q = nullptr;                          // [kBatch] vectors
  float *asked = nullptr, *steps = nullptr;    // [rows][2 * half] words, [samples][2]: all samples folded
  float *tile = nullptr, *dots = nullptr;      // [2 * half][kStrip]: headers of kStrip pages; [2][rows][kStrip]
  float *known = nullptr, *covered = nullptr;  // [samples]
  Spread* spread = nullptr;                    // [samples]
  Masses masses{};

  BlockChoice(const AttentionArgs& args, int row_, int head, int from, int to)
      : a(args), s(*args.sparse), lay(*args.layout), row(row_), kv_head(head), begin(from), end(to),
        heads(lay.num_kv_heads), group(a.num_q_heads / heads), dim(lay.head_dim), pages(context_pages(args, row_)),
        samples(group * kSamples), rows((samples + kRows - 1) / kRows * kRows), half(dim / 2) {
    if (a.sparse && end - begin == kBlockQueries) candidates(a, row, begin, &first, &count);
    stride = (count + 15) / 16 * 16;
  }

  // Batch i of all heads' samples (kBatches a head), times the softmax scale.
  void load_batch(int i) {
    const int g = i / kBatches;
    with_dtype(a.dtype, [&](auto dt) {
      for (int m = 0; m < kBatch; m++) {
        const int token = begin + (i % kBatches * kBatch + m + 1) * kSampleStep - 1;
        const int64_t at = (a.cu_q[row] + token) * a.q_token_stride + int64_t(kv_head * group + g) * dim;
        float* to = q + m * kQueryStride;
        for (int c = 0; c < dim; c += W) store(to + c, load_as<dt.value>(a.q, at + c) * set1(a.scale));
      }
    });
  }

  void fold_samples() {
    alignas(64) int16_t words[2 * kMaxDim];
    for (int i = 0; i < group * kBatches; i++) {
      load_batch(i);
      for (int m = 0; m < kBatch; m++) {
        int16_t* to = reinterpret_cast<int16_t*>(asked + int64_t(i * kBatch + m) * 2 * half);
        fold_header_query(q + m * kQueryStride, dim, 1, words, steps + 2 * (i * kBatch + m));
        for (int c = 0; c < dim; c += W) {
          const int16_t* from = words + c / (2 * W) * 4 * W + c % (2 * W);
          std::memcpy(to + c, from, 2 * W), std::memcpy(to + dim + c, from + 2 * W, 2 * W);
        }
      }
    }
    std::memset(asked + int64_t(samples) * 2 * half, 0, sizeof(float) * (rows - samples) * 2 * half);
  }

  const uint8_t* header(int page) const {
    const int block = a.block_table[int64_t(row) * a.table_stride + page];
    return s.headers + int64_t(block) * s.header_stride + kv_head * lay.header_head_bytes;
  }

  // Up to kStrip headers as columns of the tile: int16 means, then squares of deviations. `ahead`: fetched meanwhile.
  void fill(const uint8_t* const* at, int n, const uint8_t* const* ahead, int num_ahead) const {
    alignas(64) int16_t words[8][2 * kMaxDim];
    const float* lines[8];
    const int columns = (n + W - 1) / W * W;
    for (int j = 0; j < columns; j += 8) {
      for (int i = 0; i < 8; i++) {
        const int8_t *mean = reinterpret_cast<const int8_t*>(at[min_of(j + i, n - 1)]), *deviation = mean + dim;
        if (j + i < num_ahead) prefetch_run(ahead[j + i], 2 * dim + 4);
        lines[i] = reinterpret_cast<const float*>(words[i]);
        for (int c = 0; c < dim; c += 2 * W) {
          const bool whole = c + 2 * W <= dim;
          istore(words[i] + c, whole ? load_s8_words(mean + c) : load_s8_half(mean + c));
        }
        for (int c = 0; c < dim; c += 2 * W) {
          const bool whole = c + 2 * W <= dim;
          istore(words[i] + dim + c, square_words(whole ? load_s8_words(deviation + c) : load_s8_half(deviation + c)));
        }
      }
      for (int word = 0; word < 2 * half; word += 8) transpose8(lines, word, tile + word * kStrip + j);
    }
  }

  // Estimates of `n` pages (at most kStrip) by all samples: f(sample, column, mean score, variance), by vector.
  template <class F>
  void score(const uint8_t* const* at, int n, const uint8_t* const* ahead, int num_ahead, F f) const {
    const int columns = (n + W - 1) / W * W;
    fill(at, n, ahead, num_ahead);
    float* part[2] = {dots, dots + int64_t(rows) * kStrip};
    for (int k = 0; k < 2; k++)
      multiply<MacWords, false>(asked + k * half, 2 * half, tile + k * half * kStrip, 0, half, part[k], kStrip, rows,
                                columns);
    alignas(64) float scale[2][kStrip] = {};
    for (int i = 0; i < n; i++) {
      uint16_t scales[2];
      std::memcpy(scales, at[i] + 2 * dim, 4);
      scale[0][i] = f16_to_f32(scales[0]), scale[1][i] = f16_to_f32(scales[1]) * f16_to_f32(scales[1]);
    }
    for (int r = 0; r < samples; r++)
      for (int i = 0; i < columns; i += W) {
        const auto number = [&](int k) KTX_LAMBDA {
          return to_float(iload(part[k] + r * kStrip + i)) * load(scale[k] + i) * set1(steps[2 * r + k]);
        };
        f(r, i, number(0), number(1));
      }
  }

  // A page of `tokens` keys that no header stands for -> its header.
  template <int DT>
  void weigh_keys(const void* keys, int64_t offset, int64_t step, int tokens, uint8_t* to, Workspace& ws) const {
    float* x = ws.get<float>(kSeal, int64_t(tokens + 2) * dim);
    gather_tokens<DT>(keys, offset, step, tokens, dim, x);
    make_header(x, tokens, dim, x + tokens * dim, to);
  }

  // Log-mass of what is read anyway: sinks, window, an open page and fresh tokens before the block.
  void weigh_known(Workspace& ws) {
    const int whole = a.context[row] / lay.page_size, sealed = min_of(first, whole) + max_of(0, whole - first - count);
    const int fresh = a.k ? (begin + kFreshPage - 1) / kFreshPage : 0, most = sealed + fresh + 1;
    const int64_t columns = (most + kStrip - 1) / kStrip * kStrip, bytes = 2 * dim + 4;
    const int64_t each = sizeof(void*) + sizeof(float) + bytes;
    char* memory = ws.get<char>(kSparseKnown, most * each + 4 * columns * samples);
    float* mass = reinterpret_cast<float*>(memory);
    const uint8_t** at = reinterpret_cast<const uint8_t**>(mass + columns * samples);
    float* log_tokens = reinterpret_cast<float*>(at + most);
    uint8_t* own = reinterpret_cast<uint8_t*>(log_tokens + most);
    int n = 0;
    const auto add = [&](const uint8_t* from, int tokens) {
      at[n] = from, log_tokens[n++] = __builtin_logf(float(tokens));
    };
    for (int p = 0; p < min_of(first, whole); p++) add(header(p), lay.page_size);
    for (int p = first + count; p < whole; p++) add(header(p), lay.page_size);
    with_dtype(a.dtype, [&](auto dt) {
      const auto make = [&](const void* keys, int64_t offset, int64_t step, int tokens) {
        weigh_keys<dt.value>(keys, offset, step, tokens, own, ws);
        add(own, tokens), own += bytes;
      };
      if (pages > whole) {
        const PageRef ref = page_at(a, row, whole);
        if (ref.plain) make(plain_keys(a, ref, kv_head), 0, dim, ref.tokens);  // always, but for dummy rows
      }
      const int64_t from = a.cu_q[row] * a.kv_token_stride + int64_t(kv_head) * dim;
      for (int t = 0; t < fresh * kFreshPage; t += kFreshPage)
        make(a.k, from + t * a.kv_token_stride, a.kv_token_stride, min_of(kFreshPage, begin - t));
    });
    for (int i = 0; i < n; i += kStrip) {
      const int some = min_of(kStrip, n - i), more = min_of(kStrip, n - i - some);
      score(at + i, some, at + i + some, more, [&](int r, int c, vf mean, vf variance) KTX_LAMBDA {
        alignas(64) float tokens[W] = {};
        for (int j = 0; j < min_of(W, some - c); j++) tokens[j] = log_tokens[i + c + j];
        const vf estimate = header_mass(mean, variance, load(tokens));
        store(mass + r * columns + i + c, first_lanes(some - c, estimate, set1(kNegInf)));
      });
    }
    for (int r = 0; r < samples; r++) {
      const float* own_mass = mass + r * columns;
      vf top = set1(kNegInf), sum = zero();
      for (int i = 0; i < n; i += W) top = vmax(load(own_mass + i), top);
      const float peak = hmax(top);
      for (int i = 0; i < n; i += W) sum = sum + vexp(load(own_mass + i) - set1(peak));
      known[r] = peak == kNegInf ? kNegInf : peak + __builtin_logf(hsum(sum));
    }
  }

  // Log-masses of the candidates from their headers, and what says how deep `cascade` has to look.
  void score_candidates() {
    const vf log_tokens = set1(__builtin_logf(float(lay.page_size)));
    const bool deepens = s.scoring == kScoreCascade;
    const uint8_t* at[2][kStrip];
    const auto locate = [&](int from, const uint8_t** to) {
      const int n = max_of(0, min_of(kStrip, count - from));
      for (int i = 0; i < n; i++) to[i] = header(first + from + i);
      return n;
    };
    int n = locate(0, at[0]);
    for (int i = 0, turn = 0; i < count; i += kStrip, turn ^= 1) {
      const int more = locate(i + kStrip, at[turn ^ 1]);
      score(at[turn], n, at[turn ^ 1], more, [&](int r, int c, vf mean, vf variance) KTX_LAMBDA {
        if (deepens) spread[r].add(first_lanes(n - c, mean, zero()), first_lanes(n - c, variance, zero()));
        const vf estimate = header_mass(mean, variance, log_tokens);
        store(masses.log_mass + r * stride + i + c, first_lanes(n - c, estimate, set1(kNegInf)));
      });
      n = more;
    }
    for (int r = 0; r < samples; r++)
      for (int i = (count + W - 1) / W * W; i < stride; i += W) store(masses.log_mass + r * stride + i, set1(kNegInf));
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

  // Means of the shares of a head's samples: the group's heads stand as rows 0 .. group of the shares.
  void average(float* scratch) {
    for (int i = 0; i < stride; i += W) store(masses.rank + i, zero());
    for (int g = 0; g < group; g++) {
      float *to = masses.shares + g * stride, sum = 0;
      for (int i = 0; i < stride; i += W) store(to + i, zero());
      for (int r = g * kSamples; r < (g + 1) * kSamples; r++) {
        const float* mass = masses.log_mass + r * stride;
        const vf part = set1(exponentials(mass, stride, known[r], scratch, covered + r) / kSamples);
        for (int i = 0; i < stride; i += W) store(to + i, fmadd(load(scratch + i), part, load(to + i)));
        sum += covered[r];
      }
      covered[g] = sum / kSamples;
      for (int i = 0; i < stride; i += W) store(masses.rank + i, load(masses.rank + i) + load(to + i));
    }
    masses.heads = group;
  }

  // Floats of what a choice keeps, laid out in `memory` unless that is null.
  int64_t lay_out(float* memory) {
    int64_t used = 0;
    const auto take = [&](int64_t floats) {
      float* p = memory ? memory + used : nullptr;
      used += (floats + 15) / 16 * 16;
      return p;
    };
    q = take(kBatch * kQueryStride);
    asked = take(int64_t(rows) * 2 * half), steps = take(2 * samples);
    tile = take(int64_t(2) * half * kStrip), dots = take(int64_t(2) * rows * kStrip);
    known = take(samples), covered = take(samples);
    spread = reinterpret_cast<Spread*>(take(samples * int64_t(sizeof(Spread) / sizeof(float))));
    masses.rank = take(stride), masses.log_mass = take(samples * stride);
    masses.shares = take((s.scoring == kScoreHeader ? group : samples) * stride);
    return used;
  }

  // Estimates by headers, in `memory` [lay_out()]; then the pages whose plane 0 is worth reading, ascending, into probes:
  // how many.
  int estimate(float* memory, int32_t* probes, Workspace& ws) {
    lay_out(memory);
    masses.count = count, masses.heads = samples, masses.stride = stride;
    for (int r = 0; r < samples; r++) spread[r] = Spread{};
    fold_samples();
    weigh_known(ws);
    score_candidates();
    if (s.scoring == kScoreHeader) return 0;
    const float depth = s.scoring == kScoreCodes ? 1.f : deepening(s, spread, count, samples);
    share_masses(masses, known, covered);
    return probed = best(masses.rank, count, probe_count(depth, count), probes);
  }

  // The pages to read, ascending, into list (room for the row's pages), after the probes: how many. `list + first` may be
  // `probes`.
  int choose_into(int32_t* list, const int32_t* probes, Workspace& ws) {
    if (s.scoring != kScoreHeader) join_codes(masses, probes, probed);
    average(ws.get<float>(kDecodeScores, stride));
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
      if (s.depth) s.depth[t * heads + kv_head] = probed ? float(probed) / count : 0.f;
    }
  }
};

// The pages of its context that a block's queries read, ascending: how many.
static int block_pages(BlockChoice& choice, int32_t* list, Workspace& ws) {
  if (choice.count == 0) return choice.take_all(list);
  int32_t* probes = list + choice.first;
  const int probed = choice.estimate(ws.get<float>(kSparseBlock, choice.lay_out(nullptr)), probes, ws);
  choice.probe(probes, 0, probed, ws);
  return choice.choose_into(list, probes, ws);
}

}  // namespace KTX_NS
