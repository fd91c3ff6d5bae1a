# How many compilers run at once: MAX_JOBS of them, each nvcc with NVCC_THREADS threads (one per
# architecture at work). Both may be given as environment variables; the defaults keep
# jobs * threads within the cores, and within the memory at FLASH_KDA_MIB_PER_COMPILER for each.
# Ninja only: other generators follow CMAKE_BUILD_PARALLEL_LEVEL.
include_guard(GLOBAL)

set(FLASH_KDA_MIB_PER_COMPILER 2560)  # of one architecture of one CuTe kernel file, at its peak

# The limit of this container's memory, or the memory of the machine, in MiB.
function(flash_kda_memory_mib out)
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
  foreach(file IN ITEMS /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes)
    if(EXISTS ${file})
      file(STRINGS ${file} limit LIMIT_COUNT 1)
      if(limit MATCHES "^[0-9]+$")
        math(EXPR limit "${limit} / 1048576")
        if(limit LESS memory)
          set(memory ${limit})
        endif()
      endif()
    endif()
  endforeach()
  set(${out} ${memory} PARENT_SCOPE)
endfunction()

# The cores this process may use.
function(flash_kda_cores out)
  execute_process(COMMAND nproc OUTPUT_VARIABLE cores ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  endif()
  set(${out} ${cores} PARENT_SCOPE)
endfunction()

function(flash_kda_positive_env name out)
  set(value "$ENV{${name}}")
  if(NOT value STREQUAL "" AND NOT value MATCHES "^[1-9][0-9]*$")
    message(FATAL_ERROR "${name}: expected a positive integer, got \"${value}\".")
  endif()
  set(${out} "${value}" PARENT_SCOPE)
endfunction()

function(flash_kda_plan_jobs out_jobs out_threads)
  flash_kda_cores(cores)
  flash_kda_memory_mib(memory)
  math(EXPR budget "${memory} / ${FLASH_KDA_MIB_PER_COMPILER}")
  if(budget GREATER cores)
    set(budget ${cores})
  elseif(budget LESS 1)
    set(budget 1)
  endif()
  flash_kda_positive_env(NVCC_THREADS threads)
  flash_kda_positive_env(MAX_JOBS jobs)
  if(NOT threads)
    # There are about eight kernel files at a time to keep busy; more cores go to architectures.
    list(LENGTH FLASH_KDA_ARCHS archs)
    math(EXPR threads "${budget} / 8")
    if(threads GREATER archs)
      set(threads ${archs})
    endif()
    if(threads LESS 1)
      set(threads 1)
    endif()
  endif()
  if(NOT jobs)
    math(EXPR jobs "${budget} / ${threads}")
    if(jobs LESS 1)
      set(jobs 1)
    endif()
  endif()
  set(${out_jobs} ${jobs} PARENT_SCOPE)
  set(${out_threads} ${threads} PARENT_SCOPE)
endfunction()

flash_kda_plan_jobs(FLASH_KDA_JOBS FLASH_KDA_NVCC_THREADS)
set_property(GLOBAL APPEND PROPERTY JOB_POOLS flash_kda_compile=${FLASH_KDA_JOBS})
set(CMAKE_JOB_POOL_COMPILE flash_kda_compile)
if(FLASH_KDA_ARCHS)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--threads=${FLASH_KDA_NVCC_THREADS}>)
endif()
message(STATUS "Compilers at once: ${FLASH_KDA_JOBS}, threads of each nvcc: "
               "${FLASH_KDA_NVCC_THREADS}")
