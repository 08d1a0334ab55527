// Kernels in place of the small memsets of a captured graph.
//
// cuBLAS sets counters to 0 before many a product. A GPU that replays a graph waits 8 us at a memset between two kernels, and 2 us at a
// kernel.
#include <vector>

#include "common/launch.cuh"

namespace fastlayers {
namespace {

constexpr unsigned kFillThreads = 256;
// Larger ones take longer than what a kernel saves.
constexpr size_t kLargestFill = 1 << 16;

// Sets bytes to those of a number of `size` bytes, again and again.
__global__ void fill(unsigned char* to, unsigned bytes, unsigned value, unsigned size) {
  const unsigned i = blockIdx.x * kFillThreads + threadIdx.x;
  if (i < bytes) to[i] = static_cast<unsigned char>(value >> (8 * (i % size)));
}

using Nodes = std::vector<cudaGraphNode_t>;

// The nodes that one waits for, or that wait for one; nothing if some wait for less than its end.
template <typename Get>
std::optional<Nodes> neighbours(cudaGraphNode_t node, Get get) {
  size_t count = 0;
  STD_CUDA_CHECK(get(node, nullptr, nullptr, &count));
  Nodes found(count);
  std::vector<cudaGraphEdgeData> edges(count);
  if (count > 0) STD_CUDA_CHECK(get(node, found.data(), edges.data(), &count));
  for (const cudaGraphEdgeData& edge : edges) {
    if (edge.type != cudaGraphDependencyTypeDefault || edge.from_port != 0) return std::nullopt;
  }
  return found;
}

#if CUDART_VERSION >= 13000
const auto kBefore = &cudaGraphNodeGetDependencies;
const auto kAfter = &cudaGraphNodeGetDependentNodes;
const auto kConnect = &cudaGraphAddDependencies;
#else
const auto kBefore = &cudaGraphNodeGetDependencies_v2;
const auto kAfter = &cudaGraphNodeGetDependentNodes_v2;
const auto kConnect = &cudaGraphAddDependencies_v2;
#endif

// Puts a kernel in the place of a node. Returns whether it did.
bool replace_memset(cudaGraph_t graph, cudaGraphNode_t node) {
  cudaMemsetParams memset{};
  STD_CUDA_CHECK(cudaGraphMemsetNodeGetParams(node, &memset));
  const size_t size = memset.width * memset.elementSize;
  if (memset.height != 1 || size == 0 || size > kLargestFill) return false;
  const std::optional<Nodes> before = neighbours(node, kBefore), after = neighbours(node, kAfter);
  if (!before || !after) return false;
  auto* to = static_cast<unsigned char*>(memset.dst);
  auto bytes = static_cast<unsigned>(size);
  void* arguments[] = {&to, &bytes, &memset.value, &memset.elementSize};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(&fill);
  kernel.gridDim = dim3((bytes + kFillThreads - 1) / kFillThreads);
  kernel.blockDim = dim3(kFillThreads);
  kernel.kernelParams = arguments;
  cudaGraphNode_t made = nullptr;
  STD_CUDA_CHECK(cudaGraphAddKernelNode(&made, graph, before->data(), before->size(), &kernel));
  const Nodes from(after->size(), made);
  if (!after->empty()) STD_CUDA_CHECK(kConnect(graph, from.data(), after->data(), nullptr, after->size()));
  STD_CUDA_CHECK(cudaGraphDestroyNode(node));
  return true;
}

// How many memsets of a graph, a cudaGraph_t that was captured on the current device, have become kernels.
int64_t memsets_to_kernels(int64_t address) {
  FASTLAYERS_CHECK(address != 0, "memsets_to_kernels", "expected the address of a graph, but got 0");
  auto* graph = reinterpret_cast<cudaGraph_t>(address);
  size_t count = 0;
  STD_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
  Nodes nodes(count);
  if (count > 0) STD_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
  int64_t replaced = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    STD_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    if (type == cudaGraphNodeTypeMemset && replace_memset(graph, node)) ++replaced;
  }
  return replaced;
}

}  // namespace
}  // namespace fastlayers

STABLE_TORCH_LIBRARY_IMPL(fastlayers, CompositeExplicitAutograd, m) {
  m.impl("memsets_to_kernels", TORCH_BOX(&fastlayers::memsets_to_kernels));
}
