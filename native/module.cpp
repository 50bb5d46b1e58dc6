#include "amx.hpp"
#include "bindings.hpp"
#include "cpu.hpp"
#include "team.hpp"

namespace phalanx {

void bind_attention(nb::module_& m);
void bind_block_matmul(nb::module_& m);
void bind_decoding(nb::module_& m);
void bind_matmul(nb::module_& m);
void bind_pointwise(nb::module_& m);
void bind_request_rows(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_tape(nb::module_& m);

namespace {

std::vector<std::string> names_of(const std::vector<Isa>& sets) {
  std::vector<std::string> names;
  for (Isa isa : sets) names.emplace_back(name_of(isa));
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels for CPUs; see phalanx/kernels for what each does.";
  m.def("instruction_sets", [] { return names_of(available()); });
  m.def("compiled_instruction_sets", [] { return names_of(compiled()); });
  m.def("active_instruction_set", [] { return std::string(name_of(active())); });
  m.def("choose_instruction_set", &choose);
  m.def("assume_instruction_set", &assume);
  m.def("amx_refusal", &amx_refusal);
  m.def("amx_agrees", &amx_agrees);
  m.def("set_team", &set_team);
  m.def("set_team_spin", &set_team_spin);
  bind_attention(m);
  bind_block_matmul(m);
  bind_decoding(m);
  bind_matmul(m);
  bind_pointwise(m);
  bind_request_rows(m);
  bind_sampling(m);
  bind_tape(m);
}

}  // namespace phalanx
