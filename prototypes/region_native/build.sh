#!/bin/bash
T=/work/main/.venv/lib/python3.11/site-packages/torch
g++ -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -D_GLIBCXX_USE_CXX11_ABI=1 $FLAGS -I$T/include -I$T/include/torch/csrc/api/include region.cpp -o region.so -L$T/lib -ltorch_cpu -lc10 -Wl,-rpath,$T/lib "$@"
