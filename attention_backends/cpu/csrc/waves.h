// Pages that are not all resident (`Residency`): tasks run in waves, each of which names the pages that it reads before it
// starts. Waves cut the list of tasks, or tasks between tiles, so no result depends on them.
#pragma once
#include "common.h"

namespace KTX_NS {

constexpr int kLeastWave = 16;  // distinct pages that a wave must be able to hold: those of one split

// One task's pages in order, page `list[i] + shift` of its row; this wave's are at .. to.
struct Sweep {
  const int32_t* list;
  int row, shift, count, at, to;
};

class Waves {
 public:
  // All by one thread, the caller of the kernel. Without a residency every wave holds everything.
  Waves(const AttentionArgs& args, Workspace& ws) : a(args), r(args.residency) {
    if (!r) return;
    stamps = ws.get<int32_t>(kWaveStamps, r->num_blocks);
    std::memset(stamps, 0, sizeof(int32_t) * r->num_blocks);
    pages = ws.get<int32_t>(kWavePages, r->limit);
  }

  bool failed() const { return stopped; }
  int limit() const { return r->limit; }

  // Brings the pages of the next tasks of begin .. end, as many as fit; returns the end of that wave. `visit(i, f)` calls
  // f(row, page) for each page that task i reads.
  template <class F>
  int next(int begin, int end, bool scoring, F visit) {
    if (stopped || all_there(scoring)) return stopped ? begin : end;
    start();
    int i = begin;
    for (; i < end; i++) {
      const int kept = count;
      bool fits = true;
      visit(i, [&](int row, int page) { fits = fits && add(row, page, scoring); });
      if (!fits) {
        count = kept;  // stamps of the rest are harmless: at most pages that nobody needs count as there
        break;
      }
    }
    return fetch(scoring) ? i : begin;
  }

  // Moves all sweeps on to the wave that fetches their next pages, the lowest first; false when all have ended. All but
  // the last wave of a sweep end at a multiple of `step` of its pages.
  bool next(Sweep* sweeps, int n, int step, bool scoring) {
    bool any = false;
    for (int i = 0; i < n; i++) {
      sweeps[i].at = sweeps[i].to;
      if (all_there(scoring)) sweeps[i].to = sweeps[i].count;
      any = any || sweeps[i].at < sweeps[i].count;
    }
    if (all_there(scoring) || stopped || !any) return any && !stopped;
    start();
    for (bool fits = true; fits;) {
      int page = INT32_MAX;
      for (int i = 0; i < n; i++)
        if (sweeps[i].to < sweeps[i].count) page = min_of(page, sweeps[i].list[sweeps[i].to]);
      if (page == INT32_MAX) break;
      for (int i = 0; fits && i < n; i++) {
        Sweep& s = sweeps[i];
        if (s.to == s.count || s.list[s.to] != page) continue;
        fits = add(s.row, page + s.shift, scoring);
        s.to += fits;
      }
    }
    for (int i = 0; i < n; i++)
      if (sweeps[i].to < sweeps[i].count) sweeps[i].to -= (sweeps[i].to - sweeps[i].at) % step;
    return fetch(scoring);
  }

 private:
  const AttentionArgs& a;
  const Residency* r;
  int32_t *stamps = nullptr, *pages = nullptr;
  int32_t now = 0, count = 0;
  bool stopped = false;

  bool all_there(bool scoring) const { return !r || (scoring && r->scoring); }

  void start() { now++, count = 0; }

  bool add(int row, int page, bool scoring) {
    const int block = a.block_table[int64_t(row) * a.table_stride + page];
    if ((a.open_slot[block] >= 0 && !scoring) || stamps[block] == now) return true;  // scores come from codes alone
    if (count == r->limit) return false;
    stamps[block] = now;
    pages[count++] = block;
    return true;
  }

  bool all_resident() const {
    if (!r->slot_state) return false;
    for (int i = 0; i < count; i++) {
      const int slot = a.payload_slot[pages[i]];
      if (slot < 0 || r->slot_state[slot] != r->resident || r->slot_parts[slot] != r->whole) return false;
    }
    for (int i = 0; i < count; i++) r->touched[a.payload_slot[pages[i]]] = 1;
    return true;
  }

  bool fetch(bool scoring) {
    stopped = count && !all_resident() && r->fetch(r->context, pages, count, scoring);
    return !stopped;
  }
};

}  // namespace KTX_NS
