# Target flash_kda_eigen: the headers of Eigen >= 3.4, from find_package(Eigen3), or the wheel
# cmeel-eigen of the Python environment that builds, or fetched.
include_guard(GLOBAL)
include(PythonWheels)

set(FLASH_KDA_EIGEN_VERSION 3.4)
set(FLASH_KDA_EIGEN_WHEEL 3.4.1)
set(FLASH_KDA_EIGEN_SHA256 0ccd7b73fe8a72e2729784253c982e75d1790e0a8c71f302eb5a1fb1dd3a8a90)

function(flash_kda_find_eigen out)
  set(wheel_include cmeel.prefix/include/eigen3)
  find_package(Eigen3 NO_MODULE QUIET)
  if(Eigen3_FOUND AND Eigen3_VERSION VERSION_GREATER_EQUAL FLASH_KDA_EIGEN_VERSION)
    get_target_property(folder Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
  else()
    flash_kda_find_in_python(${wheel_include} folder)
    if(NOT folder)
      flash_kda_fetch_wheel(cmeel-eigen ${FLASH_KDA_EIGEN_WHEEL} ${FLASH_KDA_EIGEN_SHA256} unpacked)
      if(NOT unpacked)
        message(FATAL_ERROR "Eigen >= ${FLASH_KDA_EIGEN_VERSION} not found. Install it (Debian: "
                            "libeigen3-dev) and set Eigen3_DIR, or install the Python package "
                            "cmeel-eigen. ${unpacked_ERROR}")
      endif()
      set(folder "${unpacked}/${wheel_include}")
    endif()
  endif()
  message(STATUS "Eigen: ${folder}")
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

flash_kda_find_eigen(FLASH_KDA_EIGEN_INCLUDE)
add_library(flash_kda_eigen INTERFACE)
target_include_directories(flash_kda_eigen SYSTEM INTERFACE "${FLASH_KDA_EIGEN_INCLUDE}")
