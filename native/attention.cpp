#include <cstdlib>
#include <new>

#include "attention_plan.hpp"

namespace phalanx {
namespace {

constexpr int kRowsPerTask = 48;    // queries (tokens times heads) that share a pass over the keys
constexpr int kTokensPerWrite = 16;
constexpr int kPiecesPerThread = 6;
constexpr std::size_t kCacheParts = 4;  // one of them for what is fetched ahead
constexpr int kReadCost = 8;  // what reading a key and its value costs, in rows of work on it

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// At least `bytes`, aligned to 64, of this thread's own; its contents last until the next call.
template <int WHICH>
char* thread_memory(std::size_t bytes) {
  static thread_local std::unique_ptr<char, Free> memory;
  static thread_local std::size_t have = 0;
  if (bytes > have) {
    have = (bytes + 4095) / 4096 * 4096;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, have)));
    if (!memory) {
      have = 0;
      throw std::bad_alloc();
    }
  }
  return memory.get();
}

}  // namespace

const std::vector<std::int32_t>& AttentionPlan::blocks_read(int window) {
  for (const auto& [read_window, blocks] : read_)
    if (read_window == window) return blocks;
  std::vector<std::int32_t>& blocks = read_.emplace_back(window, std::vector<std::int32_t>()).second;
  const std::int32_t* before = nullptr;  // the row's
  for (std::size_t row = 0; row < contexts_.size(); ++row) {
    const int past = contexts_[row] - (starts_[row + 1] - starts_[row]), oldest = past - window + 1;
    const std::int32_t* own = tables_ + row * width_;
    for (int i = window > 0 && oldest > 0 ? oldest / block_size_ : 0; i * block_size_ < past; ++i)
      if (before == nullptr || before[i] != own[i]) blocks.push_back(own[i]);  // rows with one beginning share it
    before = own;
  }
  return blocks;
}

void AttentionPlan::look_ahead(const AttentionLayer* layer) {
  ahead_ = {};
  if (layer == nullptr) return;
  const AttentionCall& call = layer->call;
  const std::size_t dim = call.dim, bytes = call.cache_type == CacheType::int8  ? dim + 4
                                            : call.cache_type == CacheType::bf16 ? 2 * dim
                                                                                 : 4 * dim;
  const std::vector<std::int32_t>& blocks = blocks_read(call.window);
  ahead_.key = call.key_cache;
  ahead_.value = call.value_cache;
  ahead_.blocks = blocks.data();
  ahead_.block_bytes = bytes * call.kv_heads * call.block_size;
  ahead_.block_fetches = (ahead_.block_bytes + kFetchBytes - 1) / kFetchBytes;
  // No more than may still be in the cache when it is read.
  const std::size_t most = cache_of_a_core() / kCacheParts * team_size() / kFetchBytes;
  ahead_.fetches = std::min(2 * blocks.size() * ahead_.block_fetches, most);
}

void AttentionPlan::make(const AttentionLayer& layer, int threads, Rows rows, AttentionTasks& made) const {
  made.window = layer.call.window;
  made.group_start = layer.group_start;
  made.threads = threads;
  made.rows = rows;
  int largest = 0, smallest = layer.call.heads;
  for (int kv = 0; kv < layer.call.kv_heads; ++kv) {
    const int group = layer.group_start[kv + 1] - layer.group_start[kv];
    largest = std::max(largest, group);
    smallest = std::min(smallest, group);
  }
  std::vector<std::pair<double, AttentionTask>> wholes;
  double all = 0;
  const auto cost_of = [&](const AttentionTask& task) {
    const int group = layer.group_start[task.kv_head + 1] - layer.group_start[task.kv_head];
    int keys = task.position + task.count;
    if (made.window > 0) keys = std::min(keys, made.window + task.count);
    return static_cast<double>(keys) * (task.count * group + kReadCost);
  };
  for (std::size_t row = 0; row < contexts_.size(); ++row) {
    const int first = std::max(starts_[row], static_cast<int>(rows.first));
    const int last = std::min(starts_[row + 1], static_cast<int>(rows.first + rows.count));
    if (first >= last) continue;
    const int count = last - first, context = contexts_[row] - (starts_[row + 1] - last), past = context - count;
    // Few tokens of one span are stored by the task that reads them; more of them by tasks of their own before.
    const bool own_write = smallest > 0 && count <= std::max(1, kRowsPerTask / largest) &&
                           past / kAttentionSpan == (context - 1) / kAttentionSpan;
    if (!own_write)
      for (int at = 0, n; at < count; at += n) {  // from one multiple to the next: two tokens share their values' numbers
        n = std::min(kTokensPerWrite - (past + at) % kTokensPerWrite, count - at);
        made.writes.emplace_back(first + at, n);
      }
    for (int kv = 0; kv < layer.call.kv_heads; ++kv) {
      const int group = layer.group_start[kv + 1] - layer.group_start[kv];
      if (group == 0) continue;
      const int step = own_write ? count : std::max(1, kRowsPerTask / group);
      for (int at = 0; at < count; at += step) {
        AttentionTask task{};
        task.row = static_cast<int>(row);
        task.kv_head = kv;
        task.first = first + at;
        task.count = std::min(step, count - at);
        task.position = past + at;
        const int oldest = made.window > 0 ? std::max(0, task.position - made.window + 1) : 0;
        task.first_span = oldest / kAttentionSpan;
        task.last_span = (task.position + task.count - 1) / kAttentionSpan + 1;
        task.writes = own_write;
        task.split = -1;
        const double cost = cost_of(task);
        all += cost;
        wholes.emplace_back(cost, task);
        made.most_rows = std::max(made.most_rows, task.count * group);
      }
    }
  }
  const double fair = all / (threads * kPiecesPerThread);
  std::vector<std::pair<double, AttentionTask>> pieces;
  for (auto& [cost, task] : wholes) {
    const int spans = task.last_span - task.first_span;
    const int step = std::max(1, static_cast<int>(fair * spans / cost));
    if (threads == 1 || step >= spans) {
      pieces.emplace_back(cost, task);
      continue;
    }
    const int rows = task.count * (layer.group_start[task.kv_head + 1] - layer.group_start[task.kv_head]);
    AttentionTasks::Split split{task, made.part_rows, 0};
    for (int at = task.first_span; at < task.last_span; at += step) {
      AttentionTask piece = task;
      piece.first_span = at;
      piece.last_span = std::min(at + step, task.last_span);
      piece.writes = task.writes && piece.last_span == task.last_span;
      piece.split = static_cast<int>(made.splits.size());
      pieces.emplace_back(cost * (piece.last_span - at) / spans, piece);
      ++split.pieces;
    }
    made.part_rows += static_cast<std::size_t>(rows) * spans;
    made.splits.push_back(split);
  }
  if (threads > 1)  // one alone takes them as they are: a row's heads, whose tiles are neighbours, one after the other
    std::stable_sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& piece : pieces) made.pieces.push_back(piece.second);
  made.left = std::make_unique<std::atomic<int>[]>(made.splits.size());
  for (std::size_t i = 0; i < made.splits.size(); ++i) made.left[i].store(made.splits[i].pieces);
}

namespace {

void run(const AttentionCall& call, AttentionTasks& tasks, bool writes) {
  const Attention& kernels = attention();
  const std::size_t scratch = kernels.scratch_bytes(tasks.most_rows, call.dim);
  if (writes) {
    parallel_for(tasks.writes.size(), [&](std::size_t i) {
      kernels.write(call, tasks.writes[i].first, tasks.writes[i].second, 0, call.kv_heads, thread_memory<0>(scratch));
    });
  }
  const std::size_t part = 16 + (call.dim + 15) / 16 * 16;
  float* parts = nullptr;
  if (tasks.part_rows != 0) parts = reinterpret_cast<float*>(thread_memory<1>(tasks.part_rows * part * 4));
  parallel_for(tasks.pieces.size(), [&](std::size_t i) {
    AttentionTask task = tasks.pieces[i];
    if (!writes) task.writes = 0;
    char* memory = thread_memory<0>(scratch);
    const AttentionTask* next = team_size() == 1 && i + 1 < tasks.pieces.size() ? &tasks.pieces[i + 1] : nullptr;
    if (task.split < 0) {
      kernels.attend(call, task, next, nullptr, memory);
      return;
    }
    const AttentionTasks::Split& split = tasks.splits[task.split];
    const int rows = task.count * (call.group_start[task.kv_head + 1] - call.group_start[task.kv_head]);
    float* first = parts + split.at * part;
    float* own = first + static_cast<std::size_t>(task.first_span - split.whole.first_span) * rows * part;
    kernels.attend(call, task, nullptr, own, memory);
    if (tasks.left[task.split].fetch_sub(1, std::memory_order_acq_rel) == 1) {  // the last one done joins them, in order
      kernels.merge(call, task, split.whole.last_span - split.whole.first_span, first, memory);
      tasks.left[task.split].store(split.pieces, std::memory_order_relaxed);  // for the next layer
    }
  });
}

}  // namespace

void attend_merged(const AttentionLayer& layer, AttentionPlan& plan, Rows rows, Address qkv, int type,
                   Address query_norm, Address key_norm, int norm_type, double eps, Address cos, Address sin,
                   int table_type, int rope_dim, Address factor, Address out) {
  AttentionCall call = plan.on(layer);
  const std::size_t item = type == 1 ? 2 : 4, keys = static_cast<std::size_t>(call.heads) * call.dim,
                    values = keys + static_cast<std::size_t>(call.kv_heads) * call.dim;
  call.type = type;
  call.query = at_address<void>(qkv);
  call.key = at_address<void>(qkv + keys * item);
  call.value = at_address<void>(qkv + values * item);
  call.query_pitch = call.key_pitch = values + static_cast<std::size_t>(call.kv_heads) * call.dim;
  call.norms = norm_type >= 0;
  call.norm_type = norm_type;
  call.query_norm = at_address<void>(query_norm);
  call.key_norm = at_address<void>(key_norm);
  call.eps = static_cast<float>(eps);
  call.table_type = table_type;
  call.rope_dim = table_type < 0 ? 0 : rope_dim;
  call.cos = at_address<void>(cos);
  call.sin = at_address<void>(sin);
  call.factor = at_address<void>(factor);
  call.out = at_address<void>(out);
  run(call, plan.tasks(layer, rows), true);
}

namespace {

void attend_cached(const AttentionLayer& layer, AttentionPlan& plan, Address query, int type, Address out, Address lse) {
  AttentionCall call = plan.on(layer);
  call.type = type;
  call.query = at_address<void>(query);
  call.query_pitch = static_cast<std::size_t>(call.heads) * call.dim;
  call.out = at_address<void>(out);
  call.lse = at_address<float>(lse);
  run(call, plan.tasks(layer, plan.all()), false);
}

// Token i of `tokens` goes to slots[i]; its heads follow each other, and tokens are `pitch` numbers apart.
void write_cache(const AttentionLayer& layer, Address slots, int tokens, Address key, Address value, std::size_t pitch,
                 int type) {
  AttentionCall call = layer.call;
  call.slots = at_address<std::int64_t>(slots);
  for (int i = 0; i < tokens; ++i)
    if (call.slots[i] < 0 || call.slots[i] >= layer.blocks * call.block_size)
      throw std::invalid_argument("a slot is outside the cache");
  call.type = type;
  call.key = at_address<void>(key);
  call.value = at_address<void>(value);
  call.key_pitch = pitch;
  const Attention& kernels = attention();
  const std::size_t scratch = kernels.scratch_bytes(1, call.dim);
  kernels.write(call, 0, tokens, 0, call.kv_heads, thread_memory<0>(scratch));
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def(nb::init<const std::vector<int>&, int, int, double, int, double, int, bool, int, std::int64_t, Address,
                    Address>());
  nb::class_<AttentionPlan>(m, "AttentionPlan")
      .def(nb::init<std::vector<int>, std::vector<int>, Address, int, Address, int>())
      .def_prop_ro("tokens", &AttentionPlan::tokens)
      .def("blocks_ahead", [](AttentionPlan& plan, const AttentionLayer& layer) {
        plan.look_ahead(&layer);
        const Ahead& ahead = plan.ahead();
        const std::size_t runs = ahead.fetches / ahead.block_fetches / 2;
        return std::vector<std::int32_t>(ahead.blocks, ahead.blocks + runs);
      });
  m.def("attend_merged", [](const AttentionLayer& layer, AttentionPlan& plan, Address qkv, int type, Address query_norm,
                            Address key_norm, int norm_type, double eps, Address cos, Address sin, int table_type,
                            int rope_dim, Address factor, Address out) {
    attend_merged(layer, plan, plan.all(), qkv, type, query_norm, key_norm, norm_type, eps, cos, sin, table_type, rope_dim,
                  factor, out);
  }, nb::call_guard<nb::gil_scoped_release>());
  m.def("attend_cached", &attend_cached, nb::call_guard<nb::gil_scoped_release>());
  m.def("write_cache", &write_cache, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace phalanx
