# Target flash_kda_cutlass: the CUTLASS and CuTe headers, from
#   1. FLASH_KDA_CUTLASS_DIR, a CMake variable or else an environment variable: a CUTLASS checkout
#      or its include folder,
#   2. find_package(NvidiaCutlass),
#   3. the wheel nvidia-cutlass of the Python environment that builds, or fetched without its
#      dependencies.
# They are passed with -I (not -isystem), so headers on CPATH or in system folders never win.
include_guard(GLOBAL)
include(PythonWheels)

set(FLASH_KDA_CUTLASS_VERSION 4.2.0)        # the least that the kernels compile with
set(FLASH_KDA_CUTLASS_WHEEL 4.2.0.0)
set(FLASH_KDA_CUTLASS_SHA256 f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6)

# "4.2.0" of the headers in folder, or "" where there are none.
function(flash_kda_cutlass_version folder out)
  set(version "")
  if(EXISTS "${folder}/cute/tensor.hpp" AND EXISTS "${folder}/cutlass/version.h")
    file(READ "${folder}/cutlass/version.h" text)
    foreach(part MAJOR MINOR PATCH)
      string(REGEX MATCH "#define CUTLASS_${part} +([0-9]+)" match "${text}")
      list(APPEND version "${CMAKE_MATCH_1}")
    endforeach()
    list(JOIN version "." version)
  endif()
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

function(flash_kda_find_cutlass out)
  set(given "$ENV{FLASH_KDA_CUTLASS_DIR}")
  if(FLASH_KDA_CUTLASS_DIR)
    set(given "${FLASH_KDA_CUTLASS_DIR}")
  endif()
  set(wheel_include cutlass_library/source/include)
  if(given)
    set(folder "${given}")
    if(EXISTS "${given}/include/cute/tensor.hpp")
      set(folder "${given}/include")
    endif()
    flash_kda_cutlass_version("${folder}" version)
    if(NOT version)
      message(FATAL_ERROR "FLASH_KDA_CUTLASS_DIR: expected a folder with include/cute/tensor.hpp, "
                          "got \"${given}\".")
    endif()
  else()
    find_package(NvidiaCutlass CONFIG QUIET)
    if(TARGET nvidia::cutlass::cutlass)
      get_target_property(folders nvidia::cutlass::cutlass INTERFACE_INCLUDE_DIRECTORIES)
      foreach(candidate IN LISTS folders)
        flash_kda_cutlass_version("${candidate}" version)
        if(version)
          set(folder "${candidate}")
          break()
        endif()
      endforeach()
    endif()
    if(NOT folder)
      flash_kda_find_in_python(${wheel_include} folder)
    endif()
    if(NOT folder)
      flash_kda_fetch_wheel(nvidia-cutlass ${FLASH_KDA_CUTLASS_WHEEL} ${FLASH_KDA_CUTLASS_SHA256}
                            unpacked)
      if(NOT unpacked)
        message(FATAL_ERROR "CUTLASS headers not found. Set FLASH_KDA_CUTLASS_DIR to a CUTLASS >= "
                            "${FLASH_KDA_CUTLASS_VERSION} checkout, or install the Python package "
                            "nvidia-cutlass==${FLASH_KDA_CUTLASS_WHEEL}. ${unpacked_ERROR}")
      endif()
      set(folder "${unpacked}/${wheel_include}")
    endif()
  endif()
  flash_kda_cutlass_version("${folder}" version)
  if(version VERSION_LESS FLASH_KDA_CUTLASS_VERSION)
    message(FATAL_ERROR "CUTLASS: expected >= ${FLASH_KDA_CUTLASS_VERSION}, found ${version} in "
                        "${folder}. Set FLASH_KDA_CUTLASS_DIR to a newer one.")
  endif()
  message(STATUS "CUTLASS ${version}: ${folder}")
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

flash_kda_find_cutlass(FLASH_KDA_CUTLASS_INCLUDE)
add_library(flash_kda_cutlass INTERFACE)
target_include_directories(flash_kda_cutlass BEFORE INTERFACE "${FLASH_KDA_CUTLASS_INCLUDE}")
