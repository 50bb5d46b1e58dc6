// A layer's cache, and the rows of a step as tasks on it: what a call of attention is made of.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ahead.hpp"
#include "attention.hpp"
#include "bindings.hpp"
#include "team.hpp"

namespace phalanx {

// Some of a step's rows.
struct Rows {
  std::size_t first, count;
};

struct AttentionLayer {
  AttentionCall call{};
  std::int64_t blocks;
  std::vector<int> group_start, head_order;

  AttentionLayer(const std::vector<int>& kv_head_of, int kv_heads, int dim, double scale, int window, double soft_cap,
                 int cache_type, bool tiled, int block_size, std::int64_t blocks, Address key, Address value)
      : blocks(blocks), group_start{0} {
    for (int kv = 0; kv < kv_heads; ++kv) {
      for (std::size_t head = 0; head < kv_head_of.size(); ++head)
        if (kv_head_of[head] == kv) head_order.push_back(static_cast<int>(head));
      group_start.push_back(static_cast<int>(head_order.size()));
    }
    if (head_order.size() != kv_head_of.size()) throw std::invalid_argument("a query head reads a KV head that is not there");
    if (!(scale > 0)) throw std::invalid_argument("the scale has to be above zero");
    call.heads = static_cast<int>(kv_head_of.size());
    call.kv_heads = kv_heads;
    call.dim = dim;
    call.group_start = group_start.data();
    call.head_order = head_order.data();
    call.scale = static_cast<float>(scale);
    call.soft_cap = static_cast<float>(soft_cap);
    call.window = window;
    call.cache_type = static_cast<CacheType>(cache_type);
    call.tiled = tiled;
    call.block_size = block_size;
    call.key_cache = at_address<char>(key);
    call.value_cache = at_address<char>(value);
  }
  AttentionLayer(const AttentionLayer&) = delete;
};

// The tasks of some rows of a step for layers of one kind; of several threads, the costliest first.
struct AttentionTasks {
  int window;
  std::vector<int> group_start;
  int threads;
  Rows rows;

  struct Split {
    AttentionTask whole;
    std::size_t at;  // rows of span results before this one's
    int pieces;
  };
  std::vector<AttentionTask> pieces;
  std::vector<Split> splits;
  std::unique_ptr<std::atomic<int>[]> left;  // pieces of each split
  std::size_t part_rows = 0;
  std::vector<std::pair<int, int>> writes;  // (first token, count): keys and values stored before the tasks run
  int most_rows = 1;
};

class AttentionPlan {
 public:
  AttentionPlan(std::vector<int> query_start, std::vector<int> contexts, Address tables, int table_width, Address slots,
                int block_size)
      : starts_(std::move(query_start)), contexts_(std::move(contexts)), tables_(at_address<std::int32_t>(tables)),
        slots_(at_address<std::int64_t>(slots)), width_(table_width), block_size_(block_size) {
    if (starts_.size() != contexts_.size() + 1 || starts_[0] != 0 || block_size < 1)
      throw std::invalid_argument("query_start has to have one entry more than context_lens, and to begin with 0");
    for (std::size_t row = 0; row < contexts_.size(); ++row) {
      const int count = starts_[row + 1] - starts_[row], context = contexts_[row];
      if (count < 0 || context < count || context > static_cast<std::int64_t>(width_) * block_size)
        throw std::invalid_argument("a row's tokens do not fit its context, or its context its blocks");
      const int used = count ? (context + block_size - 1) / block_size : 0;
      for (int i = 0; i < used; ++i) note(tables_[row * width_ + i]);
    }
    for (int token = 0; token < starts_.back(); ++token) note(slots_[token] < 0 ? -1 : slots_[token] / block_size);
  }
  AttentionPlan(const AttentionPlan&) = delete;

  int tokens() const { return starts_.back(); }

  // `call` completed by the step's tables. Throws where they point outside the layer's cache.
  AttentionCall on(const AttentionLayer& layer) const {
    if (lowest_ < 0 || highest_ >= layer.blocks || block_size_ != layer.call.block_size)
      throw std::invalid_argument("the step uses blocks that the cache does not have");
    AttentionCall call = layer.call;
    call.tables = tables_;
    call.table_width = width_;
    call.slots = slots_;
    return call;
  }

  // For some of the step's tokens; the keys and values of those before them are in the cache by the time they run.
  AttentionTasks& tasks(const AttentionLayer& layer, Rows rows) {
    const int threads = team_size();
    for (AttentionTasks& tasks : tasks_)
      if (tasks.window == layer.call.window && tasks.threads == threads && tasks.rows.first == rows.first &&
          tasks.rows.count == rows.count && tasks.group_start == layer.group_start)
        return tasks;
    AttentionTasks& made = tasks_.emplace_back();
    make(layer, threads, rows, made);
    return made;
  }
  // From now on products may fetch what `layer` reads; null: nothing.
  void look_ahead(const AttentionLayer* layer);
  Ahead& ahead() { return ahead_; }
  Rows all() const { return {0, static_cast<std::size_t>(tokens())}; }

 private:
  void note(std::int64_t block) {
    lowest_ = std::min(lowest_, block);
    highest_ = std::max(highest_, block);
  }

  const std::vector<std::int32_t>& blocks_read(int window);
  void make(const AttentionLayer& layer, int threads, Rows rows, AttentionTasks& made) const;

  std::vector<int> starts_, contexts_;
  const std::int32_t* tables_;
  const std::int64_t* slots_;
  int width_, block_size_;
  std::int64_t lowest_ = 0, highest_ = 0;
  std::list<AttentionTasks> tasks_;
  // Blocks that are read, in the order of the rows, with one window; what is fetched of them.
  std::vector<std::pair<int, std::vector<std::int32_t>>> read_;
  Ahead ahead_;
};

// Norm and rotation of query and key, the write of the cache, attention: [T, (heads + 2 kv heads) dim] to [T, heads dim],
// both of `type`, of which only these rows are read and written. `norm_type` and `table_type`: -1 for none.
void attend_merged(const AttentionLayer& layer, AttentionPlan& plan, Rows rows, Address qkv, int type,
                   Address query_norm, Address key_norm, int norm_type, double eps, Address cos, Address sin,
                   int table_type, int rope_dim, Address factor, Address out);

}  // namespace phalanx
