// Attention over a paged cache of keys and values, with what stands before it: norms of query and key heads, rotation,
// and the write of the cache.
//
// The cache. Per block and KV head either *tiles* (where block size and head size are multiples of 16) of 16 tokens,
// keys [head_dim / 2][16 tokens][2] and values [8 token pairs][head_dim][2] for bf16 and int8, keys [head_dim][16] and
// values [16][head_dim] for f32: what the products read, in order. Heads change places from block to block: tiles of one
// head that are 4 KB apart would all fall into the same half of a cache's sets. Or *rows*: [block_size][kv heads][head_dim]. An int8
// cache has a scale (f32) for each token and head: behind the tiles of its block and head, or behind its row.
//
// Order of computation. Keys are taken in tiles of 64 at fixed positions, tiles in spans of 512: an online softmax over
// the tiles of a span, the spans merged one after the other. What a query's row sees of this depends on its own
// position only, so its result is the same bits alone, in any batch or chunk, and split over threads or not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace phalanx {

constexpr int kAttentionTile = 64;
constexpr int kAttentionSpan = 512;

enum class CacheType : int { f32 = 0, bf16 = 1, int8 = 2 };

// One call: what all its tasks share. Types are 0 = f32, 1 = bf16, of the tensors that they stand before.
struct AttentionCall {
  int heads, kv_heads, dim;
  const int* group_start;  // kv_heads + 1: where each KV head's queries begin in
  const int* head_order;   // the query heads, sorted by their KV head
  float scale;
  float soft_cap;  // 0: none
  int window;      // 0: none

  int type;  // of query, key, value, factor and out
  const void *query, *key, *value;
  std::size_t query_pitch, key_pitch;  // numbers from one token to the next
  int norm_type;
  const void *query_norm, *key_norm;  // weights [dim], or null
  int norms;                          // whether there are norms at all (their weights may be null)
  float eps;
  int table_type, rope_dim;  // 0: no rotation
  const void *cos, *sin;     // [T, rope_dim], the sine with its sign
  const void* factor;        // [T] for queries, or null

  CacheType cache_type;
  int tiled;
  char *key_cache, *value_cache;
  int block_size;
  const std::int64_t* slots;  // [T]
  const std::int32_t* tables;
  int table_width;

  void* out;   // [T, heads, dim]
  float* lse;  // [T, heads] or null
};

// Some tokens of one row and the query heads of one KV head, over the spans [first_span, last_span).
struct AttentionTask {
  int row, kv_head;
  int first, count;  // tokens of the step
  int position;      // of the first token
  int first_span, last_span;
  int writes;  // stores the tokens' key and value first
  int split;   // which of the splits it is a part of; -1: it is the whole
};

struct Attention {
  // Bytes of `scratch` (aligned to 64) that the functions below need for tasks of up to `rows` queries (tokens times heads).
  std::size_t (*scratch_bytes)(int rows, int dim);
  // Keys and values of tokens [first, first + count) and KV heads [from, to) into the cache.
  void (*write)(const AttentionCall& call, int first, int count, int from, int to, char* scratch);
  // With `parts` the spans' results go there, [spans][rows][16 + dim rounded up to 16] (maximum and sum of exponentials
  // first), else the output is written. `next` is what the same thread does then, or null: its first tiles are fetched.
  void (*attend)(const AttentionCall& call, const AttentionTask& task, const AttentionTask* next, float* parts,
                 char* scratch);
  void (*merge)(const AttentionCall& call, const AttentionTask& task, int spans, const float* parts, char* scratch);
};

PHALANX_DECLARE_TABLES(Attention, attention)

}  // namespace phalanx
