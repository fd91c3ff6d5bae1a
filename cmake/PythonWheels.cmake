# Header-only dependencies from Python wheels: of the environment that builds, or fetched by pip
# into the build folder. Nothing is installed, no dependency of the wheel is fetched, and the
# archive's SHA-256 must match.
include_guard(GLOBAL)

# The Python interpreter that builds (a wheel build sets it), or the one on the path.
macro(flash_kda_require_python)
  if(NOT Python_EXECUTABLE)
    find_package(Python 3.8 COMPONENTS Interpreter)
  endif()
endmacro()

# The first existing sys.path entry + "/" + suffix, or "".
function(flash_kda_find_in_python suffix out)
  set(${out} "" PARENT_SCOPE)
  flash_kda_require_python()
  if(NOT Python_EXECUTABLE)
    return()
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import os, sys; print(next((p for p in (os.path.join(e, sys.argv[1]) for e in sys.path) if os.path.exists(p)), ''))"
      "${suffix}"
    OUTPUT_VARIABLE path ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${out} "${path}" PARENT_SCOPE)
endfunction()

# Fetches and unpacks name==version; `out` becomes the folder, or "" with the reason in
# `out`_ERROR. Takes seconds to fail without a network.
function(flash_kda_fetch_wheel name version sha256 out)
  set(folder "${CMAKE_BINARY_DIR}/wheels/${name}-${version}")
  set(${out} "" PARENT_SCOPE)
  if(EXISTS "${folder}/unpacked")
    set(${out} "${folder}/unpacked" PARENT_SCOPE)
    return()
  endif()
  flash_kda_require_python()
  if(NOT Python_EXECUTABLE)
    set(${out}_ERROR "no Python interpreter to run pip" PARENT_SCOPE)
    return()
  endif()
  message(STATUS "Fetching the headers of ${name} ${version} with pip")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pip --disable-pip-version-check --retries 1 --timeout 8
            download --quiet --no-deps --only-binary=:all: --dest "${folder}" "${name}==${version}"
    RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT 300)
  if(NOT status EQUAL 0)
    string(STRIP "pip download ${name}==${version} failed (${status}): ${text}" text)
    set(${out}_ERROR "${text}" PARENT_SCOPE)
    return()
  endif()
  file(GLOB wheel "${folder}/*.whl")
  file(SHA256 "${wheel}" found)
  if(NOT found STREQUAL sha256)
    file(REMOVE "${wheel}")
    set(${out}_ERROR "${name}==${version}: expected SHA-256 ${sha256}, got ${found}" PARENT_SCOPE)
    return()
  endif()
  file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${folder}/unpacking")
  file(RENAME "${folder}/unpacking" "${folder}/unpacked")
  set(${out} "${folder}/unpacked" PARENT_SCOPE)
endfunction()
