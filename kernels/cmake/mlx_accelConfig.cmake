# For authors of CPU kernels:
#
#     cmake_minimum_required(VERSION 3.26)
#     project(my_plugin LANGUAGES NONE)
#     find_package(Python COMPONENTS Interpreter REQUIRED)
#     execute_process(COMMAND "${Python_EXECUTABLE}" -m backend_core --cmake-dir
#                     OUTPUT_VARIABLE mlx_accel_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE)
#     find_package(mlx_accel CONFIG REQUIRED)
#     mlx_accel_add_kernels(my_kernels
#       SOURCES src/kernels.cpp
#       AVX2 src/kernels_avx2.cpp
#       AVX512 src/kernels_avx512.cpp
#       DESTINATION my_plugin/kernels)
#
# gives the target mlx_accel::kernel_sdk (the include directory) and
#
#     mlx_accel_add_kernels(<target> SOURCES file... [AVX2 file...] [AVX512 file...] [AVX512_VNNI file...]
#                           [AVX512_BF16 file...] [AMX file...] [NEON_DOTPROD file...] [NEON_I8MM file...]
#                           [DESTINATION dir])
#
# which builds the shared library <target>.so (<target>.dylib on macOS) from C++20 sources: optimised, hidden
# visibility, no -march=native, no fast-math, and no fused multiply-adds but those the source asks for. Files
# under an instruction set's name are compiled with its flags, and only if processor family and compiler know
# it; ACCEL_BUILD_<NAME> is then defined for all files of the library. DESTINATION installs it.
#
# A project that does not enable C++ itself may be configured without a compiler: nothing is built then.

get_filename_component(_mlx_accel_include "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)

if(NOT CMAKE_CXX_COMPILER_LOADED)
  include(CheckLanguage)
  check_language(CXX)
  if(CMAKE_CXX_COMPILER)
    enable_language(CXX)
  endif()
endif()

if(NOT TARGET mlx_accel::kernel_sdk)
  add_library(mlx_accel::kernel_sdk INTERFACE IMPORTED)
  set_target_properties(mlx_accel::kernel_sdk PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_mlx_accel_include}")
endif()

function(mlx_accel_add_kernels target)
  set(x86_sets AVX2 AVX512 AVX512_VNNI AVX512_BF16 AMX)
  set(arm_sets NEON_DOTPROD NEON_I8MM)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "DESTINATION" "SOURCES;${x86_sets};${arm_sets}")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "mlx_accel_add_kernels: unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    message(FATAL_ERROR "mlx_accel_add_kernels: ${target} has no SOURCES")
  endif()
  if(NOT CMAKE_CXX_COMPILER_LOADED)
    message(STATUS "mlx-accel: ${target} is not built, since there is no C++ compiler")
    return()
  endif()

  set(avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  set(flags_AVX2 -mavx2 -mfma -mf16c)
  set(flags_AVX512 ${avx512})
  set(flags_AVX512_VNNI ${avx512} -mavx512vnni -mavx512vbmi)
  set(flags_AVX512_BF16 ${avx512} -mavx512vnni -mavx512vbmi -mavx512bf16)
  set(flags_AMX ${avx512} -mavx512vnni -mavx512vbmi -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16)
  set(flags_NEON_DOTPROD -march=armv8.2-a+dotprod+fp16)
  set(flags_NEON_I8MM -march=armv8.2-a+dotprod+fp16+i8mm)

  if(CMAKE_OSX_ARCHITECTURES)
    set(processor "${CMAKE_OSX_ARCHITECTURES}")
  else()
    set(processor "${CMAKE_SYSTEM_PROCESSOR}")
  endif()
  set(sets "")
  if(processor MATCHES "^(x86_64|AMD64|amd64)$")
    set(sets ${x86_sets})
  elseif(processor MATCHES "^(arm64|aarch64)")
    set(sets ${arm_sets})
  endif()

  add_library(${target} MODULE ${arg_SOURCES})
  include(CheckCXXCompilerFlag)
  foreach(set ${sets})
    if(NOT arg_${set})
      continue()
    endif()
    list(JOIN flags_${set} " " joined)
    check_cxx_compiler_flag("${joined}" MLX_ACCEL_COMPILER_HAS_${set})
    if(NOT MLX_ACCEL_COMPILER_HAS_${set})
      message(STATUS "mlx-accel: ${target} goes without its ${set} files, which this compiler cannot compile")
      continue()
    endif()
    target_sources(${target} PRIVATE ${arg_${set}})
    set_property(SOURCE ${arg_${set}} APPEND PROPERTY COMPILE_OPTIONS ${flags_${set}})
    target_compile_definitions(${target} PRIVATE ACCEL_BUILD_${set}=1)
  endforeach()

  target_link_libraries(${target} PRIVATE mlx_accel::kernel_sdk)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE -O3 -ffp-contract=off -fno-fast-math)
  if(APPLE)
    set(suffix ".dylib")
  else()
    set(suffix ".so")
  endif()
  set_target_properties(${target} PROPERTIES
    PREFIX "" SUFFIX "${suffix}" CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON)
  if(arg_DESTINATION)
    install(TARGETS ${target} LIBRARY DESTINATION "${arg_DESTINATION}")
  endif()
endfunction()

set(mlx_accel_FOUND TRUE)
