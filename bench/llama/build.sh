#!/bin/sh
# Builds llama-server and llama-logits in FOLDER/build/bin, from the llama.cpp in llama-cpp-python's
# source distribution. Takes about 8 minutes on two cores; needs pip, CMake, Ninja and a C++ compiler.
#
#     bench/llama/build.sh FOLDER
#
# PYTHON: an interpreter with pip; JOBS: compilers at once; LLAMA_CPP_PYTHON: the version.
set -eu

folder=${1:?"usage: bench/llama/build.sh FOLDER"}
here=$(dirname "$0")
version=${LLAMA_CPP_PYTHON:-0.3.36}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
archive=$folder/download/llama_cpp_python-$version.tar.gz
source=$folder/source-$version

if [ ! -f "$archive" ]; then
    "${PYTHON:-python3}" -m pip download --no-deps --no-binary llama-cpp-python \
        --dest "$folder/download" "llama-cpp-python==$version"
fi
if [ ! -d "$source" ]; then
    mkdir -p "$source.part"
    tar -xzf "$archive" -C "$source.part" --strip-components=1
    mv "$source.part" "$source"
fi

# Without TLS, the page and the tools that the comparison does not use.
nice -n 19 cmake -S "$source/vendor/llama.cpp" -B "$folder/build" -G Ninja \
    -D CMAKE_BUILD_TYPE=Release -D BUILD_SHARED_LIBS=OFF -D GGML_NATIVE=ON \
    -D LLAMA_OPENSSL=OFF -D LLAMA_BUILD_UI=OFF -D LLAMA_USE_PREBUILT_UI=OFF \
    -D LLAMA_BUILD_TESTS=OFF -D LLAMA_BUILD_EXAMPLES=OFF
nice -n 19 cmake --build "$folder/build" --parallel "$jobs" --target llama-server

llama=$source/vendor/llama.cpp
libraries=$folder/build/ggml/src
"${CXX:-c++}" -O2 -std=c++17 -fopenmp -I"$llama/include" -I"$llama/ggml/include" \
    "$here/logits.cpp" -o "$folder/build/bin/llama-logits" "$folder/build/src/libllama.a" \
    "$libraries/libggml.a" "$libraries/libggml-cpu.a" "$libraries/libggml-base.a" -ldl -lm -lpthread
"$folder/build/bin/llama-server" --version
