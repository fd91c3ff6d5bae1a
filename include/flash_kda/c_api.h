/* The C ABI, for any language with a foreign function interface. Plain structs with a size field;
 * nothing is thrown, allocated for the caller or kept. Shapes, units and rules of the arguments are
 * those of flash_kda/forward.h. */
#ifndef FLASH_KDA_C_API_H_
#define FLASH_KDA_C_API_H_

#include <stddef.h>
#include <stdint.h>

#include "flash_kda/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with every change of a struct or enum below: who loads the library at run time compares it
 * with flash_kda_abi_version(). Besides, a size field that is not the library's own is an error
 * that names both sizes. */
#define FLASH_KDA_ABI_VERSION 1
#define FLASH_KDA_MAX_RANK 6

enum flash_kda_status {
  FLASH_KDA_OK = 0,
  FLASH_KDA_INVALID_VALUE = 1,
  FLASH_KDA_INVALID_TYPE = 2,
  FLASH_KDA_UNSUPPORTED = 3,
  FLASH_KDA_RUNTIME = 4
};

enum flash_kda_dtype {
  FLASH_KDA_OTHER_DTYPE = 0,
  FLASH_KDA_BFLOAT16 = 1,
  FLASH_KDA_FLOAT32 = 2,
  FLASH_KDA_INT32 = 3,
  FLASH_KDA_INT64 = 4,
  FLASH_KDA_UINT8 = 5,
  FLASH_KDA_FLOAT16 = 6,
  FLASH_KDA_FLOAT64 = 7
};

enum flash_kda_device_type { FLASH_KDA_CPU = 0, FLASH_KDA_CUDA = 1, FLASH_KDA_OTHER_DEVICE = 2 };

/* A tensor, or with given = 0 (as zeroed memory has it) an argument that is left out. */
typedef struct {
  int32_t given;
  int32_t dtype;       /* enum flash_kda_dtype */
  int32_t device_type; /* enum flash_kda_device_type */
  int32_t device_index;
  void* data;
  int64_t rank;
  int64_t shape[FLASH_KDA_MAX_RANK];
  int64_t stride[FLASH_KDA_MAX_RANK]; /* in elements */
} flash_kda_tensor;

typedef struct {
  size_t size; /* sizeof(flash_kda_forward_args) */
  flash_kda_tensor q, k, v, g;
  flash_kda_tensor beta;
  flash_kda_tensor out;
  flash_kda_tensor A_log, dt_bias;
  flash_kda_tensor initial_state, final_state;
  flash_kda_tensor cu_seqlens;
  flash_kda_tensor workspace;
  double scale;
  double lower_bound;
  void* stream; /* cudaStream_t; ignored on the CPU */
} flash_kda_forward_args;

typedef struct {
  size_t size;                /* sizeof(flash_kda_forward_plan) */
  const char* implementation; /* lives as long as the library */
  int64_t workspace_bytes;
} flash_kda_forward_plan;

/* Each function returns an enum flash_kda_status. Where it is not OK, at most capacity bytes of the
 * zero-terminated message are written to message (which may be null with capacity 0). */
FLASH_KDA_API int flash_kda_plan_forward(const flash_kda_forward_args* args,
                                         flash_kda_forward_plan* plan, char* message,
                                         size_t capacity);
FLASH_KDA_API int flash_kda_forward(const flash_kda_forward_args* args, char* message,
                                    size_t capacity);

/* Writes one line per implementation in order of preference: name, tab, "accepted" or "refused",
 * tab, reason (line breaks in it become spaces). Returns the status of the arguments themselves;
 * where it is not OK, it is every implementation's reason. *needed becomes the bytes of the
 * whole text with its zero (needed may be null); a smaller capacity cuts it. */
FLASH_KDA_API int flash_kda_explain(const flash_kda_forward_args* args, char* text, size_t capacity,
                                    size_t* needed);

/* An upper bound of workspace_bytes; never falls when an argument grows. */
FLASH_KDA_API int64_t flash_kda_workspace_size(int64_t tokens_total, int64_t heads,
                                               int64_t sequences);

FLASH_KDA_API int flash_kda_abi_version(void);
FLASH_KDA_API const char* flash_kda_version(void);
/* Comma-separated CUDA architectures compiled in, "" for a CPU-only build. */
FLASH_KDA_API const char* flash_kda_built_cuda_archs(void);
/* Comma-separated names of the implementations in this build, in order of preference. */
FLASH_KDA_API const char* flash_kda_implementation_names(void);

#ifdef __cplusplus
}
#endif

#endif /* FLASH_KDA_C_API_H_ */
