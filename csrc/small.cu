// The families with little code for GPUs, in one translation unit: reading the headers takes longer than compiling each of them.
#include "autocast.cu"
#include "gather.cu"
#include "glu.cu"
#include "linear.cu"
#include "max_pool2d.cu"
#include "squeeze_excite.cu"
