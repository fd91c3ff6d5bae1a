# Target GTest::gtest_main: an installed GoogleTest, or its sources as Debian ships them, from
# /usr/src or fetched by apt-get into the build folder (which needs no root).
include_guard(GLOBAL)

find_package(GTest QUIET)
if(NOT TARGET GTest::gtest_main)
  set(sources /usr/src/googletest)
  if(NOT EXISTS ${sources}/CMakeLists.txt)
    set(folder ${CMAKE_BINARY_DIR}/googletest)
    set(sources ${folder}/usr/src/googletest)
    if(NOT EXISTS ${sources}/CMakeLists.txt)
      file(MAKE_DIRECTORY ${folder})
      execute_process(
        COMMAND sh -c "apt-get -qq download googletest && dpkg-deb -x googletest_*.deb ."
        WORKING_DIRECTORY ${folder} OUTPUT_QUIET ERROR_QUIET)
    endif()
  endif()
  if(NOT EXISTS ${sources}/CMakeLists.txt)
    message(FATAL_ERROR "The C++ tests need GoogleTest, none found. Install it (Debian: "
                        "libgtest-dev, Fedora: gtest-devel, conda and Homebrew: gtest, googletest).")
  endif()
  message(STATUS "GoogleTest: ${sources}")
  set(INSTALL_GTEST OFF)
  set(BUILD_GMOCK OFF)
  add_subdirectory(${sources} ${CMAKE_BINARY_DIR}/googletest-build EXCLUDE_FROM_ALL SYSTEM)
  if(NOT TARGET GTest::gtest_main)
    add_library(GTest::gtest_main ALIAS gtest_main)
  endif()
endif()
