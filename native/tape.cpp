#include "tape.hpp"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "calls.hpp"

namespace phalanx {
namespace {

constexpr std::size_t kLine = 64;

std::size_t whole_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

// Where the buffers of a step are.
struct Tape::Room {
  Address at[kBuffers];
  Address operator[](Buffer buffer) const { return at[static_cast<int>(buffer)]; }
};

Tape::Tape(int type, int hidden, int wide, int inner)
    : type_(type), hidden_(hidden), widths_{hidden, hidden, hidden, wide, inner, 0} {}

Tape::Entry& Tape::add(Kind kind, int from, int to) {
  if (from < 0 || to < 0 || from >= kBuffers || to >= kBuffers) throw std::invalid_argument("there is no such buffer");
  Entry& entry = entries_.emplace_back();
  entry.kind = kind;
  entry.from = static_cast<Buffer>(from);
  entry.to = static_cast<Buffer>(to);
  return entry;
}

void Tape::look_up_plain(Address weights, int outputs, int start) {
  Entry& entry = add(Kind::plain_rows, static_cast<int>(Buffer::stream), static_cast<int>(Buffer::stream));
  entry.first = weights;
  entry.start = start;
  entry.width = outputs;
}

void Tape::look_up_packed(Address weights, int depth, int outputs, int start) {
  Entry& entry = add(Kind::packed_rows, static_cast<int>(Buffer::stream), static_cast<int>(Buffer::stream));
  entry.first = weights;
  entry.start = start;
  entry.depth = depth;
  entry.width = outputs;
}

void Tape::look_up_blocks(Address parts, int count, int inputs, int lead, int start) {
  Entry& entry = add(Kind::block_rows, static_cast<int>(Buffer::stream), static_cast<int>(Buffer::stream));
  entry.first = parts;
  entry.start = start;
  entry.count = count;
  entry.depth = inputs;
  entry.lead = lead;
}

void Tape::norm(int x, int delta, Address weight, Address bias, int to, double eps, int layer, int types) {
  Entry& entry = add(Kind::norm, x, to);
  entry.delta = static_cast<Buffer>(delta);
  entry.first = weight;
  entry.second = bias;
  entry.eps = eps;
  entry.flag = layer;
  entry.types = types;
}

void Tape::multiply_packed(int x, int to, int column, int pitch, Address weights, Address bias, int depth, int outputs) {
  Entry& entry = add(Kind::packed, x, to);
  entry.first = weights;
  entry.second = bias;
  entry.column = column;
  entry.pitch = pitch;
  entry.depth = depth;
  entry.width = outputs;
}

void Tape::multiply_blocks(int x, int to, int column, int pitch, Address parts, int count, Address bias, int bias_type,
                           int inputs, int lead) {
  // Products of the same activations, or of those that the kernel before has made, find them rounded.
  bool rounded = false;
  if (!entries_.empty()) {
    Entry& before = entries_.back();
    const bool makes = (before.kind == Kind::norm || before.kind == Kind::activate) && static_cast<int>(before.to) == x;
    const int width = before.kind == Kind::norm ? hidden_ : before.width;
    const bool shares = before.kind == Kind::blocks && static_cast<int>(before.from) == x && before.depth == inputs;
    rounded = (makes && width == inputs && lead == 0) || (shares && before.lead == lead);
    if (makes) before.rounds = rounded;
  }
  Entry& entry = add(Kind::blocks, x, to);
  entry.rounded = rounded;
  entry.first = parts;
  entry.count = count;
  entry.second = bias;
  entry.types = bias_type;
  entry.column = column;
  entry.pitch = pitch;
  entry.depth = inputs;
  entry.lead = lead;
}

void Tape::attend(int qkv, int to, Address query_norm, Address key_norm, int norm_type, double eps) {
  Entry& entry = add(Kind::attend, qkv, to);
  entry.first = query_norm;
  entry.second = key_norm;
  entry.types = norm_type;
  entry.eps = eps;
}

void Tape::activate(int x, int to, int width, int function, bool gated) {
  Entry& entry = add(Kind::activate, x, to);
  entry.width = width;
  entry.function = function;
  entry.flag = gated;
}

void Tape::sum(int buffer) { add(Kind::sum, buffer, buffer); }

void Tape::add_bias(Address bias) {
  add(Kind::bias, static_cast<int>(Buffer::delta), static_cast<int>(Buffer::delta)).first = bias;
}

std::size_t Tape::workspace_bytes(std::size_t rows) const {
  std::size_t bytes = 0;
  for (int b = 1; b < kBuffers; ++b) bytes += whole_lines(rows * widths_[b] * (type_ == 1 ? 2 : 4));  // no logits
  return bytes;
}

Tape::Room Tape::room(const TapeStep& step) const {
  Room room;
  room.at[0] = step.stream;
  Address at = step.workspace;
  for (int b = 1; b < kBuffers; ++b) {
    room.at[b] = at;
    at += whole_lines(step.rows * widths_[b] * (type_ == 1 ? 2 : 4));
  }
  room.at[static_cast<int>(Buffer::logits)] = step.logits;
  return room;
}

bool Tape::adds_delta() const {
  return !entries_.empty() && entries_[0].kind == Kind::norm && entries_[0].delta != Buffer::none;
}

bool Tape::attends() const {
  return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.kind == Kind::attend; });
}

void Tape::add_delta(const TapeStep& step, Rows rows) const {
  const Room room = this->room(step);
  const std::size_t skipped = rows.first * hidden_ * item(Buffer::stream, type_);
  const Address both[2] = {room[Buffer::stream] + skipped, room[Buffer::delta] + skipped};
  phalanx::add_up(both, 2, both[0], rows.count, hidden_, type_);
}

bool Tape::sums(std::size_t entry) const { return entries_[entry].kind == Kind::sum; }

void Tape::play(const TapeStep& step, const Placing& placing, std::size_t first, std::size_t last, Rows rows) const {
  const Room room = this->room(step);
  for (std::size_t i = first; i < last; ++i) play(entries_[i], step, placing, room, rows);
}

void Tape::begin_sum(const TapeStep& step, Rows rows) const {
  const Room room = this->room(step);
  const std::size_t width = hidden_ * item(Buffer::delta, type_);
  step.exchange->begin_sum(at_address<void>(room[Buffer::delta] + rows.first * width), rows.count * width);
}

void Tape::end_sum(const TapeStep& step, Rows rows) const {
  const Room room = this->room(step);
  const std::vector<Address>& parts = step.exchange->parts();
  const Address to = room[Buffer::delta] + rows.first * hidden_ * item(Buffer::delta, type_);
  phalanx::add_up(parts.data(), static_cast<int>(parts.size()), to, rows.count, hidden_, type_);
}

std::size_t Tape::piece(const TapeStep& step) const {
  const std::int64_t width = hidden_ * (type_ == 1 ? 2 : 4), rows = step.rows;
  return step.exchange == nullptr || step.exchange->takes(rows * width) ? 0 : step.exchange->piece(rows, width);
}

int Tape::play(const TapeStep& step, const Placing& placing, int entry, bool arrived, bool& begun) const {
  const Room room = this->room(step);
  for (std::size_t i = entry; i < entries_.size(); ++i) {
    const Entry& next = entries_[i];
    if (next.kind != Kind::sum) {
      play(next, step, placing, room, {0, step.rows});
      continue;
    }
    const std::int64_t bytes = step.rows * hidden_ * item(Buffer::delta, type_);
    begun = step.exchange != nullptr && step.exchange->takes(bytes);
    if (!begun) return static_cast<int>(i);
    if (!arrived) {
      step.exchange->begin_sum(at_address<void>(room[next.from]), bytes);
      if (!step.exchange->done()) return static_cast<int>(i);
    }
    arrived = false;
    const std::vector<Address>& parts = step.exchange->parts();
    phalanx::add_up(parts.data(), static_cast<int>(parts.size()), room[next.to], step.rows, hidden_, type_);
  }
  return -1;
}

void Tape::play(const Entry& entry, const TapeStep& step, const Placing& placing, const Room& room, Rows rows) const {
  std::size_t in = hidden_, out = hidden_;  // numbers in a row
  if (entry.kind == Kind::packed || entry.kind == Kind::blocks) {
    in = entry.depth;
    out = entry.pitch;
  } else if (entry.kind == Kind::activate) {
    in = entry.flag ? 2 * entry.width : entry.width;
    out = entry.width;
  }
  const Address from = room[entry.from] + rows.first * in * item(entry.from, type_);
  const Address to = room[entry.to] + rows.first * out * item(entry.to, type_);
  const Address part = to + entry.column * item(entry.to, type_);
  const bool wide = entry.to == Buffer::logits;
  Ahead* ahead = step.plan == nullptr ? nullptr : &step.plan->ahead();
  RoundedRows* rounded = entry.rounds ? &rounded_rows() : nullptr;
  if (rounded != nullptr)
    rounded->make_room(rows.count, entry.kind == Kind::norm ? hidden_ : entry.width, 0, static_cast<Number>(type_));
  switch (entry.kind) {
    case Kind::plain_rows: {
      const std::size_t bytes = hidden_ * item(entry.to, type_);
      for (std::size_t row = 0; row < step.rows; ++row) {
        const std::int64_t at = at_address<std::int64_t>(step.ids)[row] - entry.start;
        char* own = at_address<char>(to) + row * bytes;
        if (at >= 0 && at < entry.width)
          std::memcpy(own, at_address<char>(entry.first) + at * bytes, bytes);
        else
          std::memset(own, 0, bytes);
      }
      break;
    }
    case Kind::packed_rows:
      look_up_packed_rows(entry.first, step.ids, entry.start, to, step.rows, entry.width, entry.depth, type_);
      break;
    case Kind::block_rows:
      look_up_block_rows(step.ids, step.rows, entry.start, entry.depth, entry.lead, entry.first, entry.count, to, type_);
      break;
    case Kind::norm: {
      // A block's first norm adds what the block before has left, if there is one.
      const bool adds = entry.delta != Buffer::none && (&entry != entries_.data() || placing.added);
      const Address delta = adds ? room[entry.delta] + rows.first * hidden_ * item(entry.delta, type_) : 0;
      phalanx::norm(from, delta, entry.first, entry.second, to, rows.count, hidden_, static_cast<float>(entry.eps),
                    entry.flag, entry.types, rounded);
      break;
    }
    case Kind::packed:
      phalanx::multiply_packed(from, entry.depth, entry.first, entry.second, part, entry.pitch, rows.count, entry.depth,
                               entry.width, type_, wide);
      break;
    case Kind::blocks:
      if (entry.rounded)
        multiply_rounded(rounded_rows(), rows.count, entry.first, entry.count, part, entry.pitch, wide ? 0 : type_,
                         entry.second, entry.types, ahead);
      else
        phalanx::multiply_blocks(from, entry.depth, rows.count, entry.depth, entry.lead, type_, entry.first, entry.count,
                                 part, entry.pitch, wide ? 0 : type_, entry.second, entry.types, ahead);
      break;
    case Kind::attend: {
      const Turn& turn = placing.turn;
      attend_merged(*placing.layer, *step.plan, rows, room[entry.from], type_, entry.first, entry.second, entry.types,
                    entry.eps, turn.cos, turn.sin, turn.type, turn.dim, placing.factor, room[entry.to]);
      if (rows.first + rows.count == step.rows) step.plan->look_ahead(placing.next);  // by the last piece
      break;
    }
    case Kind::activate:
      (entry.flag ? phalanx::activate_gated : phalanx::activate)(from, to, rows.count, entry.width, entry.function, type_,
                                                                rounded);
      break;
    case Kind::bias:
      phalanx::add_bias(to, entry.first, rows.count, hidden_, type_);
      break;
    case Kind::sum:
      break;
  }
}

void Reel::thread(std::vector<const AttentionLayer*> layers) {
  std::vector<const AttentionLayer*> threaded;
  std::size_t used = 0;
  if (!layers.empty())
    for (const ReelBlock& block : blocks_) {
      const bool attends = block.tape->attends();
      if (attends && used == layers.size()) throw std::invalid_argument("a block has no cache");
      threaded.push_back(attends ? layers[used++] : nullptr);
    }
  if (used != layers.size()) throw std::invalid_argument("a cache has no block");
  layers_ = std::move(threaded);
}

std::size_t Reel::workspace_bytes(std::size_t rows) const {
  std::size_t bytes = 0;
  for (const ReelBlock& block : blocks_) bytes = std::max(bytes, block.tape->workspace_bytes(rows));
  return bytes;
}

Placing Reel::placing(const TapeStep& step, int b) const {
  const ReelBlock& block = blocks_[b];
  const AttentionLayer* next = b + 1 < static_cast<int>(layers_.size()) ? layers_[b + 1] : nullptr;
  Placing placing{b > 0 && blocks_[b - 1].leaves_delta, layers_[b], next, {}, 0};
  if (block.turn >= 0) placing.turn = step.turns[block.turn];
  if (block.factor >= 0) placing.factor = step.factors[block.factor];
  return placing;
}

Reel::Place Reel::play(const TapeStep& step, Place from, int most) const {
  const std::size_t piece = layers_.empty() ? 0 : blocks_[0].tape->piece(step);
  if (piece > 0) return play_in_pieces(step, piece, from, most);
  for (int b = from.block; b < static_cast<int>(layers_.size()); ++b) {
    if (b - from.block == most) return {b, 0, Stop::pause};
    const ReelBlock& block = blocks_[b];
    const Placing placing = this->placing(step, b);
    const bool begins = b != from.block || from.stop == Stop::pause;
    if (begins && placing.added && !block.tape->adds_delta()) block.tape->add_delta(step, {0, step.rows});
    // Behind a sum that the caller has made, or at one that it has waited for.
    const int entry = begins ? 0 : from.entry + (from.stop == Stop::sum);
    bool begun = false;
    const int stopped = block.tape->play(step, placing, entry, !begins && from.stop == Stop::wait, begun);
    if (stopped >= 0) return {b, stopped, begun ? Stop::wait : Stop::sum};
  }
  return {0, 0, Stop::end};
}

// Two pieces or more. What computes rows goes on across blocks until there is a sum, piece by piece; the sum of a piece
// ends when the next piece is computed, before that one's begins: rounds follow each other as ever.
void Reel::plan(std::size_t pieces) const {
  using Kind = Deed::Kind;
  deeds_.clear();
  planned_ = pieces;
  std::vector<Deed> run;
  std::size_t begun = pieces;  // the piece whose sum has begun; `pieces`: none
  const auto end = [&](int block) {
    if (begun < pieces) deeds_.push_back({Kind::end, block, 0, 0, begun});
    begun = pieces;
  };
  const auto compute = [&](int block, bool summed) {
    for (std::size_t piece = 0; piece < pieces; ++piece) {
      for (Deed deed : run) {
        deed.piece = piece;
        deeds_.push_back(deed);
      }
      end(block);
      if (!summed) continue;
      deeds_.push_back({Kind::begin, block, 0, 0, piece});
      begun = piece;
    }
    run.clear();
  };
  for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
    const Tape& tape = *blocks_[b].tape;
    if (b > 0 && blocks_[b - 1].leaves_delta && !tape.adds_delta()) run.push_back({Kind::add, b, 0, 0, 0});
    std::size_t first = 0;
    for (std::size_t i = 0; i < tape.entries(); ++i) {
      if (!tape.sums(i)) continue;
      if (first < i) run.push_back({Kind::rows, b, first, i, 0});
      compute(b, true);
      first = i + 1;
    }
    if (first < tape.entries()) run.push_back({Kind::rows, b, first, tape.entries(), 0});
  }
  if (run.empty())
    end(static_cast<int>(blocks_.size()) - 1);
  else
    compute(static_cast<int>(blocks_.size()) - 1, false);
}

Reel::Place Reel::play_in_pieces(const TapeStep& step, std::size_t piece, Place from, int most) const {
  const std::size_t pieces = (step.rows + piece - 1) / piece;
  if (planned_ != pieces) plan(pieces);
  const int begin = from.block;
  for (int at = begin; at < static_cast<int>(deeds_.size()); ++at) {
    const Deed& deed = deeds_[at];
    if (deed.block - deeds_[begin].block >= most) return {at, 0, Stop::pause};
    const Tape& tape = *blocks_[deed.block].tape;
    const std::size_t first = deed.piece * piece;
    const Rows rows{first, first + piece < step.rows ? piece : step.rows - first};
    switch (deed.kind) {
      case Deed::Kind::add: tape.add_delta(step, rows); break;
      case Deed::Kind::rows: tape.play(step, placing(step, deed.block), deed.first, deed.last, rows); break;
      case Deed::Kind::begin: tape.begin_sum(step, rows); break;
      case Deed::Kind::end: {
        const bool arrived = at == begin && from.stop == Stop::wait;
        if (!arrived && !step.exchange->done()) return {at, 0, Stop::wait};
        tape.end_sum(step, rows);
        break;
      }
    }
  }
  return {0, 0, Stop::end};
}

void bind_tape(nb::module_& m) {
  nb::class_<Exchange>(m, "Exchange")
      .def(nb::init<int, int, Address, Address, int, std::vector<std::int64_t>, std::vector<int>, Address, std::int64_t,
                    std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool>());
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<int, int, int, int>())
      .def("look_up_plain", &Tape::look_up_plain)
      .def("look_up_packed", &Tape::look_up_packed)
      .def("look_up_blocks", &Tape::look_up_blocks)
      .def("norm", &Tape::norm)
      .def("multiply_packed", &Tape::multiply_packed)
      .def("multiply_blocks", &Tape::multiply_blocks)
      .def("attend", &Tape::attend)
      .def("activate", &Tape::activate)
      .def("sum", &Tape::sum)
      .def("add_bias", &Tape::add_bias)
      .def("workspace_bytes", &Tape::workspace_bytes);
  nb::class_<TapeStep>(m, "TapeStep")
      .def("__init__", [](TapeStep* self, Address workspace, Address stream, std::size_t rows, AttentionPlan& plan,
                          const std::vector<std::tuple<Address, Address, int, int>>& turns,
                          std::vector<Address> factors, Exchange* exchange) {
        std::vector<Turn> made;
        for (const auto& turn : turns)
          made.push_back({std::get<0>(turn), std::get<1>(turn), std::get<2>(turn), std::get<3>(turn)});
        new (self) TapeStep{workspace, stream, rows, &plan, std::move(made), std::move(factors), exchange, 0, 0};
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  nb::class_<Reel>(m, "Reel")
      .def("__init__", [](Reel* self, const std::vector<std::tuple<const Tape*, bool, int, int>>& blocks) {
        std::vector<ReelBlock> made;
        for (const auto& block : blocks)
          made.push_back({std::get<0>(block), std::get<1>(block), std::get<2>(block), std::get<3>(block)});
        new (self) Reel(std::move(made));
      })
      .def("thread", &Reel::thread)
      .def("workspace_bytes", &Reel::workspace_bytes)
      .def("play", [](const Reel& reel, const TapeStep& step, int block, int entry, int stop, int most) {
        const Reel::Place place = reel.play(step, {block, entry, static_cast<Reel::Stop>(stop)}, most);
        return std::make_tuple(place.block, place.entry, static_cast<int>(place.stop));
      }, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace phalanx
