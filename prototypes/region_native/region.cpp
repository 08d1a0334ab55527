// A recorded forward and its backward, run in C++ as one node of autograd.
//
// Python records the operations of a module's forward and backward (tape.py) and describes them to a Region: operations,
// what they take, which values backward keeps. From then on one call tests the guard, runs the forward below autograd
// and autocast, and makes one node that runs the backward in the same way. The file needs neither Python.h nor pybind11,
// so the library depends on the version of torch alone.

#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Registers = c10::SmallVector<IValue, 64>;
using Numbers = std::vector<int64_t>;
namespace autograd = torch::autograd;

// -- programs ---------------------------------------------------------------------------------------------------------

// How Python describes an argument: (kind, payload).
enum Kind : int64_t { CONSTANT, REGISTER, LIST, DEFAULT };

struct Argument {
  Kind kind;
  IValue constant;
  Numbers registers;       // one, or those of a list, in which -1 is None
  c10::TypePtr element;    // of a list
  std::vector<char> last;  // whether nothing uses the register afterwards, so that it can be moved
};

struct Step {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  Numbers results;  // a register for each result, -1 for one that nothing uses
  bool unpack;      // whether the operation returns one list of tensors
  bool effect;      // whether it matters even if no result is used
};

using Program = std::vector<Step>;

// The dispatch keys that a program skips: what they do was recorded.
const c10::DispatchKeySet& above_kernels() {
  static const auto keys = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  return keys;
}

// An argument as the type of its schema: Python has no typed empty list, and gives an int for a float.
IValue coerced(const IValue& value, const c10::TypePtr& type) {
  if (value.isNone()) return value;
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

IValue take(Registers& registers, int64_t r, bool last) {
  if (r < 0) return {};
  return last ? std::move(registers[r]) : registers[r];
}

void run(const Program& program, Registers& registers) {
  c10::impl::ExcludeDispatchKeyGuard guard(above_kernels());
  Stack stack;
  stack.reserve(16);
  for (const auto& step : program) {
    for (const auto& argument : step.arguments) {
      if (argument.kind == CONSTANT) {
        stack.push_back(argument.constant);
      } else if (argument.kind == REGISTER) {
        stack.push_back(take(registers, argument.registers[0], argument.last[0]));
      } else {
        c10::impl::GenericList list(argument.element);
        list.reserve(argument.registers.size());
        for (size_t i = 0; i < argument.registers.size(); ++i) {
          list.push_back(take(registers, argument.registers[i], argument.last[i]));
        }
        stack.emplace_back(std::move(list));
      }
    }
    step.op.callBoxed(stack);
    if (step.unpack) {
      const auto list = std::move(stack[0]).toTensorVector();
      for (size_t i = 0; i < step.results.size(); ++i) {
        if (step.results[i] >= 0) registers[step.results[i]] = list[i];
      }
    } else {
      for (size_t i = 0; i < step.results.size(); ++i) {
        if (step.results[i] >= 0) registers[step.results[i]] = std::move(stack[i]);
      }
    }
    stack.clear();
  }
}

// -- the guard --------------------------------------------------------------------------------------------------------

struct Expected {
  c10::DispatchKeySet keys;
  at::ScalarType dtype;
  at::Device device;
  Numbers sizes, strides;
  bool requires_grad;

  explicit Expected(const Tensor& t)
      : keys(t.key_set()), dtype(t.scalar_type()), device(t.device()), sizes(t.sizes().vec()),
        strides(t.strides().vec()), requires_grad(t.requires_grad()) {}

  bool matches(const Tensor& t) const {
    return t.key_set() == keys && t.scalar_type() == dtype && t.device() == device && t.sizes() == sizes &&
        t.strides() == strides && t.requires_grad() == requires_grad && !autograd::isFwGradDefined(t);
  }
};

// What besides the inputs decides which operations run: the modes of this thread (torch keeps those of dispatch,
// autocast, inference, functorch and tracing in its sets of keys), and the flags that kernels are chosen by.
std::array<uint64_t, 6> modes() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const auto& context = at::globalContext();
  uint64_t flags = 0;
  for (bool flag :
       {at::GradMode::is_enabled(), at::impl::torch_function_mode_enabled(), context.deterministicAlgorithms(),
        context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
        context.userEnabledCuDNNSDP(), context.userEnabledCuDNN(), context.userEnabledMkldnn()}) {
    flags = flags << 1 | flag;
  }
  return {keys.included_.raw_repr(), keys.excluded_.raw_repr(), flags,
          static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)),
          static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCUDA)),
          static_cast<uint64_t>(context.float32MatmulPrecision())};
}

// -- regions ----------------------------------------------------------------------------------------------------------

struct Region : torch::CustomClassHolder {
  std::vector<Expected> expected;
  std::array<uint64_t, 6> expected_modes;
  Program forward, backward;
  int64_t size = 0;                 // the number of registers
  Numbers inputs, results, grads, kept;  // their registers
  Numbers wanted, wanted_registers;  // the inputs that need gradients, and the registers of these; -1 for none
  Numbers written;                  // the inputs whose versions the forward raises
  Numbers differentiable;           // the results that have gradients
  std::vector<Numbers> strides;     // of these gradients, as they were recorded
  std::vector<std::pair<int64_t, int64_t>> shared;  // kept values in the memory of an input or a result: their registers
  std::mutex mutex;
  std::map<std::vector<bool>, Program> pruned;

  // The backward that computes only what is asked. Elements of a map stay where they are.
  const Program& backward_for(const std::vector<bool>& asked) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = pruned.find(asked);
    if (it == pruned.end()) {
      Numbers needed;
      for (size_t i = 0; i < asked.size(); ++i) {
        if (asked[i]) needed.push_back(wanted_registers[i]);
      }
      it = pruned.emplace(asked, alive(backward, needed)).first;
    }
    return it->second;
  }

  // Describe the next operation of the forward or of the backward. Returns the number of results of its schema.
  int64_t add(bool to_backward, std::string name, std::string overload, IValue arguments, Numbers made, bool unpack, bool effect) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    Step step{op, {}, std::move(made), unpack, effect};
    const auto& schema = op.schema().arguments();
    const auto& given = arguments.toTupleRef().elements();
    TORCH_CHECK(given.size() == schema.size(), name, ": ", given.size(), " arguments of ", schema.size());
    for (size_t i = 0; i < schema.size(); ++i) {
      const auto& pair = given[i].toTupleRef().elements();
      Argument argument{static_cast<Kind>(pair[0].toInt()), {}, {}, nullptr, {}};
      if (argument.kind == DEFAULT) {
        argument.kind = CONSTANT;
        argument.constant = *schema[i].default_value();
      } else if (argument.kind == CONSTANT) {
        argument.constant = coerced(pair[1], schema[i].type());
      } else {
        argument.registers = pair[1].toIntVector();
        if (argument.kind == LIST) argument.element = schema[i].type()->expectRef<c10::ListType>().getElementType();
      }
      step.arguments.push_back(std::move(argument));
    }
    (to_backward ? backward : forward).push_back(std::move(step));
    return static_cast<int64_t>(op.schema().returns().size());
  }

  void describe(
      int64_t size_, Numbers inputs_, Numbers results_, Numbers grads_, Numbers kept_, Numbers wanted_,
      Numbers wanted_registers_, Numbers written_, Numbers differentiable_, std::vector<Numbers> strides_,
      Numbers shared_kept, Numbers shared_with) {
    size = size_, inputs = inputs_, results = results_, grads = grads_, kept = kept_, wanted = wanted_;
    wanted_registers = wanted_registers_, written = written_, differentiable = differentiable_, strides = strides_;
    for (size_t i = 0; i < shared_kept.size(); ++i) shared.emplace_back(shared_kept[i], shared_with[i]);
    auto needed = results;
    needed.insert(needed.end(), kept.begin(), kept.end());
    needed.insert(needed.end(), shared_with.begin(), shared_with.end());
    forward = alive(forward, needed);
  }

  // Take only calls with such inputs, in the modes of now.
  void guard(c10::List<Tensor> tensors) {
    for (const Tensor& t : tensors) expected.emplace_back(t);
    expected_modes = modes();
  }

  bool accepts(c10::ArrayRef<IValue> tensors) const {
    if (tensors.size() != expected.size() || modes() != expected_modes) return false;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!expected[i].matches(tensors[i].toTensor())) return false;
    }
    return true;
  }
};

// -- the node ---------------------------------------------------------------------------------------------------------

struct RegionBackward final : autograd::Node {
  c10::intrusive_ptr<Region> region;
  std::vector<autograd::SavedVariable> saved;
  // For the derivative of the backward. As saved variables the inputs could not be changed before any backward.
  std::vector<Tensor> inputs;
  std::vector<uint32_t> versions;
  IValue owner;
  bool released = false;

  using Node::Node;

  std::string name() const override {
    return "FastlayersRegionBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, autograd::ERR_BACKWARD_TWICE);
    std::vector<bool> asked(num_outputs());
    for (size_t i = 0; i < asked.size(); ++i) asked[i] = task_should_compute_output(i) && region->wanted_registers[i] >= 0;
    if (at::GradMode::is_enabled() || wrapped(grads)) return again(grads, asked);

    Registers registers(region->size);
    for (size_t i = 0; i < saved.size(); ++i) registers[region->kept[i]] = saved[i].unpack(getptr());
    // Saved tensors die at their last use, not when the node has run.
    if (!autograd::get_current_graph_task_keep_graph()) release();
    for (size_t i = 0; i < grads.size(); ++i) registers[region->grads[i]] = as_recorded(std::move(grads[i]), i);
    run(region->backward_for(asked), registers);
    autograd::variable_list found(asked.size());
    for (size_t i = 0; i < asked.size(); ++i) {
      if (asked[i]) found[i] = registers[region->wanted_registers[i]].toTensor();
    }
    return found;
  }

 private:
  void release() {
    for (auto& t : saved) t.reset_data();
    inputs.clear();
    owner = {};
    released = true;
  }

  // Whether gradients are of a subclass or batched, which the recorded operations do not fit.
  bool wrapped(const autograd::variable_list& grads) const {
    constexpr c10::DispatchKeySet keys({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched});
    for (const auto& t : grads) {
      if (t.defined() && t.key_set().has_any(keys)) return true;
    }
    return false;
  }

  Tensor as_recorded(Tensor grad, size_t i) const {
    const auto& strides = region->strides[i];
    if (grad.defined() && grad.strides() == strides) return grad;
    const auto& metadata = input_metadata(i);
    auto copy = at::empty_strided(C10_AS_INTARRAYREF_SLOW(metadata.shape_as_dim_vector()), strides, metadata.options());
    return grad.defined() ? copy.copy_(grad) : copy.zero_();
  }

  autograd::variable_list again(const autograd::variable_list& grads, const std::vector<bool>& asked) const {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fastlayers_region::again", "");
    for (size_t i = 0; i < inputs.size(); ++i) {
      TORCH_CHECK(
          inputs[i]._version() == versions[i], "to differentiate the backward of a layer, its input of shape ",
          inputs[i].sizes(), " is needed as it was in the forward, and it was modified in place since: it is at version ",
          inputs[i]._version(), "; expected ", versions[i]);
    }
    c10::List<std::optional<Tensor>> given;
    for (const auto& t : grads) given.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
    c10::List<bool> needs;
    for (bool needed : asked) needs.push_back(needed);
    Stack stack{owner, c10::List<Tensor>(inputs), given, needs};
    // Below no mode and no transform: these see the operations of the forward that Python runs anew.
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
    autograd::variable_list found(asked.size());
    const auto& list = stack[0].toListRef();
    for (size_t i = 0; i < asked.size(); ++i) {
      if (!list[i].isNone()) found[i] = list[i].toTensor();
    }
    return found;
  }
};

// The results of a call, empty if the guard refuses it.
IValue call(const c10::intrusive_ptr<Region>& region, IValue owner, c10::ArrayRef<IValue> tensors) {
  c10::List<Tensor> results;
  if (!region->accepts(tensors)) return results;
  Registers registers(region->size);
  for (size_t i = 0; i < tensors.size(); ++i) registers[region->inputs[i]] = tensors[i];
  run(region->forward, registers);
  for (auto i : region->written) autograd::impl::bump_version(tensors[i].toTensor());
  if (!region->wanted.empty()) {
    autograd::edge_list edges;
    edges.reserve(region->wanted.size());
    for (auto i : region->wanted) edges.push_back(autograd::impl::gradient_edge(tensors[i].toTensor()));
    auto node = c10::make_intrusive<RegionBackward>(std::move(edges));
    for (auto i : region->differentiable) {
      autograd::set_history(registers[region->results[i]].toTensor(), node);
    }
    // Views were made below autograd: they learn here whose versions they have, so that saving them detects changes.
    for (auto [kept, with] : region->shared) {
      autograd::impl::set_version_counter(
          registers[kept].toTensor(), autograd::impl::version_counter(registers[with].toTensor()));
    }
    node->saved.reserve(region->kept.size());
    for (auto r : region->kept) {
      const auto& t = registers[r].toTensor();
      node->saved.emplace_back(t, /*is_output=*/t.grad_fn().get() == node.get());
    }
    for (const auto& t : tensors) {
      node->inputs.push_back(t.toTensor());
      node->versions.push_back(t.toTensor()._version());
    }
    node->region = region;
    node->owner = std::move(owner);
  }
  results.reserve(region->results.size());
  for (auto r : region->results) results.push_back(std::move(registers[r]).toTensor());
  return results;
}

// fastlayers_region::call(int region, object owner, Tensor[] tensors). The number of a region is its address, which
// costs less to hand over than the object (by 9 us); who calls keeps the object.
void call_operator(Stack& stack) {
  auto region = c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(reinterpret_cast<Region*>(stack[0].toInt()));
  auto results = call(region, std::move(stack[1]), stack[2].toListRef());
  stack.clear();
  stack.push_back(std::move(results));
}

TORCH_LIBRARY_FRAGMENT(fastlayers_region, m) {
  const c10::TypePtr object = c10::PyObjectType::get();
  // An operator of the JIT, not of the dispatcher: no mode and no transform sees the call, whatever the guard says.
  torch::jit::registerOperator(torch::jit::Operator(
      "fastlayers_region::call", "",
      {{"region", c10::IntType::get()}, {"owner", object}, {"tensors", c10::ListType::ofTensors()}},
      {{"", c10::ListType::ofTensors()}}, call_operator, c10::AliasAnalysisKind::CONSERVATIVE));
  m.class_<Region>("Region")
      .def(torch::init<>())
      .def("add", &Region::add)
      .def("describe", &Region::describe)
      .def("guard", &Region::guard)
      .def("address", [](const c10::intrusive_ptr<Region>& r) { return reinterpret_cast<int64_t>(r.get()); });
  const auto optionals = c10::ListType::create(c10::OptionalType::ofTensor());
  m.def(c10::FunctionSchema(
      "fastlayers_region::again", "",
      {{"owner", object}, {"inputs", c10::ListType::ofTensors()}, {"grads", optionals}, {"needs", c10::ListType::ofBools()}},
      {{"", optionals}}));
}

}  // namespace
