// One token through an installed libflash_kda, in C++.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "flash_kda/flash_kda.h"

int main() {
  using namespace flash_kda;
  constexpr uint16_t kOne = 0x3f80;  // 1.0 in bfloat16
  std::vector<uint16_t> ones(kHeadDim, kOne), out(kHeadDim, 0), beta(1, 0);
  ForwardArgs args;
  args.q = args.k = args.v = args.g =
      dense_tensor(ones.data(), DType::kBFloat16, {1, 1, 1, kHeadDim});
  args.beta = dense_tensor(beta.data(), DType::kBFloat16, {1, 1, 1});
  args.out = dense_tensor(out.data(), DType::kBFloat16, {1, 1, 1, kHeadDim});
  args.scale = 1.0;
  args.lower_bound = -5.0;
  const Status status = forward(args);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  // o = scale * beta * (q^ k^) v = 1/2 up to the epsilon of the norms.
  if (out[0] != 0x3f00 || out[kHeadDim - 1] != 0x3f00) return 2;
  args.scale = args.scale / 0.0;
  if (forward(args).code() != StatusCode::kInvalidValue) return 3;
  std::printf("flash_kda %s: %zu implementations\n", version(), implementation_names().size());
  return 0;
}
