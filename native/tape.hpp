// A tape: the kernels of a decoder's block one after the other, written down once and played each step. A reel: the tapes
// of a rank's blocks, played in one call or a few. What is before the blocks, and what is behind them, may be tapes too.
//
// Tensors between them are buffers: the residual stream and the logits, which are the caller's, and four in the workspace
// behind each other, [rows, width] each, the one that is left to add to the stream first. So the tapes of all blocks share
// a workspace, and a block's delta is where the next one takes it from. Logits are float32, all others of one type.
//
// Sums over ranks that are too large for one round are made in pieces of rows. No row needs one behind it, so the ranks
// wait for a piece only when they have computed the next one, be it of what comes after the sum.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "attention_plan.hpp"
#include "exchange.hpp"

namespace phalanx {

enum class Buffer : int { stream, delta, normed, wide, inner, logits, none };
constexpr int kBuffers = 6;

// A rotation, as attend_merged takes it.
struct Turn {
  Address cos = 0, sin = 0;
  int type = -1, dim = 0;
};

// What differs from step to step. What it points to is the caller's.
struct TapeStep {
  Address workspace = 0, stream = 0;  // both aligned to 64 bytes
  std::size_t rows = 0;
  AttentionPlan* plan = nullptr;
  std::vector<Turn> turns;
  std::vector<Address> factors;  // of queries
  Exchange* exchange = nullptr;  // null: the caller adds up
  Address ids = 0, logits = 0;   // int64 [rows], for tapes that look up; for one that ends in logits
};

// What differs from block to block in a step.
struct Placing {
  bool added;  // whether there is a delta from the block before
  const AttentionLayer *layer, *next;  // null without attention; the next one's, or null
  Turn turn;
  Address factor;
};

class Tape {
 public:
  // `type` of all buffers; `hidden` numbers in a row of stream, delta and normed, `wide` and `inner` of the others.
  Tape(int type, int hidden, int wide, int inner);

  // In the order of the calls:
  // The stream is rows of a table whose ids are the step's: plain, a packed matrix of so many, or `parts` of blocks. It
  // begins with row `start`; of those that it does not have there are zeros.
  void look_up_plain(Address weights, int outputs, int start);
  void look_up_packed(Address weights, int depth, int outputs, int start);
  void look_up_blocks(Address parts, int count, int inputs, int lead, int start);
  void norm(int x, int delta, Address weight, Address bias, int to, double eps, int layer, int types);
  // `to` [rows, pitch] from `column` on; the weights are packed, or `parts` of blocks.
  void multiply_packed(int x, int to, int column, int pitch, Address weights, Address bias, int depth, int outputs);
  void multiply_blocks(int x, int to, int column, int pitch, Address parts, int count, Address bias, int bias_type,
                       int inputs, int lead);
  void attend(int qkv, int to, Address query_norm, Address key_norm, int norm_type, double eps);
  void activate(int x, int to, int width, int function, bool gated);
  // The ranks' deltas are added up, or, where that takes one round, their streams.
  void sum(int buffer);
  void add_bias(Address bias);

  // Bytes of workspace for so many rows.
  std::size_t workspace_bytes(std::size_t rows) const;
  // Plays from an entry on. Returns -1 at the end, or the entry of a sum that the caller has to see to; `begun` then says
  // that it has to wait for it, and go on from it with `arrived`; else to make it, and go on behind it.
  int play(const TapeStep& step, const Placing& placing, int entry, bool arrived, bool& begun) const;
  // Before it, where it does not add the delta of the block before itself.
  void add_delta(const TapeStep& step, Rows rows) const;
  bool adds_delta() const;
  bool attends() const;

  // The same in pieces: entries [first, last), none of which is a sum, for some rows, after those before them; a sum.
  std::size_t entries() const { return entries_.size(); }
  bool sums(std::size_t entry) const;
  void play(const TapeStep& step, const Placing& placing, std::size_t first, std::size_t last, Rows rows) const;
  void begin_sum(const TapeStep& step, Rows rows) const;
  void end_sum(const TapeStep& step, Rows rows) const;
  // Rows of a piece; 0: sums are not made in pieces.
  std::size_t piece(const TapeStep& step) const;

 private:
  enum class Kind { plain_rows, packed_rows, block_rows, norm, packed, blocks, attend, activate, sum, bias };
  struct Entry {
    Kind kind;
    Buffer from = Buffer::none, to = Buffer::none, delta = Buffer::none;
    Address first = 0, second = 0;  // weights
    int width = 0, depth = 0, column = 0, pitch = 0, count = 0, lead = 0, start = 0;
    int types = -1, function = 0;
    bool flag = false;
    bool rounds = false;   // what it writes is rounded to 8 bits, for the products behind it
    bool rounded = false;  // what it reads was
    double eps = 0;
  };
  struct Room;

  static constexpr int item(Buffer buffer, int type) { return buffer == Buffer::logits || type == 0 ? 4 : 2; }
  Entry& add(Kind kind, int from, int to);
  Room room(const TapeStep& step) const;
  void play(const Entry& entry, const TapeStep& step, const Placing& placing, const Room& room, Rows rows) const;

  int type_, hidden_, widths_[kBuffers];
  std::vector<Entry> entries_;
};

struct ReelBlock {
  const Tape* tape;
  bool leaves_delta;
  int turn, factor;  // which of a step's; -1: none
};

class Reel {
 public:
  explicit Reel(std::vector<ReelBlock> blocks) : blocks_(std::move(blocks)) {}
  // The caches of the blocks that have attention, in their order; or nothing.
  void thread(std::vector<const AttentionLayer*> layers);
  // Where it stopped, and why: `sum` to be made or `wait`ed for, as Tape::play says, or a `pause` after `most` blocks.
  // Where sums are made in pieces, `block` counts what there is to do, one after the other, and `entry` means nothing.
  enum class Stop { sum, wait, pause, end };
  struct Place {
    int block = 0, entry = 0;
    Stop stop = Stop::pause;
  };
  Place play(const TapeStep& step, Place from, int most) const;
  std::size_t workspace_bytes(std::size_t rows) const;
  int blocks() const { return static_cast<int>(blocks_.size()); }

 private:
  // One thing after the other, when sums are made in pieces.
  struct Deed {
    enum class Kind { add, rows, begin, end } kind;  // `add`s the delta that the block before has left
    int block;
    std::size_t first, last;  // entries
    std::size_t piece;
  };

  Placing placing(const TapeStep& step, int block) const;
  void plan(std::size_t pieces) const;
  Place play_in_pieces(const TapeStep& step, std::size_t piece, Place from, int most) const;

  std::vector<ReelBlock> blocks_;
  mutable std::vector<Deed> deeds_;  // for so many pieces:
  mutable std::size_t planned_ = 0;
  std::vector<const AttentionLayer*> layers_;
};

}  // namespace phalanx
