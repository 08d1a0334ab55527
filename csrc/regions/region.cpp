// A recorded forward and its backward, run as one node of autograd.
//
// Python records the operations of a module's forward and backward (patching/program/tape.py) and describes them to a
// Region: operations, what they take, which values the backward needs. A call then runs the forward below autograd and
// autocast and makes one node, which runs the backward in the same way. Python has tested by then that the call is one
// of those that were recorded.
//
// torch has no stable ABI for nodes of autograd, so the library is built for one version of torch. It needs neither
// Python.h nor pybind11: one library serves every Python.

#include <ATen/SavedTensorHooks.h>
#include <ATen/ScalarOps.h>
#include <ATen/TracerMode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Registers = c10::SmallVector<IValue, 64>;
using Numbers = std::vector<int64_t>;
using Given = c10::SmallVector<int64_t, 24>;
using Tensors = c10::List<Tensor>;
using Gradients = c10::List<std::optional<Tensor>>;
namespace autograd = torch::autograd;

// -- programs ---------------------------------------------------------------------------------------------------------

// How Python describes an argument: (kind, payload).
enum Kind : int64_t { CONSTANT, REGISTER, LIST, DEFAULT };

struct Argument {
  Kind kind;
  IValue constant;
  Numbers registers;       // one, or those of a list, in which -1 is None
  c10::TypePtr element;    // of a list
  bool tensor = false;     // whether the operation takes a tensor, where it may be given a number
  std::vector<char> last;  // whether nothing uses the register afterwards, so that it can be moved
};

struct Launch;

// Operations on numbers that follow from sizes, one that lays a tensor out, and one that tests how it is.
enum Computes : int64_t { SIZE, ADD, MUL, FLOORDIV, MOD, MAX, MIN, TRUEDIV, FLOAT, INT, LAYOUT, CHECK, NOTHING };

struct Step {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  Numbers results;  // a register for each result, -1 for one that nothing uses
  bool unpack;      // whether the operation returns one list of tensors
  bool effect;      // whether it matters even if no result is used
  bool python;      // whether it is a call of Python, which no dispatch mode should see
  c10::intrusive_ptr<Launch> launch = {};  // what this call of Python does, if it launches one kernel
  Computes computes = NOTHING;             // what is done instead of a call
};

using Program = std::vector<Step>;

// An argument as the type of its schema: Python has no typed empty list, gives an int for a float, and sees None where
// an operation, such as the backward of flash attention, takes an undefined tensor.
IValue coerced(const IValue& value, const c10::TypePtr& type) {
  if (value.isNone()) return type->kind() == c10::TypeKind::TensorType ? IValue(Tensor()) : value;
  if (auto optional = type->cast<c10::OptionalType>()) return coerced(value, optional->getElementType());
  if (type->kind() == c10::TypeKind::TensorType) return at::native::wrapped_scalar_tensor(value.toScalar());
  if (type->kind() == c10::TypeKind::FloatType && value.isInt()) return static_cast<double>(value.toInt());
  if (type->kind() == c10::TypeKind::NumberType || !type->cast<c10::ListType>()) return value;
  const auto element = type->expectRef<c10::ListType>().getElementType();
  c10::impl::GenericList list(element);
  if (value.isList()) {
    for (const auto& item : value.toListRef()) list.push_back(coerced(item, element));
  } else if (value.isTuple()) {
    for (const auto& item : value.toTupleRef().elements()) list.push_back(coerced(item, element));
  } else {
    list.push_back(coerced(value, element));
  }
  return list;
}

// The steps that contribute to the needed registers or have an effect, with the last use of each register marked.
Program alive(const Program& program, const Numbers& needed) {
  std::unordered_set<int64_t> later(needed.begin(), needed.end());
  Program found;
  for (auto it = program.rbegin(); it != program.rend(); ++it) {
    bool used = it->effect;
    for (auto r : it->results) used |= later.count(r) > 0;
    if (!used) continue;
    Step step = *it;
    for (auto& r : step.results) {
      if (!later.count(r)) r = -1;
    }
    for (auto argument = step.arguments.rbegin(); argument != step.arguments.rend(); ++argument) {
      argument->last.resize(argument->registers.size());
      for (size_t i = argument->registers.size(); i-- > 0;) {
        const auto r = argument->registers[i];
        argument->last[i] = r >= 0 && later.insert(r).second;
      }
    }
    found.push_back(std::move(step));
  }
  std::reverse(found.begin(), found.end());
  return found;
}

// -- kernels of Triton ------------------------------------------------------------------------------------------------

// The handle of a stream; none where this torch does not give it, so that every launch is Python's.
template <typename S>
auto handle_of(const S& stream, int) -> decltype(std::optional<void*>(stream.native_handle())) {
  return stream.native_handle();
}
template <typename S>
std::optional<void*> handle_of(const S& /*stream*/, long) {
  return std::nullopt;
}

// A kernel whose arguments are its results, its inputs and numbers. Python compiles it in its first call, and hands over the machine
// code.
struct Launch : torch::CustomClassHolder {
  static constexpr int kInvalidContext = 201;
  using Function = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  struct Result {
    Numbers sizes, strides;
    at::ScalarType dtype;
  };
  std::vector<Result> results;
  bool many;  // whether each call gives the grid, the numbers, and the sizes and the strides of the results
  std::atomic<bool> ready{false};
  at::Device device{at::kCUDA, 0};
  void* code = nullptr;
  unsigned programs = 0, threads = 0, shared = 0;
  Numbers numbers;
  Numbers wide;  // for each number whether it has 64 bits

  explicit Launch(bool many_sizes) : many(many_sizes) {}

  // The next result is like this tensor.
  void add_result(const Tensor& like) { results.push_back({like.sizes().vec(), like.strides().vec(), like.scalar_type()}); }

  bool is_ready() const { return ready; }

  void set(int64_t index, int64_t function, int64_t grid, int64_t block, int64_t bytes, Numbers given, Numbers are_wide) {
    if (ready || driver() == nullptr) return;
    device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
    code = reinterpret_cast<void*>(function);
    programs = static_cast<unsigned>(grid), threads = static_cast<unsigned>(block), shared = static_cast<unsigned>(bytes);
    numbers = std::move(given), wide = std::move(are_wide);
    ready = true;
  }

  // cuLaunchKernel, which nothing links to.
  static Function driver() {
    static const auto found = [] {
      void* library = dlopen("libcuda.so.1", RTLD_LAZY);
      return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, "cuLaunchKernel"));
    }();
    return found;
  }

  // Launches the kernel for inputs that it was compiled for: aligned, on the current device. Returns whether it did.
  bool run(const c10::SmallVectorImpl<Tensor>& inputs, const Given& given, c10::SmallVectorImpl<Tensor>& made) const {
    if (!ready) return false;
    const int64_t* next = given.data();
    const unsigned grid = many ? static_cast<unsigned>(*next++) : programs;
    const int64_t* values = many ? next : numbers.data();
    next += many ? numbers.size() : 0;
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    if (guard.getDevice() != device) return false;
    const auto stream = handle_of(guard.getStream(device), 0);
    if (!stream) return false;
    for (const auto& t : inputs) {
      if (t.device() != device || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
    }
    const auto options = at::TensorOptions().device(device);
    c10::SmallVector<void*, 32> pointers;
    for (const auto& result : results) {
      const auto dims = result.sizes.size();
      const at::IntArrayRef sizes = many ? at::IntArrayRef(next, dims) : at::IntArrayRef(result.sizes);
      const at::IntArrayRef strides = many ? at::IntArrayRef(next + dims, dims) : at::IntArrayRef(result.strides);
      if (many) next += 2 * dims;
      made.push_back(at::empty_strided(sizes, strides, options.dtype(result.dtype)));
      pointers.push_back(made.back().data_ptr());
    }
    for (const auto& t : inputs) pointers.push_back(const_cast<void*>(t.const_data_ptr()));
    c10::SmallVector<void*, 48> arguments;
    for (auto& pointer : pointers) arguments.push_back(&pointer);
    c10::SmallVector<int32_t, 8> narrow(values, values + numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      arguments.push_back(wide[i] ? static_cast<void*>(const_cast<int64_t*>(&values[i])) : &narrow[i]);
    }
    void* scratch = nullptr;  // Triton's kernels take pointers to memory of their own, which these do not need.
    for (int i = 0; i < 4; ++i) arguments.push_back(&scratch);
    const int error = driver()(code, grid, 1, 1, threads, 1, 1, shared, *stream, arguments.data(), nullptr);
    // The first work of a thread may find no context, as in a backward: Triton's own launch gives it one.
    if (error == kInvalidContext) return false;
    TORCH_CHECK(error == 0, "cuLaunchKernel failed with the CUDA error ", error);
    return true;
  }
};

IValue take(Registers& registers, int64_t r, bool last) {
  if (r < 0) return {};
  return last ? std::move(registers[r]) : registers[r];
}

// Runs a step that launches a kernel. Returns whether that was possible without Python.
bool launch(const Step& step, Registers& registers) {
  const auto &taken = step.arguments[1], &counted = step.arguments[2];
  c10::SmallVector<Tensor, 16> inputs, made;
  Given given;
  for (auto r : taken.registers) inputs.push_back(registers[r].toTensor());
  for (auto r : counted.registers) given.push_back(registers[r].toInt());
  if (!step.launch->run(inputs, given, made)) return false;
  for (size_t i = 0; i < taken.registers.size(); ++i) {
    if (taken.last[i]) registers[taken.registers[i]] = IValue();
  }
  for (size_t i = 0; i < made.size(); ++i) {
    if (step.results[i] >= 0) registers[step.results[i]] = std::move(made[i]);
  }
  return true;
}

int64_t floor_division(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// A number, as Python computes it.
IValue computed(Computes what, const IValue& a, const IValue& b) {
  if (what == FLOAT) return a.isInt() ? static_cast<double>(a.toInt()) : a.toDouble();
  if (what == INT) return a.isInt() ? a.toInt() : static_cast<int64_t>(a.toDouble());
  if (a.isInt() && b.isInt() && what != TRUEDIV) {
    const int64_t x = a.toInt(), y = b.toInt();
    TORCH_CHECK(y != 0 || (what != FLOORDIV && what != MOD), "division by zero");
    switch (what) {
      case ADD: return x + y;
      case MUL: return x * y;
      case FLOORDIV: return floor_division(x, y);
      case MOD: return x - y * floor_division(x, y);
      case MAX: return std::max(x, y);
      default: return std::min(x, y);
    }
  }
  const double x = a.isInt() ? static_cast<double>(a.toInt()) : a.toDouble();
  const double y = b.isInt() ? static_cast<double>(b.toInt()) : b.toDouble();
  switch (what) {
    case ADD: return x + y;
    case MUL: return x * y;
    case FLOORDIV: return std::floor(x / y);
    case MOD: return x - y * std::floor(x / y);
    case MAX: return std::max(x, y);
    case MIN: return std::min(x, y);
    default: return x / y;
  }
}

IValue computed(const Step& step, Registers& registers) {
  const auto operand = [&](size_t i) -> IValue {
    const auto& argument = step.arguments[i];
    return argument.kind == CONSTANT ? argument.constant : take(registers, argument.registers[0], argument.last[0]);
  };
  IValue first = operand(0);
  if (step.computes == SIZE) return first.toTensor().size(operand(1).toInt());
  if (step.computes < LAYOUT) return computed(step.computes, first, step.arguments.size() > 1 ? operand(1) : IValue());
  c10::SmallVector<int64_t, 6> strides;
  for (size_t i = 1; i < step.arguments.size(); ++i) strides.push_back(operand(i).toInt());
  const auto& t = first.toTensor();
  if (t.strides() == strides) return first;
  TORCH_CHECK(
      step.computes == LAYOUT, "a result of a program for many sizes has another layout: ", t.strides(), " instead of ",
      at::IntArrayRef(strides), " for ", t.sizes());
  return at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
}

void run(const Program& program, Registers& registers) {
  // What autograd and autocast do was recorded.
  static const auto above = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  c10::impl::ExcludeDispatchKeyGuard guard(above);
  Stack stack;
  stack.reserve(16);
  for (const auto& step : program) {
    if (step.computes != NOTHING) {
      auto found = computed(step, registers);
      if (step.results[0] >= 0) registers[step.results[0]] = std::move(found);
      continue;
    }
    if (step.launch && step.launch->ready && launch(step, registers)) continue;
    for (const auto& argument : step.arguments) {
      if (argument.kind == CONSTANT) {
        stack.push_back(argument.constant);
      } else if (argument.kind == REGISTER) {
        auto value = take(registers, argument.registers[0], argument.last[0]);
        if (argument.tensor && value.isScalar()) value = at::native::wrapped_scalar_tensor(value.toScalar());
        stack.push_back(std::move(value));
      } else {
        c10::impl::GenericList list(argument.element);
        list.reserve(argument.registers.size());
        for (size_t i = 0; i < argument.registers.size(); ++i) {
          list.push_back(take(registers, argument.registers[i], argument.last[i]));
        }
        stack.emplace_back(std::move(list));
      }
    }
    if (step.python) {
      step.op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
    } else {
      step.op.callBoxed(stack);
    }
    const auto list = step.unpack ? std::move(stack[0]).toList().vec() : std::vector<IValue>();
    for (size_t i = 0; i < step.results.size(); ++i) {
      if (step.results[i] >= 0) registers[step.results[i]] = step.unpack ? list[i] : std::move(stack[i]);
    }
    stack.clear();
  }
}

// -- regions ----------------------------------------------------------------------------------------------------------

struct Region : torch::CustomClassHolder {
  Program forward, backward;
  int64_t size = 0;                       // the number of registers; the first ones are the inputs
  int64_t count = 0;                      // the number of inputs that need gradients, the first ones
  Numbers results, kept, grads, wanted;   // registers; -1 for a gradient that is missing
  Numbers written;                        // the inputs whose versions the forward raises
  Numbers read;                           // those whose values a derivative of the backward reads
  Numbers active;                         // the results that have gradients
  std::vector<std::optional<Numbers>> strides;  // of these gradients, as they were recorded; none where the backward sees to it
  std::vector<std::pair<int64_t, IValue>> constants;  // registers of numbers
  int64_t identity = 0;                   // differs from that of every other region of this process
  std::mutex mutex;
  struct Pruned {
    Program program;
    Numbers kept;  // the places of what it needs in what the region keeps: the rest may have been written since
  };
  std::map<std::vector<bool>, Pruned> pruned;

  // The backward that computes only what is asked. Elements of a map stay where they are.
  const Pruned& backward_for(const std::vector<bool>& asked) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = pruned.find(asked);
    if (it == pruned.end()) {
      Numbers needed;
      for (size_t i = 0; i < asked.size(); ++i) {
        if (asked[i]) needed.push_back(wanted[i]);
      }
      auto program = alive(backward, needed);
      for (const auto& step : program) {
        for (const auto& argument : step.arguments) {
          needed.insert(needed.end(), argument.registers.begin(), argument.registers.end());
        }
      }
      Numbers places;
      for (size_t i = 0; i < kept.size(); ++i) {
        if (std::find(needed.begin(), needed.end(), kept[i]) != needed.end()) places.push_back(static_cast<int64_t>(i));
      }
      it = pruned.emplace(asked, Pruned{std::move(program), std::move(places)}).first;
    }
    return it->second;
  }

  // The next operation of the forward or of the backward.
  void add_operation(
      bool of_backward, std::string name, std::string overload, IValue arguments, Numbers made, bool unpack, bool effect) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    Step step{op, {}, std::move(made), unpack, effect, false};
    const auto& schema = op.schema().arguments();
    const auto& given = arguments.toTupleRef().elements();
    TORCH_CHECK(given.size() == schema.size(), name, ": ", given.size(), " arguments of ", schema.size());
    for (size_t i = 0; i < schema.size(); ++i) {
      const auto& pair = given[i].toTupleRef().elements();
      Argument argument{static_cast<Kind>(pair[0].toInt()), {}, {}, nullptr, {}};
      argument.tensor = schema[i].type()->kind() == c10::TypeKind::TensorType;
      if (argument.kind == DEFAULT) {
        argument.kind = CONSTANT;
        argument.constant = *schema[i].default_value();
      } else if (argument.kind == CONSTANT) {
        argument.constant = coerced(pair[1], schema[i].type());
      } else {
        argument.registers = pair[1].toIntVector();
        if (argument.kind == LIST) {
          auto type = schema[i].type();
          if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
          argument.element = type->expectRef<c10::ListType>().getElementType();
        }
      }
      step.arguments.push_back(std::move(argument));
    }
    (of_backward ? backward : forward).push_back(std::move(step));
  }

  // The next operation is a function of Python that takes lists of tensors and numbers, and returns one of tensors. If it launches a
  // kernel and does nothing else, `launched` is that.
  void add_kernel(bool of_backward, IValue function, Numbers taken, Numbers counted, Numbers made, const IValue& launched) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fastlayers_regions::run_kernel", "");
    Step step{op, {}, std::move(made), /*unpack=*/true, /*effect=*/launched.isNone(), /*python=*/true};
    if (!launched.isNone()) step.launch = launched.toCustomClass<Launch>();
    step.arguments.push_back({CONSTANT, std::move(function), {}, nullptr, {}});
    step.arguments.push_back({LIST, {}, std::move(taken), c10::TensorType::get(), {}});
    step.arguments.push_back({LIST, {}, std::move(counted), c10::IntType::get(), {}});
    (of_backward ? backward : forward).push_back(std::move(step));
  }

  // The next operation is one on numbers. The constants among its operands stand where a register is -1.
  void add_number(bool of_backward, int64_t what, Numbers taken, IValue constants, int64_t made) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fastlayers_regions::run_kernel", "");
    Step step{op, {}, {made}, /*unpack=*/false, /*effect=*/what == CHECK, /*python=*/false};
    step.computes = static_cast<Computes>(what);
    auto constant = constants.toTupleRef().elements().begin();
    for (auto r : taken) {
      step.arguments.push_back(
          r < 0 ? Argument{CONSTANT, *constant++, {}, nullptr, {}} : Argument{REGISTER, {}, {r}, nullptr, {}});
    }
    (of_backward ? backward : forward).push_back(std::move(step));
  }

  void finish(
      Numbers results_, Numbers kept_, Numbers grads_, Numbers wanted_, int64_t size_, int64_t count_, Numbers written_,
      Numbers active_, std::vector<std::optional<Numbers>> strides_) {
    results = results_, kept = kept_, grads = grads_, wanted = wanted_, size = size_, count = count_;
    written = written_, active = active_, strides = strides_;
    static std::atomic<int64_t> count_of_regions{0};
    identity = ++count_of_regions;
    auto needed = results;
    needed.insert(needed.end(), kept.begin(), kept.end());
    forward = alive(forward, needed);
  }

  Registers empty_registers() const {
    Registers registers(size);
    for (const auto& [r, number] : constants) registers[r] = number;
    return registers;
  }

  Registers run_forward(c10::ArrayRef<IValue> inputs) const {
    auto registers = empty_registers();
    std::copy(inputs.begin(), inputs.end(), registers.begin());
    run(forward, registers);
    return registers;
  }
};

// -- the node ---------------------------------------------------------------------------------------------------------

// Nodes became intrusive_ptr_targets between torch 2.11 and 2.13.
template <typename Node>
auto make_node(autograd::edge_list&& edges) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::move(edges));
  } else {
    return std::shared_ptr<Node>(new Node(std::move(edges)), [](auto* node) { deleteNode(node); });
  }
}

struct RegionBackward final : autograd::Node {
  c10::intrusive_ptr<Region> region;
  std::vector<autograd::SavedVariable> saved;  // what the region keeps, and then what `from` adds
  // For the derivative of the backward: the inputs, undefined where one was computed by another node. Such a one is in `saved`, from[i]
  // says where: hooks on saved tensors, as those of checkpoints are, decide whether it stays alive. Parameters do anyway; those that the
  // derivative reads are there too if there are hooks, which may keep a copy.
  Tensors inputs;
  Numbers versions, from;
  IValue again;
  bool released = false;
  // For compiled autograd, which has an address in a tensor as an input of its graph: this node's, and that of the node for its call.
  int64_t address = reinterpret_cast<int64_t>(this);
  mutable Tensor for_call;

  using Node::Node;

  std::string name() const override {
    return "FastlayersRegionBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

  // The graph of compiled autograd has one call of this backward, which Dynamo leaves as it is. It comes after the variables of this node
  // were released: another node without edges has them.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    auto node = make_node<RegionBackward>(autograd::edge_list());
    auto self = const_cast<RegionBackward*>(this)->getptr();
    for (const auto& t : saved) node->saved.emplace_back(t.unpack(self).detach(), /*is_output=*/false);
    node->region = region, node->inputs = inputs.copy(), node->versions = versions, node->from = from, node->again = again;
    for_call = at::from_blob(&node->address, {}, [node](void*) {}, at::kLong);
    args.collect(for_call);
    args.collect(region->identity);
    args.collect(asked());
  }

  autograd::variable_list apply_with_saved(
      const autograd::variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved_variables) override {
    saved_variables.before(for_call);
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const auto run = [asked = asked()](const autograd::variable_list& given, const std::vector<IValue>& rest) {
      at::AutoGradMode no_grad(false);
      auto* node = reinterpret_cast<RegionBackward*>(rest[0].toTensor().item<int64_t>());
      return node->differentiate(autograd::variable_list(given), asked);
    };
    const auto bound = compiler->bind_function(
        saved_variables.get_py_compiler(), name(), run, {c10::TensorType::get()}, /*is_custom_function=*/true,
        /*is_traceable=*/false);
    using Metadata = std::vector<std::optional<autograd::InputMetadata>>;
    auto found = compiler->call_function(
        saved_variables.get_py_compiler(), "apply_functional", bound, grads, {for_call},
        torch::dynamo::autograd::IValuePacker<Metadata>::pack(torch::dynamo::autograd::get_input_metadata(next_edges())));
    saved_variables.after(for_call);
    return found;
  }

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    return differentiate(std::move(grads), asked());
  }

 private:
  std::vector<bool> asked() const {
    std::vector<bool> asked(num_outputs());
    for (size_t i = 0; i < asked.size(); ++i) asked[i] = task_should_compute_output(i) && region->wanted[i] >= 0;
    return asked;
  }

  autograd::variable_list differentiate(autograd::variable_list&& grads, const std::vector<bool>& asked) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    const bool derived = must_be_differentiable(grads);
    const auto own = grads.begin() + region->grads.size();  // from there on those that the program has none of
    if (derived || !std::all_of(grads.begin(), own, [](const Tensor& t) { return t.defined(); }) ||
        std::any_of(own, grads.end(), [](const Tensor& t) { return t.defined(); })) {
      auto found = by_python(grads, asked, derived);
      if (!at::GradMode::is_enabled() && !autograd::get_current_graph_task_keep_graph()) release();
      return found;
    }

    auto registers = region->empty_registers();
    const auto& [program, places] = region->backward_for(asked);
    for (auto i : places) registers[region->kept[i]] = saved[i].unpack(getptr());
    // Saved tensors die at their last use, not when the node has run.
    if (!autograd::get_current_graph_task_keep_graph()) release();
    for (size_t i = 0; i < region->grads.size(); ++i) registers[region->grads[i]] = as_recorded(std::move(grads[i]), i);
    run(program, registers);
    autograd::variable_list found(asked.size());
    for (size_t i = 0; i < asked.size(); ++i) {
      if (asked[i]) found[i] = registers[region->wanted[i]].toTensor();
    }
    return found;
  }

  void release() {
    for (auto& t : saved) t.reset_data();
    for_call.reset();
    inputs = Tensors();
    again = {};
    released = true;
  }

  // Whether a graph of the backward is wanted, or gradients are of a kind that the recorded operations do not fit.
  static bool must_be_differentiable(const autograd::variable_list& grads) {
    constexpr c10::DispatchKeySet wrapped(
        {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
         c10::DispatchKey::Batched, c10::DispatchKey::Functionalize});
    if (at::GradMode::is_enabled() || at::tracer::impl::is_dispatch_enabled() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
      return true;
    }
    for (const auto& t : grads) {
      if (t.defined() && (t.key_set().has_any(wrapped) || autograd::isFwGradDefined(t))) return true;
    }
    return false;
  }

  Tensor as_recorded(Tensor grad, size_t i) const {
    const auto& strides = region->strides[i];
    if (!strides || grad.strides() == *strides) return grad;
    return at::empty_strided(grad.sizes(), *strides, grad.options()).copy_(grad);
  }

  // The gradients that are asked for, with a graph if they are `derived`; otherwise some results have no gradient.
  autograd::variable_list by_python(const autograd::variable_list& grads, const std::vector<bool>& asked, bool derived) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fastlayers_regions::by_python", "");
    static const auto needed_op = c10::Dispatcher::singleton().findSchemaOrThrow("fastlayers_regions::needed", "");
    Gradients given;
    for (const auto& t : grads) given.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
    c10::List<bool> needs;
    for (bool needed : asked) needs.push_back(needed);
    auto whole = inputs.copy();
    auto expected = versions;
    std::vector<Tensor> unpacked(saved.size());  // each once: of a checkpoint a second time would be another recomputation
    const auto unpack = [&](int64_t i) {
      if (!unpacked[i].defined()) unpacked[i] = saved[i].unpack(getptr());
      return unpacked[i];
    };
    for (size_t i = 0; i < from.size(); ++i) {
      if (from[i] < 0) continue;
      whole.set(i, unpack(from[i]));  // which tests whether it was written
      expected[i] = whole.get(i)._version();
    }
    Stack question{again, given, derived};
    needed_op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, question);
    Tensors kept;
    for (auto i : question[0].toIntVector()) kept.push_back(unpack(i));
    Stack stack{again, derived, std::move(whole), std::move(expected), std::move(kept), std::move(given), std::move(needs)};
    // Below no mode and no transform: these see the operations of the forward that Python runs again.
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
    autograd::variable_list found(asked.size());
    const auto& list = stack[0].toListRef();
    for (size_t i = 0; i < asked.size(); ++i) {
      if (asked[i] && !list[i].isNone()) found[i] = list[i].toTensor();
    }
    return found;
  }
};

// Whether the present hooks on saved tensors are none of ours, which keep them as they are.
bool hooks_decide() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fastlayers_regions::hooks_decide", "");
  Stack stack;
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  return stack[0].toBool();
}

// Give the results in the registers a node.
void set_history(const c10::intrusive_ptr<Region>& region, IValue again, Tensors inputs, Registers& registers) {
  autograd::edge_list edges;
  edges.reserve(region->count);
  for (int64_t i = 0; i < region->count; ++i) edges.push_back(autograd::impl::gradient_edge(inputs.get(i)));
  auto node = make_node<RegionBackward>(std::move(edges));
  for (auto i : region->active) autograd::set_history(registers[region->results[i]].toTensor(), node);
  node->saved.reserve(region->kept.size());
  for (auto r : region->kept) {
    const auto& t = registers[r].toTensor();
    node->saved.emplace_back(t, /*is_output=*/t.grad_fn().get() == node.get());
  }
  const bool hooks = at::SavedTensorDefaultHooks::get_hooks().has_value(), decide = hooks && hooks_decide();
  node->versions.reserve(inputs.size());
  node->from.assign(inputs.size(), -1);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor t = inputs.get(i);
    node->versions.push_back(t.is_inference() ? -1 : t._version());
    const bool decided = decide && std::find(region->read.begin(), region->read.end(), static_cast<int64_t>(i)) != region->read.end();
    if (!t.grad_fn() && !decided) continue;
    const auto known = std::find(region->kept.begin(), region->kept.end(), static_cast<int64_t>(i));
    node->from[i] = known - region->kept.begin();
    if (known == region->kept.end()) {
      node->from[i] = static_cast<int64_t>(node->saved.size());
      node->saved.emplace_back(t, /*is_output=*/false);
    }
    inputs.set(i, Tensor());
  }
  // A checkpoint gives what its recomputation keeps to this node, by order: it compares shapes, so that of another region is told apart.
  if (hooks) node->saved.emplace_back(at::empty({0, region->identity}), /*is_output=*/false);
  node->inputs = std::move(inputs);
  node->region = region;
  node->again = std::move(again);
}

// -- what Python calls ------------------------------------------------------------------------------------------------

// The number of a region is its address, which costs less to hand over than the object (by 9 us); who calls keeps it.
c10::intrusive_ptr<Region> region_at(const IValue& address) {
  return c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(reinterpret_cast<Region*>(address.toInt()));
}

Tensors tensors_in(const Registers& registers, const Numbers& numbers) {
  Tensors found;
  found.reserve(numbers.size());
  for (auto r : numbers) found.push_back(registers[r].toTensor());
  return found;
}

// call(int region, object again, Tensor[] inputs) -> Tensor[]: the results.
void call(Stack& stack) {
  const auto region = region_at(stack[0]);
  auto inputs = std::move(stack[2]).toTensorList();
  auto registers = region->run_forward(IValue(inputs).toListRef());
  for (auto i : region->written) autograd::impl::bump_version(inputs.get(i));
  if (region->count > 0) set_history(region, std::move(stack[1]), std::move(inputs), registers);
  stack.clear();
  stack.emplace_back(tensors_in(registers, region->results));
}

// kernel(int region, bool of_backward, object function, int[] taken, int[] counted, int[] made, Launch? launched)
void kernel(Stack& stack) {
  region_at(stack[0])->add_kernel(
      stack[1].toBool(), std::move(stack[2]), stack[3].toIntVector(), stack[4].toIntVector(),
      stack[5].toIntVector(), stack[6]);
  stack.clear();
  stack.emplace_back();
}

std::tuple<Tensors, Tensors> forward(const c10::intrusive_ptr<Region>& region, const Tensors& inputs) {
  const auto registers = region->run_forward(IValue(inputs).toListRef());
  return {tensors_in(registers, region->results), tensors_in(registers, region->kept)};
}

Gradients backward(const c10::intrusive_ptr<Region>& region, const Tensors& grads, const Tensors& kept) {
  auto registers = region->empty_registers();
  for (size_t i = 0; i < kept.size(); ++i) registers[region->kept[i]] = kept.get(i);
  for (size_t i = 0; i < grads.size(); ++i) registers[region->grads[i]] = grads.get(i);
  std::vector<bool> asked(region->wanted.size());
  for (size_t i = 0; i < asked.size(); ++i) asked[i] = region->wanted[i] >= 0;
  run(region->backward_for(asked).program, registers);
  Gradients found;
  for (size_t i = 0; i < asked.size(); ++i) {
    found.push_back(asked[i] ? std::optional<Tensor>(registers[region->wanted[i]].toTensor()) : std::nullopt);
  }
  return found;
}

TORCH_LIBRARY_FRAGMENT(fastlayers_regions, m) {
  m.class_<Region>("Region")
      .def(torch::init<>())
      .def("operation", &Region::add_operation)
      .def("number", &Region::add_number)
      .def("constant", [](const c10::intrusive_ptr<Region>& self, int64_t r, IValue number) { self->constants.emplace_back(r, number); })
      .def("finish", &Region::finish)
      .def("set_read", [](const c10::intrusive_ptr<Region>& self, Numbers read) { self->read = std::move(read); })
      .def("forward", &forward)
      .def("backward", &backward)
      .def("address", [](const c10::intrusive_ptr<Region>& region) { return reinterpret_cast<int64_t>(region.get()); });
  m.class_<Launch>("Launch")
      .def(torch::init<bool>())
      .def("add_result", &Launch::add_result)
      .def("is_ready", &Launch::is_ready)
      .def("set", &Launch::set);

  // Operators of the JIT, not of the dispatcher, so that no mode and no transform sees their calls.
  const c10::TypePtr integer = c10::IntType::get(), object = c10::PyObjectType::get(), truth = c10::BoolType::get();
  const c10::TypePtr tensors = c10::ListType::ofTensors(), integers = c10::ListType::ofInts();
  const auto define = [](const char* name, std::vector<c10::Argument> takes, c10::TypePtr gives, void (*f)(Stack&)) {
    torch::jit::registerOperator(torch::jit::Operator(
        name, "", std::move(takes), {c10::Argument("", std::move(gives))}, f, c10::AliasAnalysisKind::CONSERVATIVE));
  };
  define(
      "fastlayers_regions::call", {{"region", integer}, {"again", object}, {"inputs", tensors}}, tensors, call);
  define(
      "fastlayers_regions::kernel",
      {{"region", integer}, {"of_backward", truth}, {"function", object}, {"taken", integers}, {"counted", integers},
       {"made", integers},
       {"launched", c10::OptionalType::create(c10::getCustomClassType<c10::intrusive_ptr<Launch>>())}},
      c10::NoneType::get(), kernel);

  // What Python implements.
  const c10::TypePtr gradients = c10::ListType::create(c10::OptionalType::ofTensor());
  m.def(c10::FunctionSchema(
      "fastlayers_regions::needed", "", {{"again", object}, {"grads", gradients}, {"derived", truth}}, {{"", integers}}));
  m.def(c10::FunctionSchema(
      "fastlayers_regions::by_python", "",
      {{"again", object}, {"derived", truth}, {"inputs", tensors}, {"versions", integers}, {"kept", tensors},
       {"grads", gradients}, {"needs", c10::ListType::ofBools()}},
      {{"", gradients}}));
  m.def(c10::FunctionSchema("fastlayers_regions::hooks_decide", "", {}, {{"", truth}}));
  m.def(c10::FunctionSchema(
      "fastlayers_regions::run_kernel", "", {{"function", object}, {"tensors", tensors}, {"numbers", integers}},
      {{"", gradients}}));
}

}  // namespace
