// A step in which each request computes its last token, and tokens proposed behind it, and samples after each: from the
// table of requests to the tokens, with nothing but pauses and waits between. Rows that need anything else are not begun;
// phalanx/worker/model_runner.py is the twin, with which the others of a group may compute the same step: the exchanges
// are the same.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "choosing.hpp"
#include "pointwise.hpp"
#include "request_rows.hpp"
#include "tape.hpp"
#include "team.hpp"

namespace phalanx {
namespace {

constexpr double kGreedyBelow = 1e-5;  // phalanx.sampling.parameters.GREEDY_BELOW
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// As phalanx.kernels.decoding.SamplingView lays it out.
struct SamplingColumns {
  const std::uint8_t* simple;  // nothing constrains it, and nothing but the token is asked for
  const double *temperature, *top_p, *min_p;
  const std::int64_t *top_k, *choice;
  const std::uint64_t* seed;

  bool draws(std::size_t slot) const { return temperature[slot] >= kGreedyBelow; }
  // Something of so many tokens may be left out: phalanx.sampling.truncation.
  bool narrows(std::size_t slot, std::int64_t tokens) const {
    return (top_k[slot] > 0 && top_k[slot] < tokens) || top_p[slot] < 1 || min_p[slot] > 0;
  }
};

// Memory that begins at a cache line.
class Lines {
 public:
  Address at_least(std::size_t bytes) {
    if (bytes > bytes_) {
      bytes_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset(static_cast<char*>(std::aligned_alloc(64, bytes_)));
      if (!memory_) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
    }
    return reinterpret_cast<Address>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  std::size_t bytes_ = 0;
};

// A rotary embedding (phalanx.layers.rotary.Rotary) of one class of prompts, and the rotation of a step.
struct Rotary {
  const float* inverse;
  float factor;
  int half;
  Lines cos, sin;
};

class Decoding {
 public:
  // `reel` goes from the ids of tokens, or from `stream`, to the `logits` of `vocab` tokens from `first` on, or to the
  // stream. Both have room for `most` rows. `rotaries` are (frequencies, factor, how many).
  Decoding(const Reel& reel, const std::vector<std::tuple<Address, double, int>>& rotaries, int type, int hidden, int vocab,
           int first, Address stream, Address logits, std::size_t most)
      : reel_(reel), type_(type), hidden_(hidden), vocab_(vocab), first_(first), stream_(stream), logits_(logits),
        most_(most), rotaries_(rotaries.size()) {
    for (std::size_t i = 0; i < rotaries.size(); ++i) {
      rotaries_[i].inverse = at_address<float>(std::get<0>(rotaries[i]));
      rotaries_[i].factor = static_cast<float>(std::get<1>(rotaries[i]));
      rotaries_[i].half = std::get<2>(rotaries[i]);
    }
  }

  // Change the table by a plan's rows, and take from it what they compute. False, and nothing is changed, when they are
  // not what is played here. `exchange` is with the ranks that have the other shares; null: there are none. It, the table
  // and the columns stay where they are until the end.
  bool begin(Address table, Address sampling, const nb::tuple& plan_rows, Exchange* exchange) {
    table_ = at_address<RequestTable>(table);
    sampling_ = at_address<SamplingColumns>(sampling);
    const PlanRows rows(plan_rows);
    const std::size_t places = rows.size() + rows.proposed.tokens.size();
    samples_ = vocab_ > 0;
    if (rows.size() == 0 || places > most_ || !rows.can_advance(*table_)) return false;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t slot = rows.slots[i];
      const std::int64_t computed = table_->computed[slot] + rows.accepted.count(i);
      const std::int64_t length = table_->length[slot] + rows.accepted.count(i) + (rows.last[i] != kNoToken);
      if (rows.counts[i] != 1 || computed + 1 != length || !sampling_->simple[slot]) return false;
      if (exchange && sampling_->draws(slot) && sampling_->narrows(slot, table_->vocab)) samples_ = false;
    }
    if (exchange && !(exchange->takes(places * hidden_ * item()) && exchange->takes(places * kMostTold))) return false;
    if (vocab_ > 0 && !samples_ && places > rows.size()) return false;  // the twin verifies what it samples
    rows.advance(*table_);
    gather(rows);
    step_.exchange = exchange;
    return true;
  }

  // On from where it stopped. At the end the table has the tokens; but there are logits where a row of several ranks leaves
  // tokens out, for which they have to tell each other more, and before the last stage the stream that the next takes.
  Reel::Place play(Reel::Place from, int most) {
    const int last = reel_.blocks();  // behind it, what the ranks tell each other
    if (from.block < last) {
      const Reel::Place place = reel_.play(step_, from, most);
      if (place.stop != Reel::Stop::end) return place;
      if (samples_) choose();
      if (samples_ && step_.exchange) {
        tell();
        if (!step_.exchange->done()) return {last, 0, Reel::Stop::wait};
      }
    }
    if (samples_ && step_.exchange) hear();
    for (const std::uint16_t slot : slots_) ++table_->computed[slot];
    if (samples_) verify();
    return {0, 0, Reel::Stop::end};
  }

  // uint16 and int32: slots, and the tokens that stand, of each row one and one after each proposed token that was sampled
  // in its place; kNoToken where the scores are not finite numbers. No tokens, and each slot once, where none are sampled.
  std::pair<nb::bytes, nb::bytes> tokens() const {
    return {nb::bytes(slots_.data(), slots_.size() * sizeof(slots_[0])),
            nb::bytes(tokens_.data(), samples_ ? tokens_.size() * sizeof(tokens_[0]) : 0)};
  }

 private:
  static constexpr std::int64_t kMostTold = 5 * 4;  // bytes of a place

  // Where a token is sampled: behind a request's own tokens and `ahead` of those proposed.
  struct Place {
    std::size_t slot;
    std::int64_t ahead;
  };

  std::size_t item() const { return static_cast<Type>(type_) == Type::bf16 ? 2 : 4; }

  void gather(const PlanRows& rows) {
    const std::int64_t size = table_->block_size;
    slots_ = rows.slots;
    std::vector<int> starts{0}, contexts;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      contexts.push_back(static_cast<int>(table_->computed[slots_[i]] + 1 + rows.proposed.count(i)));
      starts.push_back(static_cast<int>(starts[i] + 1 + rows.proposed.count(i)));
    }
    const std::int64_t width = (*std::max_element(contexts.begin(), contexts.end()) + size - 1) / size;
    places_.clear();
    ids_.clear();
    written_.clear();
    blocks_.assign(rows.size() * width, 0);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t slot = slots_[i];
      const std::int32_t* own = table_->blocks + slot * table_->block_width;
      std::copy_n(own, (contexts[i] + size - 1) / size, blocks_.begin() + i * width);
      for (std::int64_t position = table_->computed[slot]; position < contexts[i]; ++position) {
        places_.push_back({slot, position - table_->computed[slot]});
        ids_.push_back(table_->tokens[slot * table_->token_width + position]);
        written_.push_back(own[position / size] * size + position % size);
      }
    }
    plan_ = std::make_unique<AttentionPlan>(std::move(starts), std::move(contexts), reinterpret_cast<Address>(blocks_.data()),
                                            static_cast<int>(width), reinterpret_cast<Address>(written_.data()),
                                            static_cast<int>(size));
    step_ = {};
    for (Rotary& rotary : rotaries_) {
      const std::size_t bytes = 2 * rotary.half * item();
      const Turn turn{rotary.cos.at_least(places_.size() * bytes), rotary.sin.at_least(places_.size() * bytes), type_,
                      2 * rotary.half};
      for (std::size_t i = 0; i < places_.size(); ++i)
        pointwise().turn[type_](static_cast<float>(table_->computed[places_[i].slot] + places_[i].ahead), rotary.inverse,
                                rotary.factor, at_address<char>(turn.cos) + i * bytes,
                                at_address<char>(turn.sin) + i * bytes, rotary.half);
      step_.turns.push_back(turn);
    }
    step_.workspace = workspace_.at_least(reel_.workspace_bytes(places_.size()));
    step_.stream = stream_;
    step_.logits = logits_;
    step_.rows = places_.size();
    step_.plan = plan_.get();
    step_.ids = reinterpret_cast<Address>(ids_.data());
  }

  LogitsRow row(std::size_t i) const {
    const std::size_t slot = places_[i].slot;
    const std::uint32_t first = static_cast<std::uint32_t>(first_);
    LogitsRow row = {at_address<float>(logits_) + i * vocab_, vocab_, first, 0, 1, 0, 0, 0};
    if (sampling_->draws(slot)) {
      row.temperature = sampling_->temperature[slot];
      row.top_p = sampling_->top_p[slot];
      row.min_p = sampling_->min_p[slot];
      row.top_k = sampling_->top_k[slot];
      row.key = row_key(sampling_->seed[slot], sampling_->choice[slot], table_->length[slot] + places_[i].ahead, 0);
    }
    return row;
  }

  // Of the tokens that are here.
  void choose() {
    tokens_.resize(places_.size());
    bests_.resize(places_.size());
    parallel_for(places_.size(), [&](std::size_t i) {
      const std::int64_t token = choose_token(row(i), bests_[i]);
      tokens_[i] = token < 0 ? kNoToken : static_cast<std::int32_t>(token);
    });
  }

  // What phalanx/sampling/split_vocabulary.py tells of such rows: largest logits, twice because nothing constrains them;
  // their tokens; tokens and logits of the winners of rows that draw.
  void tell() {
    const std::size_t rows = places_.size();
    std::vector<std::size_t> drawing;
    for (std::size_t i = 0; i < rows; ++i)
      if (sampling_->draws(places_[i].slot)) drawing.push_back(i);
    told_.resize(3 * rows + 2 * drawing.size());
    std::memcpy(told_.data(), bests_.data(), 4 * rows);
    std::memcpy(told_.data() + rows, bests_.data(), 4 * rows);
    std::memcpy(told_.data() + 2 * rows, tokens_.data(), 4 * rows);
    for (std::size_t k = 0; k < drawing.size(); ++k) {
      const std::size_t i = drawing[k];
      const float logit = tokens_[i] < 0 ? -kInfinity : at_address<float>(logits_)[i * vocab_ + tokens_[i] - first_];
      told_[3 * rows + k] = tokens_[i];
      std::memcpy(&told_[3 * rows + drawing.size() + k], &logit, 4);
    }
    step_.exchange->begin_gather(told_.data(), static_cast<std::int64_t>(4 * told_.size()));
  }

  // All ranks decide alike, by what all of them have told.
  void hear() {
    const std::vector<Address>& parts = step_.exchange->parts();
    const std::size_t rows = places_.size(), ranks = parts.size(), drawing = (told_.size() - 3 * rows) / 2;
    std::vector<std::int32_t> tokens(ranks);
    std::vector<float> logits(ranks);
    const auto read = [&](std::size_t token_at, std::size_t logit_at) {
      for (std::size_t r = 0; r < ranks; ++r) {
        tokens[r] = at_address<std::int32_t>(parts[r])[token_at];
        logits[r] = at_address<float>(parts[r])[logit_at];
      }
    };
    for (std::size_t i = 0, k = 0; i < rows; ++i) {
      read(2 * rows + i, rows + i);
      std::size_t largest = 0;  // the first of the largest: its tokens are the lowest
      bool numbers = true;
      for (std::size_t r = 0; r < ranks; ++r) {
        numbers = numbers && logits[r] < kInfinity;
        if (logits[r] > logits[largest]) largest = r;
      }
      const bool usable = numbers && logits[largest] > -kInfinity;
      std::int64_t token = tokens[largest];
      if (sampling_->draws(places_[i].slot)) {
        read(3 * rows + k, 3 * rows + drawing + k);
        ++k;
        if (usable) token = winner_of(row(i), tokens.data(), logits.data(), ranks);
      }
      tokens_[i] = usable ? static_cast<std::int32_t>(token) : kNoToken;
    }
  }

  // Keeps what stands of the tokens; the table has those of rows without any proposed (phalanx/worker/verification.py).
  void verify() {
    slots_.clear();
    std::size_t kept = 0;
    bool stands = true;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const auto [slot, ahead] = places_[i];
      // The place before stands; what was proposed after it has this place.
      stands = ahead == 0 || (stands && tokens_[kept - 1] == ids_[i] && tokens_[i] != kNoToken);
      table_->sampled[slot] = ahead == 0 ? tokens_[i] : kNoToken;
      if (!stands) continue;
      slots_.push_back(static_cast<std::uint16_t>(slot));
      tokens_[kept++] = tokens_[i];
    }
    tokens_.resize(kept);
  }

  const Reel& reel_;
  const int type_, hidden_, vocab_, first_;
  const Address stream_, logits_;
  const std::size_t most_;
  std::vector<Rotary> rotaries_;
  const RequestTable* table_ = nullptr;
  const SamplingColumns* sampling_ = nullptr;
  // Of the step.
  bool samples_ = false;
  std::vector<std::uint16_t> slots_;
  std::vector<Place> places_;
  std::vector<std::int64_t> ids_, written_;  // of the places: tokens; where keys and values go
  std::vector<std::int32_t> blocks_, tokens_, told_;
  std::vector<float> bests_;
  std::unique_ptr<AttentionPlan> plan_;
  TapeStep step_;
  Lines workspace_;
};

}  // namespace

void bind_decoding(nb::module_& m) {
  nb::class_<Decoding>(m, "Decoding")
      .def(nb::init<const Reel&, const std::vector<std::tuple<Address, double, int>>&, int, int, int, int, Address,
                    Address, std::size_t>(),
           nb::keep_alive<1, 2>())
      .def("begin", &Decoding::begin, nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("play", [](Decoding& decoding, int block, int entry, int stop, int most) {
        const Reel::Place place = decoding.play({block, entry, static_cast<Reel::Stop>(stop)}, most);
        return std::make_tuple(place.block, place.entry, static_cast<int>(place.stop));
      }, nb::call_guard<nb::gil_scoped_release>())
      .def("tokens", &Decoding::tokens);
}

}  // namespace phalanx
