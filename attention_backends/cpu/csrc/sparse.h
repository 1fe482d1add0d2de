// Sparse attention of single queries (decode rows, short rows, the last block of a prefill chunk): sinks, window and fresh
// tokens always, of the pages between them those that seem to hold the most mass. In phases, each spread over all threads:
//
//   0 fold the queries for scanning                                3 score those by plane 0
//   1 scan the candidates' headers; attend what is always read     4 rank again, choose
//   2 rank; pick the pages whose plane 0 is worth reading          5 attend the chosen pages; 6 join
//
// Splits and ranks of a query never depend on the batch or the number of threads, so neither does its result.
// Included by kernels.inc, behind attend_vectors and finish.
#pragma once
#include "select.h"
#include "waves.h"

namespace KTX_NS {

constexpr int kScanPages = 128;    // candidates of one scanning task
constexpr int kProbePages = 32;    // pages of one plane-0 task
constexpr int kFreshLeast = 16, kFreshTokens = 2048;  // fresh tokens worth a pass of their own; of one split of it
constexpr int64_t kWaveBytes = 64 << 20;  // estimates held at once

// One query token and its candidates.
struct Unit {
  int32_t row, query, first, count;   // candidates: pages first .. first + count
  int32_t pages, reserved;            // of the row's context
  int64_t stride;                     // count rounded up
  int16_t* words;                     // [num_q_heads] x 2 header_width: queries as scan_headers takes them
  float* steps;                       // [num_q_heads][2]
  float *mean, *variance;             // [num_q_heads][stride]: header scores; then log-mass and shares
  float* rank;                        // [num_kv_heads][stride]
  int32_t* list;                      // [num_kv_heads][stride]: pages to probe, then pages to read (candidate indices)
  int32_t* length;                    // [num_kv_heads]
  float *known, *covered;             // [num_q_heads]: log-mass of what is always read; share covered
  float* partials;                    // [num_kv_heads][lead + most][group][partial stride]
  int32_t fresh, lead, splits;        // splits of fresh tokens; those and of always-read pages; room for splits
};

struct SparseTask {
  int32_t unit, kv_head, begin, end, kind;
};

struct SparsePlan {
  const AttentionArgs& a;
  const SparseArgs& s;
  Waves& waves;
  const Layout& lay = *a.layout;
  const int heads = lay.num_kv_heads, group = a.num_q_heads / heads, dim = lay.head_dim, size = lay.page_size;
  const int stride = partial_stride(lay.head_dim);
  Unit* units = nullptr;
  int num_units = 0;
  SparseTask* tasks = nullptr;
  int num_tasks = 0;
  int wave_begin = 0, wave_end = 0;  // tasks

  int most(int pages, int count) const { return selection_cap(a, pages, count); }
  int always_pages(const Unit& u) const { return u.pages - u.count; }
  int always_page(const Unit& u, int i) const { return i < u.first ? i : i + u.count; }
  float* split(const Unit& u, int kv_head, int i) const {
    return u.partials + (int64_t(kv_head) * u.splits + i) * group * stride;
  }

  // Bytes that a unit's estimates take; `memory` null: only counts.
  int64_t lay_out(Unit& u, char* memory) const {
    u.stride = (u.count + 15) / 16 * 16;
    u.fresh = a.k && u.query >= kFreshLeast ? u.query / kFreshTokens + 1 : 0;
    u.lead = u.fresh + (always_pages(u) + kSplitPages - 1) / kSplitPages;
    u.splits = u.lead + (most(u.pages, u.count) + kSplitPages - 1) / kSplitPages;
    int64_t used = 0;
    const auto take = [&](int64_t bytes) {
      char* p = memory ? memory + used : nullptr;
      used += (bytes + 63) / 64 * 64;
      return p;
    };
    u.words = reinterpret_cast<int16_t*>(take(4 * int64_t(header_width(dim)) * a.num_q_heads));
    u.steps = reinterpret_cast<float*>(take(8 * a.num_q_heads));
    u.mean = reinterpret_cast<float*>(take(4 * u.stride * a.num_q_heads));
    u.variance = reinterpret_cast<float*>(take(4 * u.stride * a.num_q_heads));
    u.rank = reinterpret_cast<float*>(take(4 * u.stride * heads));
    u.list = reinterpret_cast<int32_t*>(take(4 * u.stride * heads));
    u.length = reinterpret_cast<int32_t*>(take(4 * heads));
    u.known = reinterpret_cast<float*>(take(4 * a.num_q_heads));
    u.covered = reinterpret_cast<float*>(take(4 * a.num_q_heads));
    u.partials = reinterpret_cast<float*>(take(4 * int64_t(heads) * u.splits * group * stride));
    return used;
  }

  const uint8_t* header(const Unit& u, int candidate) const {
    const int block = a.block_table[int64_t(u.row) * a.table_stride + u.first + candidate];
    return s.headers + int64_t(block) * s.header_stride;
  }

  // `n` query vectors of kv head `kv_head` from head `g` of its group on, times the softmax scale.
  void load_query(const Unit& u, int kv_head, int g, int n, float* q) const {
    with_dtype(a.dtype, [&](auto dt) {
      for (int r = 0; r < n; r++) {
        const int64_t at = (a.cu_q[u.row] + u.query) * a.q_token_stride + int64_t(kv_head * group + g + r) * dim;
        for (int c = 0; c < dim; c += W) store(q + r * kQueryStride + c, load_as<dt.value>(a.q, at + c) * set1(a.scale));
      }
    });
  }

  void fold_queries(const Unit& u, int kv_head, Workspace& ws) const {
    float* q = ws.get<float>(kDecodeQuery, kQueryStride);
    for (int g = 0; u.count && g < group; g++) {
      const int head = kv_head * group + g;
      load_query(u, kv_head, g, 1, q);
      const int pass = g / kMaxGroup * kMaxGroup, vectors = min_of(kMaxGroup, group - pass);  // scanned together
      int16_t* words = u.words + int64_t(kv_head * group + pass) * 2 * header_width(dim);
      fold_header_query(q, dim, vectors, words + (g - pass) * 4 * W, u.steps + 2 * head);
    }
  }

  // All heads of a few pages before the next few: their headers lie one behind the other.
  void scan(const SparseTask& t) const {
    const Unit& u = units[t.unit];
    for (int i = t.begin; i < t.end; i += W)
      for (int h = 0; h < heads; h++) {
        const auto at = [&](int page) { return header(u, page) + h * lay.header_head_bytes; };
        for (int g = 0; g < group; g += kMaxGroup) {
          const int head = h * group + g;
          const int16_t* words = u.words + int64_t(head) * 2 * header_width(dim);
          float *mean = u.mean + head * u.stride, *variance = u.variance + head * u.stride;
          const int end = min_of(i + W, t.end), known = g == 0 ? u.count : 0;
          switch (min_of(kMaxGroup, group - g)) {
#define KTX_CASE(N) \
  case N: scan_headers<N>(at, i, end, known, dim, words, u.steps + 2 * head, mean, variance, u.stride); break
            KTX_CASE(1); KTX_CASE(2); KTX_CASE(3); KTX_CASE(4);
#undef KTX_CASE
          }
        }
      }
  }

  // Splits of a page list: page i of the list is page_of(i) of the row.
  template <class F>
  void attend_list(const Unit& u, int kv_head, int begin, int end, F page_of, float* partials, Workspace& ws) const {
    PageRef pages[kSplitPages];
    for (int i = begin; i < end; i++) pages[i - begin] = page_at(a, u.row, page_of(i));
    for (int g = 0; g < group; g += kMaxGroup)
      attend_vectors(a, u.row, kv_head, u.query * group + g, min_of(kMaxGroup, group - g), pages, end - begin, nullptr,
                     partials + int64_t(g) * stride, ws);
  }

  // All splits of the fresh tokens: as decode attends pages in the model's dtype.
  template <int NR, int DT>
  void attend_fresh_group(const Unit& u, int kv_head, int g, Workspace& ws) const {
    float* q = ws.get<float>(kDecodeQuery, kMaxGroup * kQueryStride);
    float* scores = ws.get<float>(kDecodeScores, kMaxGroup * size_t(kScoreStride));
    float* sums = ws.get<float>(kDecodeAcc, kMaxGroup * size_t(kQueryStride));
    load_query(u, kv_head, g, NR, q);
    for (int i = 0; i < u.fresh; i++) {
      const int64_t first = int64_t(i) * kFreshTokens;
      const int tokens = min_of(int64_t(kFreshTokens), u.query + 1 - first), padded = (tokens + W - 1) / W * W;
      const int64_t at = ((a.cu_q[u.row] + first) * a.kv_token_stride + int64_t(kv_head) * dim) * dtype_bytes(DT);
      score_plain<NR, DT>(static_cast<const char*>(a.k) + at, a.kv_token_stride, tokens, dim, q, scores);
      float* out = split(u, kv_head, i) + int64_t(g) * stride;
      for (int r = 0; r < NR; r++) {
        for (int t = tokens; t < padded; t++) scores[r * kScoreStride + t] = kNegInf;
        weigh(scores + r * kScoreStride, padded, a.softcap, out + r * stride, out + r * stride + 1);
        std::memset(sums + r * kQueryStride, 0, dim * sizeof(float));
      }
      add_plain<NR, DT>(static_cast<const char*>(a.v) + at, a.kv_token_stride, tokens, dim, scores, sums);
      for (int r = 0; r < NR; r++)
        std::memcpy(out + r * stride + kPartialHead, sums + r * kQueryStride, dim * sizeof(float));
    }
  }

  void attend_fresh(const Unit& u, int kv_head, Workspace& ws) const {
    with_dtype(a.dtype, [&](auto dt) {
      for (int g = 0; g < group; g += kMaxGroup) switch (min_of(kMaxGroup, group - g)) {
#define KTX_CASE(N) case N: attend_fresh_group<N, dt.value>(u, kv_head, g, ws); break
        KTX_CASE(1); KTX_CASE(2); KTX_CASE(3); KTX_CASE(4);
#undef KTX_CASE
      }
    });
  }

  // Log-mass of fresh tokens 0 .. query for one query head, where they are too few for that.
  template <int DT>
  float fresh_mass(const Unit& u, int head) const {
    const int64_t first = a.cu_q[u.row];
    const int64_t q_at = (first + u.query) * a.q_token_stride + int64_t(head) * dim;
    const int64_t k_at = first * a.kv_token_stride + int64_t(head / group) * dim;
    float top = kNegInf, sum = 0;
    for (int j = 0; a.k && j <= u.query; j++) {
      vf dot = zero();
      for (int c = 0; c < dim; c += W)
        dot = fmadd(load_as<DT>(a.q, q_at + c), load_as<DT>(a.k, k_at + j * a.kv_token_stride + c), dot);
      const float x = cap_score(hsum(dot) * a.scale, a.softcap);
      if (x > top) sum *= __builtin_expf(top - x), top = x;
      sum += __builtin_expf(x - top);
    }
    return sum > 0 ? top + __builtin_logf(sum) : kNegInf;
  }

  void find_known(const Unit& u, int kv_head) const {
    for (int g = 0; g < group; g++) {
      const int head = kv_head * group + g;
      float parts[2] = {kNegInf, kNegInf}, sum = 0;
      if (!u.fresh) with_dtype(a.dtype, [&](auto dt) { parts[0] = fresh_mass<dt.value>(u, head); });
      for (int i = 0; i < u.lead; i++) {
        const float* p = split(u, kv_head, i) + int64_t(g) * stride;
        if (p[0] > parts[1]) sum *= __builtin_expf(parts[1] - p[0]), parts[1] = p[0];
        if (p[1] > 0) sum += p[1] * __builtin_expf(p[0] - parts[1]);
      }
      const float pages = sum > 0 ? parts[1] + __builtin_logf(sum) : kNegInf, top = max_of(parts[0], pages);
      u.known[head] = top == kNegInf ? kNegInf
                      : top + __builtin_logf(__builtin_expf(parts[0] - top) + __builtin_expf(pages - top));
    }
  }

  Masses masses(const Unit& u, int kv_head) const {
    const int64_t at = int64_t(kv_head) * group * u.stride;
    return {u.mean + at, u.variance + at, u.rank + kv_head * u.stride, u.count, group, u.stride};
  }

  // Phase 2: header scores -> log-masses; then the pages to probe by plane 0, or the choice if none.
  void rank_headers(const Unit& u, int kv_head, Workspace& ws) const {
    u.length[kv_head] = 0;
    if (u.count == 0 && s.scoring == kScoreHeader) return choose_pages(u, kv_head, ws);
    if (u.count == 0) return;
    find_known(u, kv_head);
    const Masses m = masses(u, kv_head);
    Spread* spread = ws.get<Spread>(kSparseSpread, group);
    const vf log_tokens = set1(__builtin_logf(float(size)));
    for (int g = 0; g < group; g++) {
      float* mass = m.log_mass + g * m.stride;
      const float* variance = m.shares + g * m.stride;
      Spread all;
      for (int i = 0; i < u.count; i += W) {
        const vf mean = load(mass + i), within = load(variance + i);
        all.add(first_lanes(u.count - i, mean, zero()), first_lanes(u.count - i, within, zero()));
        store(mass + i, first_lanes(u.count - i, header_mass(mean, within, log_tokens), set1(kNegInf)));
      }
      spread[g] = all;
      for (int i = (u.count + W - 1) / W * W; i < u.stride; i += W) store(mass + i, set1(kNegInf));
    }
    if (s.scoring == kScoreHeader) return choose_pages(u, kv_head, ws);
    const float depth = s.scoring == kScoreCodes ? 1.f : deepening(s, spread, u.count, group);
    share_masses(m, u.known + kv_head * group, u.covered + kv_head * group);
    u.length[kv_head] = best(m.rank, u.count, probe_count(depth, u.count), u.list + kv_head * u.stride);
  }

  void probe(const SparseTask& t, Workspace& ws) const {
    const Unit& u = units[t.unit];
    const int32_t* list = u.list + t.kv_head * u.stride;
    float* q = ws.get<float>(kDecodeQuery, 2 * kMaxGroup * kQueryStride);
    float* scratch = q + kMaxGroup * kQueryStride;
    const auto page = [&](int i) { return head_page(lay, scoring_page(a, u.row, u.first + list[i]), t.kv_head); };
    for (int g = 0; g < group; g += kMaxGroup) {
      const int n = min_of(kMaxGroup, group - g);
      load_query(u, t.kv_head, g, n, q);
      for (int i = t.begin; i < t.end; i++) {
        const HeadPage now = page(i), next = page(min_of(i + 2, t.end - 1));
        prefetch_params(lay.k_scale, next.k);
        alignas(64) float mass[W];
        switch (n) {
#define KTX_CASE(N) case N: score_plane0<N>(lay, now, next.plane0, q, scratch, mass); break
          KTX_CASE(1); KTX_CASE(2); KTX_CASE(3); KTX_CASE(4);
#undef KTX_CASE
        }
        for (int r = 0; r < n; r++) u.variance[(t.kv_head * group + g + r) * u.stride + list[i]] = mass[r];
      }
    }
  }

  void choose_pages(const Unit& u, int kv_head, Workspace& ws) const {
    const Masses m = masses(u, kv_head);
    int32_t* list = u.list + kv_head * u.stride;
    float* covered = u.covered + kv_head * group;
    if (u.length[kv_head]) join_codes(m, list, u.length[kv_head]);
    share_masses(m, u.known + kv_head * group, covered);
    const int limit = most(u.pages, u.count), probed = u.length[kv_head];
    if (u.count == 0) {
      for (int g = 0; g < group; g++) covered[g] = 1;
    } else {
      const bool fixed = s.select != kSelectCoverage;
      u.length[kv_head] = choose(m, fixed ? limit : s.min_pages, limit, fixed ? 2.f : s.coverage, covered, list,
                                 ws.get<Ranked>(kSparseRanked, limit + 1));
    }
    const int64_t token = a.cu_q[u.row] + u.query;
    float lost = 0;
    for (int g = 0; g < group; g++) lost += max_of(0.f, 1 - covered[g]) / group;
    if (s.dropped) s.dropped[token * heads + kv_head] = lost;
    if (s.pages_read) s.pages_read[token * heads + kv_head] = always_pages(u) + u.length[kv_head];
    if (s.depth) s.depth[token * heads + kv_head] = probed ? float(probed) / u.count : 0.f;
    hand_out(s, token * heads + kv_head, list, u.length[kv_head], u.first);
  }

  void join(const Unit& u, int kv_head, Workspace& ws) const {
    const int used = u.lead + (u.length[kv_head] + kSplitPages - 1) / kSplitPages;
    AttentionArgs rest = a;  // `finish` attends the fresh tokens that no split holds
    if (u.fresh) rest.k = rest.v = nullptr;
    for (int g = 0; g < group; g++)
      with_dtype(a.dtype, [&](auto dt) {
        finish<dt.value>(rest, u.row, u.query, kv_head * group + g, split(u, kv_head, 0) + int64_t(g) * stride, used,
                         int64_t(group) * stride, ws);
      });
  }

  // Appends tasks of `step` items over `count(head)`, neighbours in the lists of all heads before what lies behind them.
  template <class F>
  void add(int unit, int num_heads, int step, int kind, F count) {
    bool more = true;
    for (int begin = 0; more; begin += step) {
      more = false;
      for (int h = 0; h < num_heads; h++) {
        const int n = count(h);
        if (begin < n) tasks[num_tasks++] = {unit, h, begin, min_of(n, begin + step), kind};
        more = more || begin + step < n;
      }
    }
  }

  enum Kind { kScan, kFresh, kAlways, kProbe, kChosen };

  void list_tasks(int phase) {
    num_tasks = 0;
    for (int i = 0; i < num_units; i++) {
      const Unit& u = units[i];
      const auto chosen = [&](int h) { return u.length[h]; };
      if (phase == 1) {
        add(i, 1, kScanPages, kScan, [&](int) { return u.count; });
        if (u.fresh) add(i, heads, u.fresh, kFresh, [&](int) { return u.fresh; });
        add(i, heads, kSplitPages, kAlways, [&](int) { return always_pages(u); });
      }
      if (phase == 3 && s.scoring != kScoreHeader) add(i, heads, a.residency ? kLeastWave : kProbePages, kProbe, chosen);
      if (phase == 5) add(i, heads, kSplitPages, kChosen, chosen);
    }
  }

  void run(const SparseTask& t, Workspace& ws) const {
    const Unit& u = units[t.unit];
    if (t.kind == kScan) return scan(t);
    if (t.kind == kProbe) return probe(t, ws);
    if (t.kind == kFresh) return attend_fresh(u, t.kv_head, ws);
    const bool always = t.kind == kAlways;
    const int32_t* list = u.list + t.kv_head * u.stride;
    float* to = split(u, t.kv_head, t.begin / kSplitPages + (always ? u.fresh : u.lead));
    attend_list(u, t.kv_head, t.begin, t.end, [&](int i) { return always ? always_page(u, i) : u.first + list[i]; }, to, ws);
  }

  // Moves on to the next tasks whose pages can be resident at once.
  void next_wave() {
    const auto pages = [&](int i, auto need) {
      const SparseTask& t = tasks[i];
      if (t.kind == kScan || t.kind == kFresh) return;
      const Unit& u = units[t.unit];
      const int32_t* list = u.list + t.kv_head * u.stride;
      for (int j = t.begin; j < t.end; j++) need(u.row, t.kind == kAlways ? always_page(u, j) : u.first + list[j]);
    };
    wave_begin = wave_end;
    wave_end = waves.next(wave_begin, num_tasks, num_tasks && tasks[0].kind == kProbe, pages);
  }

  // Runs units[0 .. num_units); called by every thread of a team.
  void wave(Workspace& ws) {
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_units * heads; i++) fold_queries(units[i / heads], i % heads, ws);
    for (int phase = 1; phase <= 5; phase += 2) {
#pragma omp master
      list_tasks(phase), wave_end = 0;
      for (bool more = true; more;) {
#pragma omp master
        next_wave();
#pragma omp barrier
        const int begin = wave_begin, end = wave_end;  // the master may move on before others ask for more
        more = begin < end && end < num_tasks;
#pragma omp for schedule(dynamic, 1)
        for (int i = begin; i < end; i++) run(tasks[i], ws);
      }
      if (phase == 1) {
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_units * heads; i++) rank_headers(units[i / heads], i % heads, ws);
      }
      if (phase == 3 && s.scoring != kScoreHeader) {
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_units * heads; i++) choose_pages(units[i / heads], i % heads, ws);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_units * heads; i++) join(units[i / heads], i % heads, ws);
  }
};

}  // namespace KTX_NS
