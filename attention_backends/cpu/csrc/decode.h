// Attention of a few query vectors of one kv head over a list of pages: the flash-decoding half of `ktx_attention`.
// All vectors of a group (NR of them: query heads that share the kv head, and the queries of a short row) share each
// unpacked code. A split of at most kSplitPages pages first takes all scores, so its softmax needs no rescaling, then
// the values. Keys: lanes are tokens. Values: lanes are channels, in the order in which the bytes unpack.
#pragma once
#include "common.h"

namespace KTX_NS {

constexpr int kSplitPages = 16;  // fixed, so that a row's result never depends on its batch or on the thread count
constexpr int kMaxPage = 256, kMaxDim = 512, kMaxGroup = 8;
constexpr int kScoreStride = kSplitPages * kMaxPage + 16;  // constant strides fold into addresses; + 16 spreads cache sets
constexpr int kQueryStride = kMaxDim + 16;

KTX_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// ---- keys ---------------------------------------------------------------------------------------------------------

// Codes of channel 4*d4 + I + K*D/4 of W tokens, from the page's words. `even` holds K = 0 and 2, `odd` 1 and 3.
template <int BITS>
struct KeyWords {
  vi even, odd, low0, low1;

  KTX_INLINE KeyWords read(const HeadPage& p, int word, int low_step) {
    KeyWords w;
    const int64_t at = int64_t(word) * 4;
    const vi p0 = iload(p.plane0 + at), p1 = iload(p.plane1 + at);
    w.even = pick(iset1(int(0xCCCCCCCC)), sll<2>(p0), p1);
    w.odd = pick(iset1(int(0xCCCCCCCC)), p0, srl<2>(p1));
    if (BITS == 8) {
      w.low0 = iload(p.low + at);
      w.low1 = iload(p.low + at + int64_t(low_step) * 4);
    }
    return w;
  }

  template <int K>
  KTX_INLINE vi bytes(const KeyWords& w) {  // four channels' codes as bytes (INT4 on AVX-512: in the low nibbles)
    const vi high = iset1(int(0xF0F0F0F0)), mine = K & 1 ? w.odd : w.even;
    if (BITS == 8) {
      const vi low = K & 1 ? w.low1 : w.low0;
      return K < 2 ? pick(high, sll<4>(mine), low) : pick(high, mine, srl<4>(low));
    }
#if defined(__AVX512F__)
    return mine;
#else
    return iand(K < 2 ? mine : srl<4>(mine), iset1(0x0F0F0F0F));
#endif
  }

  template <int K, int I>
  KTX_INLINE vf code(vi bytes) {
#if defined(__AVX512F__)
    if (BITS == 4) return nibble(srl<8 * I + (K < 2 ? 0 : 4)>(bytes));
#endif
    return to_float(byte_lane<I>(bytes));
  }
};

// dots[r][t] = sum_c q[r][c] * code[t][c] for one page; `next` is fetched meanwhile (its first bytes may be values).
template <int NR, int BITS>
static void key_dots(const HeadPage& page, const HeadPage& next, const float* q, int tokens, int dim, float* dots) {
  using Words = KeyWords<BITS>;
  constexpr int TV = W == 16 || NR <= 4 ? 2 : 1;    // token vectors at a time: each broadcast of q serves all of them
  constexpr int SETS = NR * TV >= 8 ? 1 : 2;        // a second set of sums where one alone waits for the FMA's latency
  const int words = dim / 16;
  const float* qk[4] = {q, q + dim / 4, q + dim / 2, q + 3 * (dim / 4)};
  for (int t = 0; t < tokens; t += TV * W) {
    vf sum[SETS][NR][TV];
    unroll<SETS * NR * TV>([&](auto n) KTX_LAMBDA { sum[n.value / (NR * TV)][n.value / TV % NR][n.value % TV] = zero(); });
    for (int d4 = 0; d4 < words; d4++) {
      Words w[TV];
      const int word = d4 * tokens + t;
      unroll<TV>([&](auto v) KTX_LAMBDA { w[v.value] = Words::read(page, word + v.value * W, words * tokens); });
      for (int line = 0; line < TV * W * 4; line += 64) {
        const int at = word * 4 + line;
        fetch(next.plane0 + at);
        fetch(next.plane1 + at);
        if (BITS == 8) fetch(next.low + at), fetch(next.low + words * tokens * 4 + at);
      }
      unroll<4>([&](auto k) KTX_LAMBDA {
        vi bytes[TV];
        unroll<TV>([&](auto v) KTX_LAMBDA { bytes[v.value] = Words::template bytes<k.value>(w[v.value]); });
        unroll<4>([&](auto i) KTX_LAMBDA {
          vf code[TV];
          unroll<TV>([&](auto v) KTX_LAMBDA { code[v.value] = Words::template code<k.value, i.value>(bytes[v.value]); });
          unroll<NR>([&](auto r) KTX_LAMBDA {
            const vf x = set1(qk[k.value][r.value * kQueryStride + 4 * d4 + i.value]);
            unroll<TV>([&](auto v) KTX_LAMBDA {
              vf& s = sum[i.value % SETS][r.value][v.value];
              s = fmadd(code[v.value], x, s);
            });
          });
        });
      });
    }
    unroll<NR * TV>([&](auto n) KTX_LAMBDA {
      constexpr int r = n.value / TV, v = n.value % TV;
      vf s = sum[0][r][v];
      if (SETS == 2) s = s + sum[SETS - 1][r][v];
      store(dots + r * kScoreStride + t + v * W, s);
    });
  }
}

// Scores of one sealed page: scale and minimum go into the query where they are per channel, else behind the dots.
template <int NR>
static void score_sealed(const Layout& lay, const HeadPage& page, const HeadPage& next, const float* q, const float* q_sum,
                         float* scratch, float* scores) {
  const int tokens = lay.page_size, dim = lay.head_dim;
  const float* scaled = q;
  vf bias[NR];
  for (int r = 0; r < NR; r++) bias[r] = zero();
  if (lay.k_method == kPerChannel) {
    for (int c = 0; c < dim; c += W) {
      const vf scale = load_f16(page.k_scale + c), low = load_f16(page.k_min + c);
      for (int r = 0; r < NR; r++) {
        const vf x = load(q + r * kQueryStride + c);
        bias[r] = fmadd(x, low, bias[r]);
        store(scratch + r * kQueryStride + c, x * scale);
      }
    }
    scaled = scratch;
  }
  if (lay.k_bits == 4) key_dots<NR, 4>(page, next, scaled, tokens, dim, scores);
  else key_dots<NR, 8>(page, next, scaled, tokens, dim, scores);
  for (int r = 0; r < NR; r++) {
    float* s = scores + r * kScoreStride;
    if (lay.k_method == kPerChannel) {
      const vf b = set1(hsum(bias[r]));
      for (int t = 0; t < tokens; t += W) store(s + t, load(s + t) + b);
    } else {
      const bool per_token = lay.k_method == kPerToken;
      const vf all = set1(q_sum[r]);
      vf scale = set1(f16_to_f32(*page.k_scale)), low = set1(f16_to_f32(*page.k_min));
      for (int t = 0; t < tokens; t += W) {
        if (per_token) scale = load_f16(page.k_scale + t), low = load_f16(page.k_min + t);
        store(s + t, fmadd(load(s + t), scale, all * low));
      }
    }
  }
}

// Scores of `tokens` keys in the model's dtype, `stride` elements apart.
template <int NR, int DT>
static void score_plain(const void* k, int64_t stride, int tokens, int dim, const float* q, float* scores) {
  for (int t = 0; t < tokens; t++) {
    vf sum[NR][2];
    for (int r = 0; r < NR; r++) sum[r][0] = sum[r][1] = zero();
    int c = 0;
    for (; c + 2 * W <= dim; c += 2 * W) {
      const vf x = load_as<DT>(k, t * stride + c), y = load_as<DT>(k, t * stride + c + W);
      for (int r = 0; r < NR; r++) {
        sum[r][0] = fmadd(x, load(q + r * kQueryStride + c), sum[r][0]);
        sum[r][1] = fmadd(y, load(q + r * kQueryStride + c + W), sum[r][1]);
      }
    }
    for (; c < dim; c += W) {
      const vf x = load_as<DT>(k, t * stride + c);
      for (int r = 0; r < NR; r++) sum[r][0] = fmadd(x, load(q + r * kQueryStride + c), sum[r][0]);
    }
    for (int r = 0; r < NR; r++) scores[r * kScoreStride + t] = hsum(sum[r][0] + sum[r][1]);
  }
}

// ---- values -------------------------------------------------------------------------------------------------------

constexpr int kSums = W == 16 ? 16 : 8;  // accumulators that fit the register file beside the codes

constexpr int nibbles_at_once(int vectors) {
  return vectors * 8 <= kSums ? 8 : vectors * 4 <= kSums ? 4 : vectors * 2 <= kSums ? 2 : 1;
}

KTX_INLINE int permuted_width(int dim) { return (dim / 8 + W - 1) / W * W * 8; }

// Channel of accumulator `index`: dword by dword over the row's bytes, nibble by nibble.
KTX_INLINE int permuted_channel(int index) {
  const int vector = index / (8 * W), nibble = index / W % 8, byte = 4 * (vector * W + index % W) + nibble / 2;
  return byte / 8 * 16 + byte % 8 + nibble % 2 * 8;
}

// acc[r][permuted channel] += sum_t w[r][t] * code[t][channel] of INT4 codes.
template <int NR>
static void add_values4(const uint8_t* codes, const uint8_t* next, int tokens, int dim, const float* w, float* acc) {
  constexpr int NB = nibbles_at_once(NR);
  const int row = dim / 2, dwords = dim / 8;
  for (int v = 0; v * W < dwords; v++) {
    const int lanes = min_of(W, dwords - v * W);
    unroll<8 / NB>([&](auto pass) KTX_LAMBDA {
      constexpr int first = pass.value * NB;
      float* mine = acc + (v * 8 + first) * W;
      vf sum[NR][NB];
      unroll<NR * NB>([&](auto n) KTX_LAMBDA {
        sum[n.value / NB][n.value % NB] = load(mine + n.value / NB * kQueryStride + n.value % NB * W);
      });
      for (int t = 0; t < tokens; t++) {
        const vi word = iload_first(codes + t * row + v * W * 4, lanes);
        if (first == 0 && v == 0) prefetch_run(next + t * row, row);
        vf x[NR];
        unroll<NR>([&](auto r) KTX_LAMBDA { x[r.value] = set1(w[r.value * kScoreStride + t]); });
        unroll<NB>([&](auto n) KTX_LAMBDA {
          const vf code = nibble(srl<4 * (first + n.value)>(word));
          unroll<NR>([&](auto r) KTX_LAMBDA {
            sum[r.value][n.value] = fmadd(code, x[r.value], sum[r.value][n.value]);
          });
        });
      }
      unroll<NR * NB>([&](auto n) KTX_LAMBDA {
        store(mine + n.value / NB * kQueryStride + n.value % NB * W, sum[n.value / NB][n.value % NB]);
      });
    });
  }
}

// The same over rows whose W channels at (t, c) `read` returns, in their natural order: INT8 codes, plain values.
template <int NR, int CV, class Read>
KTX_INLINE void add_block(Read read, int c, int tokens, const float* w, float* acc) {
  vf sum[NR][CV];
  unroll<NR * CV>([&](auto n) KTX_LAMBDA {
    sum[n.value / CV][n.value % CV] = load(acc + n.value / CV * kQueryStride + c + n.value % CV * W);
  });
  for (int t = 0; t < tokens; t++)
    unroll<CV>([&](auto v) KTX_LAMBDA {
      const vf x = read(t, c + v.value * W);
      unroll<NR>([&](auto r) KTX_LAMBDA {
        vf& s = sum[r.value][v.value];
        s = fmadd(x, set1(w[r.value * kScoreStride + t]), s);
      });
    });
  unroll<NR * CV>([&](auto n) KTX_LAMBDA {
    store(acc + n.value / CV * kQueryStride + c + n.value % CV * W, sum[n.value / CV][n.value % CV]);
  });
}

template <int NR, class Read>
KTX_INLINE void add_rows(Read read, int tokens, int dim, const float* w, float* acc) {
  constexpr int CV = nibbles_at_once(NR);
  int c = 0;
  for (; c + CV * W <= dim; c += CV * W) add_block<NR, CV>(read, c, tokens, w, acc);
  for (; c < dim; c += W) add_block<NR, 1>(read, c, tokens, w, acc);
}

template <int NR>
static void add_values8(const uint8_t* codes, const uint8_t* next, int tokens, int dim, const float* w, float* acc) {
  add_rows<NR>([&](int t, int c) KTX_LAMBDA {
    if (c % 64 == 0) fetch(next + t * dim + c);
    return u8_to_float(codes + t * dim + c);
  }, tokens, dim, w, acc);
}

template <int NR, int DT>
static void add_plain(const void* v, int64_t stride, int tokens, int dim, const float* w, float* acc) {
  add_rows<NR>([&](int t, int c) KTX_LAMBDA { return load_as<DT>(v, t * stride + c); }, tokens, dim, w, acc);
}

// ---- one split ----------------------------------------------------------------------------------------------------

// Sums of one split, per vector: codes in the order they unpack, codes in natural order, values that need no rotation.
struct SplitSums {
  float *permuted, *natural, *plain, *scratch, *offset;  // [NR][kQueryStride]; offset: [NR], the minima's share
};

template <int NR>
static void add_sealed(const Layout& lay, const HeadPage& page, const HeadPage& next, int tokens, float* p,
                       const SplitSums& s) {
  const int dim = lay.head_dim;
  float mass[NR];
  for (int r = 0; r < NR; r++) {
    float* w = p + r * kScoreStride;
    if (lay.v_method == kPerChannel) {
      mass[r] = 0;
      for (int t = 0; t < tokens; t++) mass[r] += w[t];
      continue;
    }
    vf scale = set1(f16_to_f32(*page.v_scale)), low = set1(f16_to_f32(*page.v_min)), sum = zero();
    for (int t = 0; t < tokens; t += W) {  // past the last token of a part-filled page, w is 0
      if (lay.v_method == kPerToken) scale = load_f16(page.v_scale + t), low = load_f16(page.v_min + t);
      const vf x = load(w + t);
      sum = fmadd(x, low, sum);
      store(w + t, x * scale);
    }
    s.offset[r] += hsum(sum);
  }
  const bool four = lay.v_bits == 4;
  if (lay.v_method != kPerChannel) {
    if (four) add_values4<NR>(page.v_codes, next.v_codes, tokens, dim, p, s.permuted);
    else add_values8<NR>(page.v_codes, next.v_codes, tokens, dim, p, s.natural);
    return;
  }
  // Scales of channels apply to this page's sums of codes alone.
  for (int r = 0; r < NR; r++) std::memset(s.scratch + r * kQueryStride, 0, kQueryStride * sizeof(float));
  if (four) add_values4<NR>(page.v_codes, next.v_codes, tokens, dim, p, s.scratch);
  else add_values8<NR>(page.v_codes, next.v_codes, tokens, dim, p, s.scratch);
  for (int r = 0; r < NR; r++) {
    const float* sum = s.scratch + r * kQueryStride;
    float* out = s.natural + r * kQueryStride;
    for (int i = 0; i < (four ? permuted_width(dim) : dim); i++) {
      const int c = four ? permuted_channel(i) : i;
      if (c < dim) out[c] += f16_to_f32(page.v_scale[c]) * sum[i] + f16_to_f32(page.v_min[c]) * mass[r];
    }
  }
}

// Scores -> softmax weights in place, relative to the split's maximum; returns the maximum and the sum by vector.
static void weigh(float* scores, int count, float softcap, float* maximum, float* total) {
  if (softcap > 0)
    for (int t = 0; t < count; t += W) {
      const vf x = load(scores + t);  // masked slots stay masked
      store(scores + t, select_lt(x, set1(-3e38f), x, set1(softcap) * vtanh(x / set1(softcap))));
    }
  vf top = set1(kNegInf), sum = zero();
  for (int t = 0; t < count; t += W) top = vmax(load(scores + t), top);
  *maximum = hmax(top);
  const vf base = set1(*maximum == kNegInf ? 0.f : *maximum);
  for (int t = 0; t < count; t += W) {
    const vf e = vexp(load(scores + t) - base);
    sum = sum + e;
    store(scores + t, e);
  }
  *total = hsum(sum);
}

// What a split leaves behind, per vector: [0] maximum, [1] sum of weights, [kPartialHead ..] weighted values.
constexpr int kPartialHead = 16;
KTX_INLINE int partial_stride(int dim) { return kPartialHead + (dim + 15) / 16 * 16; }

// Vectors q[NR][kQueryStride] (times the softmax scale) over `count` pages (at most kSplitPages) -> partials[NR].
template <int NR>
static void attend_split(const AttentionArgs& a, const PageRef* pages, int count, int kv_head, const float* q,
                         float* partials, Workspace& ws) {
  const Layout& lay = *a.layout;
  const int size = lay.page_size, dim = lay.head_dim;
  float* scores = ws.get<float>(kDecodeScores, size_t(NR) * kScoreStride);
  float* sums = ws.get<float>(kDecodeAcc, (4 * NR + 1) * size_t(kQueryStride));
  std::memset(sums, 0, 3 * NR * kQueryStride * sizeof(float));
  const SplitSums s{sums, sums + NR * kQueryStride, sums + 2 * NR * kQueryStride, sums + 3 * NR * kQueryStride,
                    sums + 4 * NR * kQueryStride};
  float q_sum[NR];
  for (int r = 0; r < NR; r++) {
    vf sum = zero();
    for (int c = 0; c < dim; c += W) sum = sum + load(q + r * kQueryStride + c);
    q_sum[r] = hsum(sum), s.offset[r] = 0;
  }
  const auto sealed = [&](int i) { return head_page(lay, pages[i].payload, kv_head); };

  for (int i = 0; i < count; i++) {
    float* out = scores + i * size;
    if (pages[i].plain) {
      const uint8_t* k = plain_keys(a, pages[i], kv_head);
      with_dtype(a.dtype, [&](auto dt) { score_plain<NR, dt.value>(k, dim, pages[i].tokens, dim, q, out); });
    } else {
      const HeadPage page = sealed(i);
      HeadPage next = page;
      if (i + 1 < count && pages[i + 1].payload) {
        next = sealed(i + 1);
        if (lay.k_method == kPerChannel) prefetch_run(next.k_scale, 2 * dim), prefetch_run(next.k_min, 2 * dim);
      } else if (pages[0].payload) {  // the values' turn comes next
        const int quarter = size * dim / 4;
        next.plane0 = sealed(0).v_codes;
        next.plane1 = next.plane0 + quarter;
        next.low = next.plane0 + (lay.v_bits == 8 ? 2 * quarter : 0);
      }
      score_sealed<NR>(lay, page, next, q, q_sum, s.scratch, out);
    }
    for (int r = 0; r < NR; r++)
      for (int t = pages[i].tokens; t < size; t++) out[r * kScoreStride + t] = kNegInf;
  }
  for (int r = 0; r < NR; r++) {
    float* out = partials + r * partial_stride(dim);
    weigh(scores + r * kScoreStride, count * size, a.softcap, out, out + 1);
  }
  for (int i = 0; i < count; i++) {
    float* p = scores + i * size;
    if (pages[i].plain) {
      const uint8_t* v = plain_values(a, pages[i], kv_head);
      with_dtype(a.dtype, [&](auto dt) { add_plain<NR, dt.value>(v, dim, pages[i].tokens, dim, p, s.plain); });
    } else {
      const HeadPage page = sealed(i), next = i + 1 < count && pages[i + 1].payload ? sealed(i + 1) : page;
      add_sealed<NR>(lay, page, next, pages[i].tokens, p, s);
    }
  }
  for (int r = 0; r < NR; r++) {
    float *natural = s.natural + r * kQueryStride, *permuted = s.permuted + r * kQueryStride;
    if (lay.k_bits != 16 && lay.v_bits == 4 && lay.v_method != kPerChannel)
      for (int i = 0; i < permuted_width(dim); i++) {
        const int c = permuted_channel(i);
        if (c < dim) natural[c] += permuted[i];
      }
    float* out = partials + r * partial_stride(dim) + kPartialHead;
    for (int c = 0; c < dim; c += W) store(natural + c, load(natural + c) + set1(s.offset[r]));
    if (lay.v_rotate) hadamard(natural, dim);
    for (int c = 0; c < dim; c += W) store(out + c, load(natural + c) + load(s.plain + r * kQueryStride + c));
  }
}

}  // namespace KTX_NS
