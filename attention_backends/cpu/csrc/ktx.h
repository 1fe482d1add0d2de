// The C ABI between Python (ctypes) and the kernels: plain structs of fixed-width fields, no torch, no C++ types.
// `kv_quant/layout.py` describes the page format; `Layout` carries its numbers here. Every struct is mirrored, field
// by field, in `attention_backends/cpu/abi.py`, and `ktx_abi_size` lets a test compare the sizes.
#pragma once
#include <cstdint>

#define KTX_API extern "C" __attribute__((visibility("default")))
#define KTX_ABI_VERSION 4

namespace ktx {

enum Dtype : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };
enum Method : int32_t { kPerChannel = 0, kPerToken = 1, kPerHead = 2 };

struct Section {        // bytes; per kv head runs one after the other from `offset`
  int64_t offset, head_bytes;
};

struct Layout {
  int32_t page_size, num_kv_heads, head_dim;
  int32_t k_bits, v_bits;              // 4, 8, or 16: pages in the model's dtype
  int32_t k_method, v_method, v_rotate;
  int32_t k_group, v_group;            // that share a scale: by channel, tokens; by token, channels (by head, all)
  int32_t scale_bits, reserved;        // of scales and minima: 16, or 8 beside `base`
  int64_t header_head_bytes, header_bytes, payload_bytes;
  Section k_base, k_scale, k_min, k_plane0, k_plane1, k_low, v_base, v_scale, v_min, v_codes;
};

// Pages to seal: page i's tokens start at element `src[i]` of k and v; its bytes go to header + block*header_stride and
// payload + slot*payload_stride.
struct SealArgs {
  const Layout* layout;
  const void *k, *v;
  int32_t dtype, num_pages;
  int64_t token_stride, head_stride;   // elements, of k and of v alike
  const int64_t* src;                  // [num_pages] element offsets
  const int32_t *block, *slot;         // [num_pages]; slot may be null: slot = block
  uint8_t *header, *payload;
  int64_t header_stride, payload_stride;
  int32_t num_threads, reserved;
};

// Fresh rows into open pages: row `token[i]` of k and v goes to offset `offset[i]` of open page `slot[i]`, laid out
// K[num_kv_heads][page_size][head_dim] then V, in the model's dtype.
struct AppendArgs {
  const Layout* layout;
  const void *k, *v;
  int32_t dtype, num_rows;
  int64_t token_stride, head_stride;   // elements
  const int32_t *token, *slot, *offset;
  uint8_t* open_pages;
  int64_t open_stride;                 // bytes between open pages
  int32_t num_threads, reserved;
};

enum Scoring : int32_t { kScoreHeader = 0, kScoreCascade = 1, kScoreCodes = 2 };
enum Select : int32_t { kSelectCoverage = 0, kSelectCount = 1 };

// Which pages a query reads: `attention_backends/selection/settings.py` says what each setting means. Keys must be sealed,
// for scoring by codes with scales per channel.
struct SparseArgs {
  const uint8_t* headers;              // [num_blocks]
  int64_t header_stride;               // bytes
  int32_t window, sink_pages;          // tokens; pages
  int32_t scoring, select;
  int32_t min_pages, max_pages;        // kSelectCount: max_pages, or `ratio` of the context's pages if that isn't 0
  float coverage, ratio, share;
  float spread_low, spread_high, explained_low, explained_high;  // how `cascade` deepens
  int32_t reserved;
  float* dropped;                      // [tokens, num_kv_heads] estimated share of unread mass, or null
  int32_t* pages_read;                 // [tokens, num_kv_heads], or null
  int32_t* chosen;                     // [tokens, num_kv_heads, chosen_stride], or null: candidates taken, ascending, -1
  int64_t chosen_stride;               // behind the last; a block of prefill queries fills its first token's row alone
  float* depth;                        // [tokens, num_kv_heads] share of the candidates whose plane 0 was read, or null
};

// Where not all pages are resident: before a wave of tasks reads sealed pages, `fetch` makes those of `count` distinct
// blocks (at most `limit`) readable through payload_slot, alone the bytes up to k_plane1 if `scoring`, until its next
// call. Called by the thread that called the kernel. A result other than 0 ends the kernel, which then returns -2.
// It isn't called for waves whose slots all have `slot_state` resident and `slot_parts` whole; theirs get 1 in `touched`.
// The first bytes of every page may also lie somewhere else (`scoring`), and are then never brought.
struct Residency {
  int32_t (*fetch)(void* context, const int32_t* blocks, int32_t count, int32_t scoring);
  void* context;
  int32_t limit, num_blocks;           // limit: at least 16
  const uint8_t* scoring;              // [num_blocks], or null
  int64_t scoring_stride;              // bytes
  const uint8_t *slot_state, *slot_parts;  // [num_slots], or null
  uint8_t* touched;                    // [num_slots]
  int32_t resident, whole;
};

// Causal attention of a mixed batch. Row r has queries cu_q[r] .. cu_q[r+1] (its fresh tokens, whose keys and values
// are rows of k and v) behind context[r] older tokens in pages block_table[r][0 ..]. A page is read from the open
// pages, in the model's dtype, if open_slot[block] >= 0, else from its payload.
struct AttentionArgs {
  const Layout* layout;
  const void *q, *k, *v;               // [tokens, heads, head_dim]; k and v may be null: context only
  void* out;                           // [tokens, num_q_heads, head_dim], model dtype
  float* lse;                          // [tokens, num_q_heads] natural log-sum-exp, or null
  int32_t dtype, num_q_heads, num_rows, table_stride;
  int64_t q_token_stride, kv_token_stride, out_token_stride;  // elements; heads are contiguous, head_dim apart
  const int32_t *cu_q, *context, *block_table;
  const int32_t* open_slot;            // [num_blocks]; -1: sealed
  const int32_t* payload_slot;         // [num_blocks], or null: slot = block
  const uint8_t *payload, *open_pages;
  int64_t payload_stride, open_stride; // bytes
  float scale, softcap;                // softcap 0: none
  int32_t num_threads, reserved;       // 0: OpenMP's default
  const SparseArgs* sparse;            // null: dense
  const Residency* residency;          // null: all pages are resident
};

// One ISA's kernels. Each kernels_*.cpp defines the table of its own namespace.
struct Kernels {
  const char* name;
  int32_t (*seal)(const SealArgs*);
  int32_t (*append)(const AppendArgs*);
  int32_t (*attention)(const AttentionArgs*);
};

}  // namespace ktx

KTX_API int32_t ktx_abi_version();
KTX_API int64_t ktx_abi_size(int32_t which);           // sizeof: 0 Layout, 1 SealArgs, 2 AppendArgs, 3 AttentionArgs, 4 SparseArgs, 5 Residency
KTX_API const char* ktx_isa();                         // "avx512", "avx2" or "portable", as dispatched
KTX_API int32_t ktx_set_isa(const char* name);         // for tests: 0, or -1 if this CPU or build lacks it
// All return 0, or a negative code for a shape the build cannot serve (Python checks first and raises by name).
KTX_API int32_t ktx_seal(const ktx::SealArgs*);
KTX_API int32_t ktx_append(const ktx::AppendArgs*);
KTX_API int32_t ktx_attention(const ktx::AttentionArgs*);
