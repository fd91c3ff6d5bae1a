# flash_kda_options: what every target of this project compiles its C++ with.
add_library(flash_kda_options INTERFACE)
target_compile_features(flash_kda_options INTERFACE cxx_std_20)
target_compile_options(flash_kda_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -fvisibility=hidden>)
if(FLASH_KDA_WERROR)
  target_compile_options(flash_kda_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(FLASH_KDA_SANITIZE)
  target_compile_options(flash_kda_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-sanitize-recover=all
      -fno-omit-frame-pointer>)
  target_link_options(flash_kda_options INTERFACE -fsanitize=address,undefined)
endif()
