// A step in which each request computes its last token and samples the next one: from the table of requests to the tokens,
// with nothing but pauses between. Rows that need anything else are not begun; phalanx/worker/model_runner.py is the twin.
#include <nanobind/stl/tuple.h>

#include <cstdlib>
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

// As phalanx.kernels.decoding.SamplingView lays it out.
struct SamplingColumns {
  const std::uint8_t* simple;  // nothing constrains it, and nothing but the token is asked for
  const double *temperature, *top_p, *min_p;
  const std::int64_t *top_k, *choice;
  const std::uint64_t* seed;
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
  // `reel` goes from the ids of tokens to the logits of `vocab` tokens; `rotaries` are (frequencies, factor, how many).
  Decoding(const Reel& reel, const std::vector<std::tuple<Address, double, int>>& rotaries, int type, int hidden, int vocab)
      : reel_(reel), type_(type), hidden_(hidden), vocab_(vocab), rotaries_(rotaries.size()) {
    for (std::size_t i = 0; i < rotaries.size(); ++i) {
      rotaries_[i].inverse = at_address<float>(std::get<0>(rotaries[i]));
      rotaries_[i].factor = static_cast<float>(std::get<1>(rotaries[i]));
      rotaries_[i].half = std::get<2>(rotaries[i]);
    }
  }

  // Change the table by a plan's rows, and take from it what they compute. False, and nothing is changed, when they are
  // not what is played here. The table and the columns stay where they are until the end.
  bool begin(Address table, Address sampling, const nb::bytes& slots, const nb::bytes& counts, const nb::bytes& last,
             const nb::bytes& block_rows, const nb::bytes& blocks) {
    table_ = at_address<RequestTable>(table);
    sampling_ = at_address<SamplingColumns>(sampling);
    const PlanRows rows(slots, counts, last, block_rows, blocks);
    if (rows.size() == 0 || !rows.can_advance(*table_)) return false;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t slot = rows.slots[i];
      const std::int64_t length = table_->length[slot] + (rows.last[i] != kNoToken);
      if (rows.counts[i] != 1 || table_->computed[slot] + 1 != length || !sampling_->simple[slot]) return false;
    }
    rows.advance(*table_);
    gather(rows.slots);
    return true;
  }

  // On from where it stopped; at the end the table has the tokens.
  Reel::Place play(Reel::Place from, int most) {
    const Reel::Place place = reel_.play(step_, from, most);
    if (place.stop == Reel::Stop::end) choose();
    return place;
  }

  // int32, of each row; kNoToken where the scores are not finite numbers.
  nb::bytes tokens() const { return nb::bytes(tokens_.data(), tokens_.size() * sizeof(tokens_[0])); }

 private:
  void gather(const std::vector<std::uint16_t>& slots) {
    const std::size_t rows = slots.size();
    const std::int64_t size = table_->block_size;
    slots_.assign(slots.begin(), slots.end());
    std::int64_t width = 1;
    for (const std::size_t slot : slots_) width = std::max(width, table_->computed[slot] / size + 1);
    ids_.resize(rows);
    places_.resize(rows);
    blocks_.assign(rows * width, 0);
    std::vector<int> starts(rows + 1), contexts(rows);
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t slot = slots_[i];
      const std::int64_t position = table_->computed[slot];
      const std::int32_t* own = table_->blocks + slot * table_->block_width;
      std::copy_n(own, position / size + 1, blocks_.begin() + i * width);
      ids_[i] = table_->tokens[slot * table_->token_width + position];
      places_[i] = own[position / size] * size + position % size;
      starts[i + 1] = static_cast<int>(i + 1);
      contexts[i] = static_cast<int>(position + 1);
    }
    plan_ = std::make_unique<AttentionPlan>(std::move(starts), std::move(contexts), reinterpret_cast<Address>(blocks_.data()),
                                            static_cast<int>(width), reinterpret_cast<Address>(places_.data()),
                                            static_cast<int>(size));
    const std::size_t item = static_cast<Type>(type_) == Type::bf16 ? 2 : 4;
    step_ = {};
    for (Rotary& rotary : rotaries_) {
      const std::size_t bytes = 2 * rotary.half * item;
      const Turn turn{rotary.cos.at_least(rows * bytes), rotary.sin.at_least(rows * bytes), type_, 2 * rotary.half};
      for (std::size_t i = 0; i < rows; ++i)
        pointwise().turn[type_](static_cast<float>(table_->computed[slots_[i]]), rotary.inverse, rotary.factor,
                                at_address<char>(turn.cos) + i * bytes, at_address<char>(turn.sin) + i * bytes, rotary.half);
      step_.turns.push_back(turn);
    }
    step_.workspace = workspace_.at_least(reel_.workspace_bytes(rows));
    step_.stream = stream_.at_least(rows * hidden_ * item);
    step_.logits = logits_.at_least(rows * vocab_ * sizeof(float));
    step_.rows = rows;
    step_.plan = plan_.get();
    step_.ids = reinterpret_cast<Address>(ids_.data());
  }

  void choose() {
    tokens_.resize(slots_.size());
    parallel_for(slots_.size(), [&](std::size_t i) {
      const std::size_t slot = slots_[i];
      const double temperature = sampling_->temperature[slot];
      LogitsRow row = {at_address<float>(step_.logits) + i * vocab_, vocab_, 0, 0, 1, 0, 0, 0};
      if (temperature >= kGreedyBelow) {
        row.temperature = temperature;
        row.top_p = sampling_->top_p[slot];
        row.min_p = sampling_->min_p[slot];
        row.top_k = sampling_->top_k[slot];
        row.key = row_key(sampling_->seed[slot], sampling_->choice[slot], table_->length[slot], 0);
      }
      float best;
      const std::int64_t token = choose_token(row, best);
      tokens_[i] = token < 0 ? kNoToken : static_cast<std::int32_t>(token);
    });
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      ++table_->computed[slots_[i]];
      table_->sampled[slots_[i]] = tokens_[i];
    }
  }

  const Reel& reel_;
  const int type_, hidden_, vocab_;
  std::vector<Rotary> rotaries_;
  const RequestTable* table_ = nullptr;
  const SamplingColumns* sampling_ = nullptr;
  // Of the step.
  std::vector<std::size_t> slots_;
  std::vector<std::int64_t> ids_, places_;
  std::vector<std::int32_t> blocks_, tokens_;
  std::unique_ptr<AttentionPlan> plan_;
  TapeStep step_;
  Lines workspace_, stream_, logits_;
};

}  // namespace

void bind_decoding(nb::module_& m) {
  nb::class_<Decoding>(m, "Decoding")
      .def(nb::init<const Reel&, const std::vector<std::tuple<Address, double, int>>&, int, int, int>(),
           nb::keep_alive<1, 2>())
      .def("begin", &Decoding::begin)
      .def("play", [](Decoding& decoding, int block, int entry, int stop, int most) {
        const Reel::Place place = decoding.play({block, entry, static_cast<Reel::Stop>(stop)}, most);
        return std::make_tuple(place.block, place.entry, static_cast<int>(place.stop));
      }, nb::call_guard<nb::gil_scoped_release>())
      .def("tokens", &Decoding::tokens);
}

}  // namespace phalanx
