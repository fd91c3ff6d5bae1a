/* One token through the C ABI. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "flash_kda/c_api.h"

enum { kHeadDim = 128 };

static flash_kda_tensor bf16_tensor(void* data, int64_t rank) {
  flash_kda_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.given = 1;
  tensor.dtype = FLASH_KDA_BFLOAT16;
  tensor.data = data;
  tensor.rank = rank;
  for (int axis = 0; axis < rank; ++axis) {
    tensor.shape[axis] = axis == 3 ? kHeadDim : 1;
    tensor.stride[axis] = axis == 3 || rank == 3 ? 1 : kHeadDim;
  }
  return tensor;
}

int main(void) {
  static uint16_t ones[kHeadDim], out[kHeadDim], beta[1];
  for (int c = 0; c < kHeadDim; ++c) ones[c] = 0x3f80;
  flash_kda_forward_args args;
  memset(&args, 0, sizeof args);
  args.size = sizeof args;
  args.q = args.k = args.v = args.g = bf16_tensor(ones, 4);
  args.out = bf16_tensor(out, 4);
  args.beta = bf16_tensor(beta, 3);
  args.scale = 1.0;
  args.lower_bound = -5.0;
  char message[256];
  if (flash_kda_forward(&args, message, sizeof message) != FLASH_KDA_OK) {
    fprintf(stderr, "%s\n", message);
    return 1;
  }
  if (out[0] != 0x3f00) return 2;
  args.lower_bound = -7.0;
  if (flash_kda_forward(&args, message, sizeof message) != FLASH_KDA_INVALID_VALUE) return 3;
  if (strstr(message, "lower_bound") == NULL) return 4;
  args.size = 8;
  if (flash_kda_forward(&args, message, sizeof message) != FLASH_KDA_INVALID_VALUE) return 5;
  printf("flash_kda %s: %s\n", flash_kda_version(), flash_kda_implementation_names());
  return 0;
}
