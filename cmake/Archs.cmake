# Chooses the CUDA architectures to build.
#
# In:  FLASH_KDA_CUDA_ARCHS, a CMake variable or else an environment variable:
#        auto    what the visible GPUs need (the default); CPU-only where there is no nvcc
#        all     every supported architecture
#        none    CPU-only
#        a list  "80,90a", "9.0a 12.0a", commas, semicolons or blanks between
# Out: FLASH_KDA_ARCHS         "80;90a", empty for a CPU-only build
#      FLASH_KDA_NVCC          the compiler, when FLASH_KDA_ARCHS is not empty
#      FLASH_KDA_CUDA_VERSION  its version, "13.0"; empty for a CPU-only build
# Run by `cmake -P` it defines its functions and chooses nothing.
include_guard(GLOBAL)

set(FLASH_KDA_SUPPORTED_ARCHS 80 90a 100a 103a 120a)
set(FLASH_KDA_MIN_CUDA 12.9)
set(_flash_kda_probe "${CMAKE_CURRENT_LIST_DIR}/visible_gpus.cc")

# "9.0a, 80" -> "80;90a", in the order of FLASH_KDA_SUPPORTED_ARCHS, each once.
function(flash_kda_parse_arch_list text out)
  string(REGEX REPLACE "[ \t,;]+" ";" words "${text}")
  set(wanted "")
  foreach(word IN LISTS words)
    if(word STREQUAL "")
      continue()
    endif()
    string(TOLOWER "${word}" arch)
    string(REGEX REPLACE "^(sm_|compute_)" "" arch "${arch}")
    string(REPLACE "." "" arch "${arch}")
    if(NOT arch IN_LIST FLASH_KDA_SUPPORTED_ARCHS AND "${arch}a" IN_LIST FLASH_KDA_SUPPORTED_ARCHS)
      string(APPEND arch "a")  # "9.0" means the one build for that device that there is
    endif()
    if(NOT arch IN_LIST FLASH_KDA_SUPPORTED_ARCHS)
      list(JOIN FLASH_KDA_SUPPORTED_ARCHS ", " supported)
      message(FATAL_ERROR "FLASH_KDA_CUDA_ARCHS: expected auto, all, none or a list of "
                          "${supported}; got \"${word}\" in \"${text}\".")
    endif()
    list(APPEND wanted "${arch}")
  endforeach()
  set(archs "")
  foreach(arch IN LISTS FLASH_KDA_SUPPORTED_ARCHS)
    if(arch IN_LIST wanted)
      list(APPEND archs "${arch}")
    endif()
  endforeach()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# "8.6;9.0" -> "80;90a". Code for 80 runs on all devices 8.x; the others run on their own alone.
function(flash_kda_archs_of_devices capabilities out)
  set(wanted "")
  foreach(capability IN LISTS capabilities)
    if(capability MATCHES "^8\\.")
      set(arch 80)
    else()
      string(REPLACE "." "" arch "${capability}a")
    endif()
    if(NOT arch IN_LIST FLASH_KDA_SUPPORTED_ARCHS)
      list(JOIN FLASH_KDA_SUPPORTED_ARCHS ", " supported)
      message(FATAL_ERROR
        "FLASH_KDA_CUDA_ARCHS=auto: a visible CUDA device has compute capability ${capability}; "
        "expected one that runs code for ${supported}. Set FLASH_KDA_CUDA_ARCHS to a list, or to "
        "none for a CPU-only build.")
    endif()
    list(APPEND wanted "${arch}")
  endforeach()
  flash_kda_parse_arch_list("${wanted}" archs)
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# Compute capabilities of the visible CUDA devices.
function(flash_kda_visible_devices out)
  try_run(status compiled SOURCES "${_flash_kda_probe}" LINK_LIBRARIES ${CMAKE_DL_LIBS} NO_CACHE
          RUN_OUTPUT_VARIABLE output)
  if(NOT compiled OR NOT status EQUAL 0)
    set(output "")
  endif()
  string(STRIP "${output}" output)
  string(REPLACE "\n" ";" output "${output}")
  set(${out} "${output}" PARENT_SCOPE)
endfunction()

function(flash_kda_find_nvcc out)
  set(hints "")
  foreach(root IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
    if(root)
      list(APPEND hints "${root}/bin")
    endif()
  endforeach()
  if(CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(nvcc "$ENV{CUDACXX}")
  else()
    find_program(nvcc nvcc HINTS ${hints} PATHS /usr/local/cuda/bin NO_CACHE)
  endif()
  if(NOT nvcc)
    set(nvcc "")
  endif()
  set(${out} "${nvcc}" PARENT_SCOPE)
endfunction()

function(flash_kda_check_nvcc nvcc out_version)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_VARIABLE text
                  RESULT_VARIABLE status)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" found "${text}")
  if(NOT status EQUAL 0 OR NOT CMAKE_MATCH_1)
    message(FATAL_ERROR "CUDA: expected nvcc >= ${FLASH_KDA_MIN_CUDA}, but \"${nvcc} --version\" "
                        "failed: ${status} ${text}")
  elseif(CMAKE_MATCH_1 VERSION_LESS FLASH_KDA_MIN_CUDA)
    message(FATAL_ERROR "CUDA: expected nvcc >= ${FLASH_KDA_MIN_CUDA}, found ${CMAKE_MATCH_1} "
                        "(${nvcc}). Set CUDACXX or CUDA_HOME to a newer toolkit, or "
                        "FLASH_KDA_CUDA_ARCHS=none for a CPU-only build.")
  endif()
  set(${out_version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

function(flash_kda_choose_archs)
  if(DEFINED FLASH_KDA_CUDA_ARCHS)
    set(request "${FLASH_KDA_CUDA_ARCHS}")
  else()
    set(request "$ENV{FLASH_KDA_CUDA_ARCHS}")
  endif()
  string(STRIP "${request}" request)
  string(TOLOWER "${request}" word)
  if(word STREQUAL "")
    set(word auto)
  endif()

  flash_kda_find_nvcc(nvcc)
  set(archs "")
  set(version "")
  if(word STREQUAL "auto")
    flash_kda_visible_devices(devices)
    if(nvcc AND NOT devices)
      # The leading blanks keep the text on one line.
      message(FATAL_ERROR "  FLASH_KDA_CUDA_ARCHS=auto requires a visible CUDA device. "
                          "Set FLASH_KDA_CUDA_ARCHS=all to build all supported archs.")
    elseif(NOT nvcc)
      list(JOIN devices ", " devices)
      if(NOT devices)
        set(devices none)
      endif()
      message(WARNING "CPU-ONLY BUILD: no nvcc found, so FLASH_KDA_CUDA_ARCHS=auto builds no CUDA "
                      "code (visible CUDA devices: ${devices}). For CUDA install the toolkit "
                      ">= ${FLASH_KDA_MIN_CUDA} and set CUDA_HOME or CUDACXX.")
    else()
      flash_kda_archs_of_devices("${devices}" archs)
    endif()
  elseif(word STREQUAL "all")
    set(archs ${FLASH_KDA_SUPPORTED_ARCHS})
  elseif(NOT word STREQUAL "none")
    flash_kda_parse_arch_list("${request}" archs)
  endif()

  if(archs)
    if(NOT nvcc)
      message(FATAL_ERROR "FLASH_KDA_CUDA_ARCHS=${request} needs nvcc >= ${FLASH_KDA_MIN_CUDA}, "
                          "none found. Set CUDA_HOME or CUDACXX, or FLASH_KDA_CUDA_ARCHS=none for "
                          "a CPU-only build.")
    endif()
    flash_kda_check_nvcc("${nvcc}" version)
  endif()
  if(archs)
    list(JOIN archs ", " shown)
    message(STATUS "CUDA architectures: ${shown} (CUDA ${version}, ${nvcc})")
  else()
    message(STATUS "CUDA architectures: none, a CPU-only build")
  endif()
  set(FLASH_KDA_ARCHS "${archs}" PARENT_SCOPE)
  set(FLASH_KDA_NVCC "${nvcc}" PARENT_SCOPE)
  set(FLASH_KDA_CUDA_VERSION "${version}" PARENT_SCOPE)
endfunction()

if(NOT CMAKE_SCRIPT_MODE_FILE)
  flash_kda_choose_archs()
  if(FLASH_KDA_ARCHS)
    # For enable_language(CUDA); each target sets its own architectures.
    set(CMAKE_CUDA_COMPILER "${FLASH_KDA_NVCC}" CACHE FILEPATH "nvcc")
    list(GET FLASH_KDA_ARCHS 0 CMAKE_CUDA_ARCHITECTURES)
  endif()
  include(Jobs)
endif()
