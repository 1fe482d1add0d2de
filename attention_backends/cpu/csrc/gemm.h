// The matrix product of prefill: C[6 rows][NV vectors] over operands of 32-bit words. A word is one fp32 number, or two
// bf16 or int16 numbers that are neighbours along the summed dimension; only the multiply-add differs (`Mac`).
#pragma once
#include "score.h"

#define KTX_MEMBER inline __attribute__((always_inline))

namespace KTX_NS {

struct MacF32 {
  static constexpr int kPack = 1;  // numbers in a word
  static constexpr bool kIntegers = false;
  using Sum = vf;
  KTX_INLINE vf step(vf acc, vf a, vf b) { return fmadd(a, b, acc); }
};
#if defined(__AVX512BF16__)
#define KTX_HAS_BF16_DOT 1
struct MacBF16 {
  static constexpr int kPack = 2;
  static constexpr bool kIntegers = false;
  using Sum = vf;
  KTX_INLINE vf step(vf acc, vf a, vf b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
};
#endif
struct MacWords {  // words are pairs of int16, sums int32
  static constexpr int kPack = 2;
  static constexpr bool kIntegers = true;
  using Sum = Sums;
  KTX_INLINE Sum step(Sum acc, vf a, vf b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    vi product;  // one by one: the compiler would take all products first, and spill
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(a), "x"(b));
    return acc;
#else
    return (Sum)dot_words((vi)acc, as_int(a), as_int(b));
#endif
  }
};

// Rows a block and vectors a strip: 24 of 32 registers accumulate with AVX-512, 12 of 16 with AVX2. B lies in strips of
// kStrip columns, [strip][k][kStrip], so that one strip stays in the first-level cache while A passes by.
constexpr int kRows = 6;
constexpr int kStripVectors = W == 16 ? 4 : 2;
constexpr int kStrip = kStripVectors * W;

template <class Mac, int NV, bool ADD>
KTX_INLINE void multiply_block(const float* a, int64_t lda, const float* b, int k_words, float* c, int64_t ldc,
                               const float* keep, const float* gain) {
  using Sum = typename Mac::Sum;  // as many bits as vf
  Sum acc[kRows][NV];
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < NV; j++)
      acc[i][j] = (Sum)(ADD && !Mac::kIntegers ? load(c + i * ldc + j * W) * set1(keep[i]) : zero());
  for (int k = 0; k < k_words; k++, b += kStrip) {
    vf column[NV];
    for (int j = 0; j < NV; j++) column[j] = load(b + j * W);
    for (int i = 0; i < kRows; i++) {
      const vf x = set1(a[i * lda + k]);
      for (int j = 0; j < NV; j++) acc[i][j] = Mac::step(acc[i][j], x, column[j]);
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < NV; j++) {
      float* to = c + i * ldc + j * W;
      if (ADD && Mac::kIntegers) store(to, fmadd(to_float((vi)acc[i][j]), set1(gain[i]), load(to) * set1(keep[i])));
      else store(to, (vf)acc[i][j]);
    }
}

// C[rows][columns] = A B, or with ADD, C * keep + A B, by row; A B of integers times `gain` then, else in int32. `rows` a
// multiple of kRows, `columns` of W; A is row-major with `lda` words a row; strips of B are `strip_words` apart.
template <class Mac, bool ADD>
static void multiply(const float* a, int64_t lda, const float* b, int64_t strip_words, int k_words, float* c,
                     int64_t ldc, int rows, int columns, const float* keep = nullptr,
                     const float* gain = nullptr) {
  for (int first = 0; first < columns; first += kStrip, b += strip_words, c += kStrip)
    for (int i = 0; i < rows; i += kRows) {
      const float* ai = a + i * lda;
      float* ci = c + i * ldc;
      switch (min_of(kStrip, columns - first) / W) {
        case 1: multiply_block<Mac, 1, ADD>(ai, lda, b, k_words, ci, ldc, keep + i, gain + i); break;
        case 2: multiply_block<Mac, 2, ADD>(ai, lda, b, k_words, ci, ldc, keep + i, gain + i); break;
#if defined(__AVX512F__)
        case 3: multiply_block<Mac, 3, ADD>(ai, lda, b, k_words, ci, ldc, keep + i, gain + i); break;
        default: multiply_block<Mac, 4, ADD>(ai, lda, b, k_words, ci, ldc, keep + i, gain + i); break;
#endif
      }
    }
}

}  // namespace KTX_NS
