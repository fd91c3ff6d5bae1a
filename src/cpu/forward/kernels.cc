// Compiled once per instruction set; isa.h says how the copies are kept apart.
#include "cpu/forward/kernels.h"

#include "cpu/forward/direct.h"
#include "cpu/forward/prepare.h"
#include "cpu/forward/recurrence.h"

#define FLASH_KDA_STRING_(x) #x
#define FLASH_KDA_STRING(x) FLASH_KDA_STRING_(x)

namespace flash_kda::cpu::FLASH_KDA_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {
    FLASH_KDA_STRING(FLASH_KDA_ISA), run_direct, load_state, prepare, recur, store_state};

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
