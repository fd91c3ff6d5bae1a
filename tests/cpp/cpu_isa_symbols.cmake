# Every weak symbol in the object file of an instruction set must carry its name: the linker keeps
# one copy of each symbol, and a machine could get one with instructions that it lacks.
#   cmake -DNM=... "-DISAS=avx2;..." "-DOBJECTS=<object of each>" -P cpu_isa_symbols.cmake
cmake_minimum_required(VERSION 3.25)

foreach(isa object IN ZIP_LISTS ISAS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only ${object}
    OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
  if(NOT listing MATCHES "${isa}[^\n]*kKernels")
    message(FATAL_ERROR "${object} does not define the ${isa} kernels")
  endif()
  string(REGEX MATCHALL " [WVu] [^\n]+" symbols "${listing}")
  list(LENGTH symbols count)
  list(FILTER symbols EXCLUDE REGEX "${isa}")
  # The pointer to the C++ runtime's exception handler is data.
  list(FILTER symbols EXCLUDE REGEX "DW\\.ref\\.")
  foreach(symbol ${symbols})
    message(SEND_ERROR "${isa}: weak symbol that other objects may share: ${symbol}")
  endforeach()
  message(STATUS "${isa}: ${count} weak symbols looked at")
endforeach()
