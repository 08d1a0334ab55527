// FASTLAYERS_CPU_KERNELS(family, m) { m.impl(...); } registers what a source has for CPUs.
//
// build.py compiles such a source for all machines, and on x86-64 twice more, for AVX2 and for AVX-512. Those two are its
// FASTLAYERS_CPU_VARIANT; the first has FASTLAYERS_CPU_VARIANTS, and when the library is loaded it picks the highest that this machine has.
// Nothing of the others runs before that. ATEN_CPU_CAPABILITY=default or =avx2 lowers the choice, as it does torch's. The first is compiled
// to be small, since only machines without AVX2 run it. build.py lists what is compiled as one source, hence a namespace for each family.
#pragma once

#include <cstdlib>
#include <cstring>

#include <torch/csrc/stable/library.h>

#define FASTLAYERS_REGISTER_(family, variant) register_##family##_##variant
#define FASTLAYERS_REGISTER(family, variant) FASTLAYERS_REGISTER_(family, variant)

#if defined(FASTLAYERS_CPU_VARIANT)
#define FASTLAYERS_CPU_KERNELS(family, m) \
  void FASTLAYERS_REGISTER(family, FASTLAYERS_CPU_VARIANT)(torch::stable::detail::StableLibrary & m)
#elif !defined(FASTLAYERS_CPU_VARIANTS)  // another architecture
#define FASTLAYERS_CPU_KERNELS(family, m) STABLE_TORCH_LIBRARY_IMPL(fastlayers, CPU, m)
#else
namespace fastlayers {
namespace {

using Register = void (*)(torch::stable::detail::StableLibrary&);

inline Register choose(Register for_all, Register avx2, Register avx512) {
  const char* asked = std::getenv("ATEN_CPU_CAPABILITY");
  const auto is = [&](const char* name) { return asked != nullptr && std::strcmp(asked, name) == 0; };
  if (is("default") || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return for_all;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_avx512 && !is("avx2") ? avx512 : avx2;
}

}  // namespace
}  // namespace fastlayers

#define FASTLAYERS_CPU_KERNELS(family, m)                                                                                        \
  static void register_##family##_default(torch::stable::detail::StableLibrary&);                                                \
  void register_##family##_avx2(torch::stable::detail::StableLibrary&);                                                          \
  void register_##family##_avx512(torch::stable::detail::StableLibrary&);                                                        \
  STABLE_TORCH_LIBRARY_IMPL(fastlayers, CPU, library) {                                                                          \
    fastlayers::choose(register_##family##_default, register_##family##_avx2, register_##family##_avx512)(library);              \
  }                                                                                                                              \
  static void register_##family##_default(torch::stable::detail::StableLibrary& m)
#endif
