// Prefill over pages that are not all resident: a group of blocks walks its pages together, from the first to the last, and
// what each block has summed so far waits in memory between waves. A page that several blocks read is brought once for the
// group. The same tiles in the same order as `prefill_task`, so the same result to the bit.
#pragma once
#include <new>

#include "prefill.h"
#include "waves.h"

namespace KTX_NS {

constexpr int64_t kGroupBytes = 64 << 20;  // of what the blocks of a group keep

// Pages behind which a tile ends too: at most 8, sizes being multiples of 32.
KTX_INLINE int tile_pages(int page_size) {
  int pages = 1;
  while (pages * page_size % kTile) pages++;
  return page_size % kTile == 0 ? 1 : pages;
}

struct PagedBlocks {
  const AttentionArgs& a;
  Waves& waves;
  const int step = tile_pages(a.layout->page_size);  // no wave may part these
  Block* blocks = nullptr;
  BlockChoice* choices = nullptr;
  Sweep* sweeps = nullptr;
  float** states = nullptr;
  int num_blocks = 0;

  // Whether blocks choose without asking for pages: then a thread does it at once, in its own memory.
  const bool at_once = !a.sparse || a.sparse->scoring == kScoreHeader || a.residency->scoring;

  // Bytes that a block keeps: its sums, its list, its estimates if it has to wait with them.
  int64_t bytes_of(const Block& b) const {
    BlockChoice choice(a, b.row, b.kv_head, b.q_begin, b.q_end);
    const bool waits = choice.count && !at_once;
    return 4 * (b.state_floats(a) + choice.pages + 64 + (waits ? choice.lay_out(nullptr) + 64 : 0));
  }

  int most_blocks() const { return max_of(1, waves.limit() / (2 * step)); }

  void run(int threads, char* memory) {
    for (int i = 0; i < num_blocks; i++) {
      Block& b = blocks[i];
      new (choices + i) BlockChoice(a, b.row, b.kv_head, b.q_begin, b.q_end);
      const auto take = [&](int64_t words) {
        char* p = memory;
        memory += (words * 4 + 63) / 64 * 64;
        return p;
      };
      states[i] = reinterpret_cast<float*>(take(b.state_floats(a)));
      b.list = reinterpret_cast<int32_t*>(take(choices[i].pages));
      sweeps[i] = {nullptr, b.row, choices[i].first, 0, 0, 0};
      if (choices[i].count && !at_once) sweeps[i].list = reinterpret_cast<int32_t*>(take(choices[i].lay_out(nullptr)));
    }
    if (!at_once) probe(threads);
    if (waves.failed()) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int i = 0; i < num_blocks; i++) begin(i, thread_workspace());
    while (waves.next(sweeps, num_blocks, step, false)) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
      for (int i = 0; i < num_blocks; i++) {
        const Block& b = blocks[i];
        Workspace& ws = thread_workspace();
        PageRef* pages = ws.get<PageRef>(kPrefill1, b.num_pages);
        b.with_prefill(a, states[i], ws, [&](auto& prefill, auto dt) {
          b.attend(a, prefill, dt, sweeps[i].at, sweeps[i].to, pages);
        });
      }
    }
    if (waves.failed()) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int i = 0; i < num_blocks; i++) {
      Workspace& ws = thread_workspace();
      PageRef* pages = ws.get<PageRef>(kPrefill1, blocks[i].num_pages);
      blocks[i].with_prefill(a, states[i], ws, [&](auto& prefill, auto dt) { blocks[i].end(a, prefill, dt, pages); });
    }
  }

  // Estimates by headers, then by plane 0, whose pages come in waves.
  void probe(int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int i = 0; i < num_blocks; i++) {
      if (!choices[i].count) continue;
      int32_t* probes = blocks[i].list + choices[i].first;
      float* memory = reinterpret_cast<float*>(const_cast<int32_t*>(sweeps[i].list));
      sweeps[i].count = choices[i].estimate(memory, probes, thread_workspace());
      sweeps[i].list = probes;
    }
    while (waves.next(sweeps, num_blocks, 1, true)) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
      for (int i = 0; i < num_blocks; i++)
        if (choices[i].count) choices[i].probe(sweeps[i].list, sweeps[i].at, sweeps[i].to, thread_workspace());
    }
  }

  void begin(int i, Workspace& ws) {
    Block& b = blocks[i];
    const int n = at_once || !choices[i].count ? block_pages(choices[i], b.list, ws)
                                               : choices[i].choose_into(b.list, b.list + choices[i].first, ws);
    b.sort_pages(a, n, ws);
    sweeps[i] = {b.list, b.row, 0, b.num_sealed, 0, 0};
    b.with_prefill(a, states[i], ws, [&](auto& prefill, auto dt) { prefill.template begin<dt.value>(); });
  }
};

}  // namespace KTX_NS
