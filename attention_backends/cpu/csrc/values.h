// Weighted sums of values: lanes are channels, for INT4 codes in the order in which the bytes unpack.
#pragma once
#include "keys.h"

namespace KTX_NS {

constexpr int kSums = W == 16 ? 16 : 8;  // accumulators that fit the register file beside the codes

constexpr int nibbles_at_once(int vectors) {
  return vectors * 8 <= kSums ? 8 : vectors * 4 <= kSums ? 4 : vectors * 2 <= kSums ? 2 : 1;
}

// Sums over packed codes stay in the order in which a row's dwords unpack: vector of dwords, code within, lane.
KTX_INLINE int permuted_width(int dim) {  // the most that either width of codes needs
  const auto whole = [](int n) { return (n + W - 1) / W * W; };
  return max_of(whole(dim / 8) * 8, whole(dim / 4) * 4);
}

// f(index, channel) for every sum.
template <int BITS, class F>
KTX_INLINE void each_channel(int dim, F f) {
  constexpr int N = 32 / BITS;
  for (int v = 0; v * W < dim / N; v++)
    for (int n = 0; n < N; n++) {
      const int lanes = min_of(W, dim / N - v * W), index = (v * N + n) * W, first = v * W * N;
      for (int lane = 0; lane < lanes; lane++)
        f(index + lane, BITS == 8 ? first + lane * 4 + n : first + lane / 2 * 16 + lane % 2 * 4 + n / 2 + n % 2 * 8);
    }
}

// acc[r][permuted channel] += sum_t w[r][t] * code[t][channel] of INT4 codes, tokens `row` bytes apart.
template <int NR>
static void add_values4(const uint8_t* codes, const uint8_t* next, int tokens, int row, int dim, const float* w,
                        float* acc) {
  constexpr int NB = nibbles_at_once(NR);
  const int dwords = dim / 8;
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
        if (first == 0 && v == 0) prefetch_run(next + t * row, dim / 2);
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

// The same over rows, in their natural order, whose W channels at (t, c) `read` returns: INT8 codes, plain values.
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
static void add_values8(const uint8_t* codes, const uint8_t* next, int tokens, int row, int dim, const float* w,
                        float* acc) {
  add_rows<NR>([&](int t, int c) KTX_LAMBDA {
    if (c % 64 == 0) fetch(next + t * row + c);
    return u8_to_float(codes + t * row + c);
  }, tokens, dim, w, acc);
}

// ---- integers -----------------------------------------------------------------------------------------------------

// Weights of one page as int16, step[r] apart. What rounding left out of their sum goes to `lost`.
template <int NR>
struct WordWeights {
  alignas(64) int16_t word[NR][kMaxPage];
  float step[NR], lost[NR];
};

#if defined(KTX_HAS_WORD_DOTS)

KTX_INLINE vi low_halves(vi a, vi b) {  // int16 pairs (a's low, b's low)
#if defined(__AVX512F__)
  return pick(iset1(0xFFFF), a, sll<16>(b));
#else
  return _mm256_blend_epi16(a, sll<16>(b), 0xAA);
#endif
}
KTX_INLINE vi high_halves(vi a, vi b) {
#if defined(__AVX512F__)
  return pick(iset1(0xFFFF), srl<16>(a), b);
#else
  return _mm256_blend_epi16(srl<16>(a), b, 0xAA);
#endif
}

template <int NR>
KTX_INLINE void round_weights(WordWeights<NR>& out, const float* w, int tokens) {
  vf top[NR];
  unroll<NR>([&](auto r) KTX_LAMBDA {
    top[r.value] = zero();
    for (int t = 0; t < tokens; t += W) top[r.value] = vmax(load(w + r.value * kScoreStride + t), top[r.value]);
  });
  unroll<NR>([&](auto r) KTX_LAMBDA {
    const float* x = w + r.value * kScoreStride;
    const float step = hmax(top[r.value]) / 32767.f;
    const vf inverse = set1(step > 0 ? 1.f / step : 0.f);
    vi total = iset1(0);
    vf sum = zero();
    for (int t = 0; t < tokens; t += 2 * W) {
      const vf y = load(x + t), z = load(x + t + W);
      const vi a = to_int(y * inverse), b = to_int(z * inverse);
      sum = sum + (y + z);
      total = iadd(total, iadd(a, b));
      store_low16(reinterpret_cast<uint16_t*>(out.word[r.value]) + t, a);
      store_low16(reinterpret_cast<uint16_t*>(out.word[r.value]) + t + W, b);
    }
    out.step[r.value] = step;
    out.lost[r.value] = hsum(sum - to_float(total) * set1(step));
  });
}

// acc[r][permuted channel] += sum_t w[r][t] * code[t][channel], two tokens to a product.
template <int NR, int BITS>
static void integer_values(const uint8_t* codes, const uint8_t* next, int tokens, int row, int dim,
                           const WordWeights<NR>& w, float* acc) {
  constexpr int N = 32 / BITS, NB = min_of(N / 2, nibbles_at_once(NR));  // codes of a dword; of one pass
  const int dwords = dim / N;
  for (int v = 0; v * W < dwords; v++) {
    const int lanes = min_of(W, dwords - v * W);
    unroll<N / NB>([&](auto pass) KTX_LAMBDA {
      constexpr int first = pass.value * NB % (N / 2);
      constexpr bool high = pass.value * NB >= N / 2;
      vi sum[NR][NB];
      unroll<NR * NB>([&](auto n) KTX_LAMBDA { sum[n.value / NB][n.value % NB] = iset1(0); });
      for (int t = 0; t < tokens; t += 2) {
        const uint8_t* at = codes + t * row + v * W * 4;
        const vi a = iload_first(at, lanes), b = iload_first(at + row, lanes);
        if (pass.value == 0 && v == 0) prefetch_run(next + t * row, row + dim / N * 4);
        const vi both = high ? high_halves(a, b) : low_halves(a, b);
        vi x[NR];
        unroll<NR>([&](auto r) KTX_LAMBDA { x[r.value] = broadcast_pair(w.word[r.value] + t); });
        unroll<NB>([&](auto n) KTX_LAMBDA {
          constexpr int shift = BITS * (first + n.value);
          const vi code = shift + BITS == 16 ? (BITS == 4 ? srl16_12(both) : srl16_8(both))
                                             : iand(srl<shift>(both), iset1(BITS == 4 ? 0x000F000F : 0x00FF00FF));
          unroll<NR>([&](auto r) KTX_LAMBDA {
            sum[r.value][n.value] = dot_words(sum[r.value][n.value], code, x[r.value]);
          });
        });
      }
      float* mine = acc + (v * N + pass.value * NB) * W;
      unroll<NR * NB>([&](auto n) KTX_LAMBDA {
        float* at = mine + n.value / NB * kQueryStride + n.value % NB * W;
        store(at, fmadd(to_float(sum[n.value / NB][n.value % NB]), set1(w.step[n.value / NB]), load(at)));
      });
    });
  }
}

#else

template <int NR>
KTX_INLINE void round_weights(WordWeights<NR>&, const float*, int) {}
template <int NR, int BITS>
static void integer_values(const uint8_t*, const uint8_t*, int, int, int, const WordWeights<NR>&, float*) {}

#endif

template <int NR, int DT>
static void add_plain(const void* v, int64_t stride, int tokens, int dim, const float* w, float* acc) {
  add_rows<NR>([&](int t, int c) KTX_LAMBDA { return load_as<DT>(v, t * stride + c); }, tokens, dim, w, acc);
}

}  // namespace KTX_NS
