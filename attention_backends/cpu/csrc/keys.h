// Dots of query vectors with the key codes of one sealed page: lanes are tokens, the order of the page's words.
//
// Two ways. In float32, exact to its rounding. And in integers, for models whose own dtype rounds far more coarsely:
// the query, scaled by the scales, as int16 against the codes. That is half the work on AVX-512, and what it adds
// to an output is far below the rounding of the output itself (bf16: 1.65e-3 with it and without it).
#pragma once
#include "common.h"

namespace KTX_NS {

constexpr int kSplitPages = 16;  // fixed, so that a row's result never depends on its batch or on the thread count
constexpr int kMaxGroup = 4;     // query vectors that share each unpacked code; more gain nothing, FMA is the limit
// Constant strides fold into addresses; what is added spreads cache sets.
constexpr int kScoreStride = kSplitPages * kMaxPage + 16, kQueryStride = kMaxDim + 64;

KTX_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

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
  KTX_INLINE vi bytes(const KeyWords& w) {  // four channels' codes as bytes (INT4 on AVX-512: among other bits)
    const vi high = iset1(int(0xF0F0F0F0)), mine = K & 1 ? w.odd : w.even;
    if (BITS == 8) {
      const vi low = K & 1 ? w.low1 : w.low0;
      return K < 2 ? pick(high, sll<4>(mine), low) : pick(high, mine, srl<4>(low));
    }
    if (W == 16) return mine;
    return iand(K < 2 ? mine : srl<4>(mine), iset1(0x0F0F0F0F));
  }

  template <int K, int I>
  KTX_INLINE vf code(vi bytes) {
    if (W == 16 && BITS == 4) return nibble(srl<8 * I + (K < 2 ? 0 : 4)>(bytes));
    return to_float(byte_lane<I>(bytes));
  }
};

template <int BITS, int TV>
KTX_INLINE void fetch_words(const HeadPage& next, int word, int low_step) {
  for (int line = 0; line < TV * W * 4; line += 64) {
    const int64_t at = int64_t(word) * 4 + line;
    fetch(next.plane0 + at);
    fetch(next.plane1 + at);
    if (BITS == 8) fetch(next.low + at), fetch(next.low + int64_t(low_step) * 4 + at);
  }
}

// dots[r][t] = bias[r] + sum_c q[r][c] * code[t][c] for tokens from .. to (multiples of 32) of a page. `next` is fetched meanwhile: the
// next page, or values whose turn comes.
template <int NR, int BITS>
static void key_dots(const HeadPage& page, const HeadPage& next, const float* q, const float* bias, int tokens, int from,
                     int to, int dim, float* dots) {
  using Words = KeyWords<BITS>;
  constexpr int TV = W == 16 || NR <= 4 ? 2 : 1;    // token vectors at a time: each broadcast of q serves all of them
  constexpr int SETS = NR * TV >= 8 ? 1 : 2;        // a second set of sums where one alone waits for the FMA's latency
  const int words = dim / 16;
  const float* qk[4] = {q, q + dim / 4, q + dim / 2, q + 3 * (dim / 4)};
  for (int t = from; t < to; t += TV * W) {
    vf sum[SETS][NR][TV];
    unroll<SETS * NR * TV>([&](auto n) KTX_LAMBDA {
      sum[n.value / (NR * TV)][n.value / TV % NR][n.value % TV] = zero();
    });
    for (int d4 = 0; d4 < words; d4++) {
      Words w[TV];
      const int word = d4 * tokens + t;
      unroll<TV>([&](auto v) KTX_LAMBDA { w[v.value] = Words::read(page, word + v.value * W, words * tokens); });
      fetch_words<BITS, TV>(next, word, words * tokens);
      unroll<4>([&](auto k) KTX_LAMBDA {
        vi bytes[TV];
        unroll<TV>([&](auto v) KTX_LAMBDA { bytes[v.value] = Words::template bytes<k.value>(w[v.value]); });
        unroll<4>([&](auto i) KTX_LAMBDA {
          vf code[TV];
          unroll<TV>([&](auto v) KTX_LAMBDA {
            code[v.value] = Words::template code<k.value, i.value>(bytes[v.value]);
          });
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
      store(dots + r * kScoreStride + t + v * W, s + set1(bias[r]));
    });
  }
}

// ---- integers -----------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
#define KTX_HAS_WORD_DOTS 1
KTX_INLINE vi dot_words(vi sum, vi a, vi b) { return _mm512_dpwssd_epi32(sum, a, b); }  // two int16 products a lane
KTX_INLINE vi srl16_12(vi x) { return _mm512_srli_epi16(x, 12); }  // of each int16
KTX_INLINE vi srl16_8(vi x) { return _mm512_srli_epi16(x, 8); }
KTX_INLINE vi to_words(vi a, vi b) {  // int16 in order, but each four channels as 0, 2, 1, 3: see word_codes
  const vi x = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi32(a, b));
  return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(x, 0xD8), 0xD8);
}
#elif defined(__AVX2__)
#define KTX_HAS_WORD_DOTS 1
KTX_INLINE vi dot_words(vi sum, vi a, vi b) {
  vi r = iadd(sum, _mm256_madd_epi16(a, b));
  asm("" : "+x"(r));  // one by one: the compiler would sum as a tree instead, and spill every leaf
  return r;
}
KTX_INLINE vi srl16_12(vi x) { return _mm256_srli_epi16(x, 12); }
KTX_INLINE vi srl16_8(vi x) { return _mm256_srli_epi16(x, 8); }
KTX_INLINE vi to_words(vi a, vi b) {
  const vi x = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x, 0xD8), 0xD8);
}
#else
KTX_INLINE vi to_words(vi a, vi b) {
  return ieach([=](int i) {
    const vi x = i < W / 2 ? a : b;
    const int c = i / 2 * 4 % W + i % 2;
    return (x[c] & 0xFFFF) | x[c + 2] << 16;
  });
}
#endif

// Query vectors as x ~ step * word, the words of each four channels in the order 0, 2, 1, 3.
template <int NR>
struct WordQuery {
  alignas(64) int16_t word[NR][kQueryStride];
  float step[NR];
};

#if defined(KTX_HAS_WORD_DOTS)

constexpr bool kHasIntegers = true;
constexpr bool can_use_words(int bits, int dim) { return bits == 4 || dim <= 256; }  // 255 * 32767 * 256 < 2^31

// Vector r = x[dim] (zero up to the next 2 * W channels), whose largest magnitude is `top`, as words; returns, lane by
// lane, the sum of what rounding left: sum_c step * word.
template <int NR>
KTX_INLINE vf round_query(WordQuery<NR>& out, int r, const float* x, int dim, float top) {
  const float step = top / 32767.f;
  const vf inverse = set1(step > 0 ? 1.f / step : 0.f);
  vi total = iset1(0);
  for (int c = 0; c < dim; c += 2 * W) {
    const vi a = to_int(load(x + c) * inverse), b = to_int(load(x + c + W) * inverse);
    total = iadd(total, iadd(a, b));
    istore(out.word[r] + c, to_words(a, b));
  }
  out.step[r] = step;
  return to_float(total) * set1(step);
}

KTX_INLINE vi broadcast_pair(const int16_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return iset1(x);
}

// Codes of channels 4*d4 + I and 4*d4 + I + 2 (+ K*D/4) as two int16 a lane.
template <int BITS, int K, int I>
KTX_INLINE vi word_codes(const KeyWords<BITS>& w) {
  if (BITS == 8) {
    const vi bytes = KeyWords<BITS>::template bytes<K>(w);
    return I ? srl16_8(bytes) : iand(bytes, iset1(0x00FF00FF));
  }
  constexpr int shift = 8 * I + (K < 2 ? 0 : 4);
  const vi x = K & 1 ? w.odd : w.even;
  return shift == 12 ? srl16_12(x) : iand(srl<shift == 12 ? 0 : shift>(x), iset1(0x000F000F));
}

template <int NR, int BITS>
static void integer_dots(const HeadPage& page, const HeadPage& next, const WordQuery<NR>& q, const float* bias,
                         int tokens, int from, int to, int dim, float* dots) {
  constexpr int TV = 2;
  const int words = dim / 16;
  for (int t = from; t < to; t += TV * W) {
    vi sum[NR][TV];
    unroll<NR * TV>([&](auto n) KTX_LAMBDA { sum[n.value / TV][n.value % TV] = iset1(0); });
    for (int d4 = 0; d4 < words; d4++) {
      KeyWords<BITS> w[TV];
      const int word = d4 * tokens + t;
      unroll<TV>([&](auto v) KTX_LAMBDA {
        w[v.value] = KeyWords<BITS>::read(page, word + v.value * W, words * tokens);
      });
      fetch_words<BITS, TV>(next, word, words * tokens);
      unroll<8>([&](auto n) KTX_LAMBDA {
        constexpr int k = n.value / 2, i = n.value % 2;
        vi code[TV];
        unroll<TV>([&](auto v) KTX_LAMBDA { code[v.value] = word_codes<BITS, k, i>(w[v.value]); });
        unroll<NR>([&](auto r) KTX_LAMBDA {
          const vi x = broadcast_pair(q.word[r.value] + k * (dim / 4) + 4 * d4 + 2 * i);
          unroll<TV>([&](auto v) KTX_LAMBDA {
            vi& s = sum[r.value][v.value];
            s = dot_words(s, code[v.value], x);
          });
        });
      });
    }
    unroll<NR * TV>([&](auto n) KTX_LAMBDA {
      constexpr int r = n.value / TV, v = n.value % TV;
      store(dots + r * kScoreStride + t + v * W, fmadd(to_float(sum[r][v]), set1(q.step[r]), set1(bias[r])));
    });
  }
}

#else

constexpr bool kHasIntegers = false;
constexpr bool can_use_words(int, int) { return false; }
template <int NR>
KTX_INLINE vf round_query(WordQuery<NR>&, int, const float*, int, float) { return zero(); }
template <int NR, int BITS>
static void integer_dots(const HeadPage&, const HeadPage&, const WordQuery<NR>&, const float*, int, int, int, int,
                         float*) {}

#endif

// ---- scores -------------------------------------------------------------------------------------------------------

// Scores of tokens from .. to of a sealed page, of channels `first` .. `last` alone, to dots[r][kScoreStride]; total[r] is
// the sum of the query's. `scales`: one a channel, which go into the query; null: codes are taken as they are. `integer`
// (16-bit models) allows the integer way.
template <int NR, int BITS>
static void score_codes(const Layout& lay, const HeadPage& page, const HeadPage& next, bool integer, const float* q,
                        const Scales* scales, int first, int last, int from, int to, float* scratch, float* total,
                        float* dots) {
  const int dim = lay.head_dim, padded = (dim + 2 * W - 1) / (2 * W) * (2 * W);
  integer = integer && can_use_words(BITS, dim);
  WordQuery<NR> words;
  vf low[NR], sum[NR], top[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA { low[r.value] = sum[r.value] = top[r.value] = zero(); });
  for (int c = 0; c < dim; c += W) {
    const Affine own = scales ? scales->vector(c) : Affine{set1(c >= first && c < last ? 1.f : 0.f), zero()};
    unroll<NR>([&](auto r) KTX_LAMBDA {
      const vf x = load(q + r.value * kQueryStride + c), y = x * own.scale;
      low[r.value] = fmadd(x, own.minimum, low[r.value]);
      sum[r.value] = sum[r.value] + y;
      top[r.value] = vmax(as_float(iand(as_int(y), iset1(0x7FFFFFFF))), top[r.value]);
      store(scratch + r.value * kQueryStride + c, y);
    });
  }
  float bias[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA {
    vf b = low[r.value];
    if (integer) {
      float* y = scratch + r.value * kQueryStride;
      for (int c = dim; c < padded; c += W) store(y + c, zero());
      const vf kept = round_query(words, r.value, y, dim, hmax(top[r.value]));
      // Codes average half their range: what rounding took comes back as that constant, the rest is noise.
      b = fmadd(sum[r.value] - kept, set1(float((1 << BITS) - 1) / 2), b);
    }
    bias[r.value] = hsum(b);
    if (!scales) total[r.value] = hsum(sum[r.value]);
  });
  if (integer) integer_dots<NR, BITS>(page, next, words, bias, lay.page_size, from, to, dim, dots);
  else key_dots<NR, BITS>(page, next, scratch, bias, lay.page_size, from, to, dim, dots);
}

// Scores of one sealed page. `part` [NR][kScoreStride] is scratch where a token has several scales.
template <int NR, int BITS>
static void score_sealed(const Layout& lay, const HeadPage& page, const HeadPage& next, bool integer, const float* q,
                         float* scratch, float* part, float* scores) {
  const int tokens = lay.page_size, dim = lay.head_dim, group = lay.k_group;
  const bool by_channel = lay.k_method == kPerChannel, by_token = lay.k_method == kPerToken;
  alignas(64) float scale[kMaxPage], minimum[kMaxPage];
  float total[NR];
  for (int i = 0, parts = (by_channel ? tokens : dim) / group; i < parts; i++) {  // of the tokens, or of the channels
    const Scales scales(page.k, by_channel ? i * dim : 0);
    const int at = i * group, end = at + group;
    float* dots = i && !by_channel ? part : scores;
    if (by_channel) score_codes<NR, BITS>(lay, page, next, integer, q, &scales, 0, dim, at, end, scratch, total, dots);
    else score_codes<NR, BITS>(lay, page, next, integer, q, nullptr, at, end, 0, tokens, scratch, total, dots);
    if (by_channel) continue;
    if (by_token) expand_column(scales, i, parts, 0, tokens, scale, minimum);
    Affine own{};
    if (!by_token) own = scales.one(0);
    for (int r = 0; r < NR; r++)
      for (int t = 0; t < tokens; t += W) {
        if (by_token) own = {load(scale + t), load(minimum + t)};
        const vf x = fmadd(load(dots + r * kScoreStride + t), own.scale, own.minimum * set1(total[r]));
        float* s = scores + r * kScoreStride + t;
        store(s, i ? x + load(s) : x);
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

}  // namespace KTX_NS
