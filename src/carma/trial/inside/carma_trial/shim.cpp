// An emulated CUDA device: it computes shapes, hands out inaccessible addresses, and records each allocation and each
// free. Compiled once for each build of torch, against the headers of that build (see build.py).
//
// The library is loaded before torch, so that torch finds its hooks. `carma_attach` is called after the import and
// replaces the kernels, the device guard and the allocator of a CUDA build.
#include "shim_card.h"
#include "shim_memory.h"
#include "shim_scratch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace {

// ---- arguments

template <class F>
IValue map_tensors(const IValue& value, F&& change) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      list.push_back(each && each->defined() ? std::optional<Tensor>(change(*each)) : each);
    return list;
  }
  return value;
}

using Mapping = std::vector<std::pair<Tensor, Tensor>>;  // the tensor that was given, and what stands for it

Tensor* standing(Mapping& mapping, const Tensor& stand_in) {
  for (auto& pair : mapping)
    if (pair.second.is_same(stand_in)) return &pair.first;
  return nullptr;
}

Tensor as_meta(Mapping& mapping, const Tensor& tensor) {
  if (tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;  // a plain number
  for (auto& pair : mapping)
    if (pair.first.is_same(tensor)) return pair.second;
  Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                  at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kMeta));
  mapping.emplace_back(tensor, meta);
  return meta;
}

// An `out=` tensor, or `resize_`, that came back with other sizes: grow the storage as resize_ does.
void resize_like(const Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), impl->storage_offset());
  c10::Storage storage = impl->unsafe_storage();
  if (bytes > storage.nbytes()) {
    storage.set_data_ptr_noswap(allocator.allocate(bytes));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_and_strides(sizes, strides);
  remember_blank(tensor);
}

Device device_among(const torch::jit::Stack& arguments) {
  Device device(DeviceType::CUDA, this_device);
  for (const IValue& value : arguments) {
    bool found = false;
    map_tensors(value, [&](const Tensor& tensor) {
      if (!found && tensor.is_cuda()) device = tensor.device(), found = true;
      return tensor;
    });
    if (found) break;
  }
  return device;
}

struct Within {  // the op and the device that allocations are booked under
  uint32_t op = this_op;
  DeviceIndex device = this_device;
  Within(const std::string& name, Device on) {
    if (this_op == 0) this_op = index_of(name);
    this_device = on.index() < 0 ? this_device : on.index();
  }
  ~Within() { this_op = op, this_device = device; }
};

// ---- values, where all that goes in is known

bool try_for_real(const c10::OperatorHandle& op, const torch::jit::Stack& given, torch::jit::Stack& results,
                  Mapping& mapping) {
  int64_t elements = 0;
  bool known = true;
  torch::jit::Stack real;
  for (const IValue& value : given) {
    IValue mapped = map_tensors(value, [&](const Tensor& tensor) -> Tensor {
      if (!known || !tensor.is_cuda()) return tensor;
      auto shadow = shadow_of(tensor);
      if (!shadow) return known = false, tensor;
      elements += tensor.numel();
      mapping.emplace_back(tensor, *shadow);
      return *shadow;
    });
    if (!known || elements > MOST_WHOLE) return false;
    if (mapped.isDevice() && mapped.toDevice().is_cuda()) mapped = Device(c10::kCPU);
    if (mapped.isGenerator()) mapped = IValue();
    real.push_back(std::move(mapped));
  }
  try {
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
    op.callBoxed(real);
  } catch (...) {  // no such kernel on the CPU, or nonsense values: then it is not known
    return false;
  }
  results = std::move(real);
  return true;
}

bool shadowed_by(const Tensor& tensor, const Tensor& real) {
  auto now = shadow_of(tensor);
  return now && now->storage().is_alias_of(real.storage());
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

void forget_written(const c10::FunctionSchema& schema, const torch::jit::Stack& given) {
  for (size_t i = 0; i < given.size(); ++i)
    if (writes(schema.arguments()[i]))
      map_tensors(given[i], [](const Tensor& tensor) {
        if (tensor.is_cuda()) drop_shadow(address_of(tensor));
        return tensor;
      });
}

// ---- the kernel that stands for all others

// A window onto the storage of `tensor`, perhaps as another type (view_as_real and the like).
Tensor window_onto(const Tensor& tensor, const Tensor& meta) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(),
                                                       meta.dtype());
  int64_t start = tensor.storage_offset() * int64_t(tensor.itemsize()) / int64_t(meta.itemsize());
  made.unsafeGetTensorImpl()->set_storage_offset(start + meta.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  return made;
}

IValue to_device(const IValue& value, Mapping& metas, Mapping& reals, const IValue* real) {
  std::vector<Tensor> real_tensors;
  if (real) map_tensors(*real, [&](const Tensor& tensor) { return real_tensors.push_back(tensor), tensor; });
  size_t next = 0;
  return map_tensors(value, [&](const Tensor& meta) -> Tensor {
    Tensor known = next < real_tensors.size() ? real_tensors[next] : Tensor();
    ++next;
    if (Tensor* original = standing(metas, meta)) return *original;
    if (Tensor* original = standing(reals, meta)) return *original;
    for (auto& pair : metas)  // a window onto an argument
      if (meta.is_meta() && meta.has_storage() && pair.second.storage().is_alias_of(meta.storage()))
        return window_onto(pair.first, meta);
    if (!meta.is_meta() && !meta.is_cpu()) return meta;
    Tensor made = make(meta.sizes(), meta.strides(), meta.scalar_type());
    if (known.defined() && known.is_cpu() && known.sizes() == made.sizes()) remember(made, known);
    return made;
  });
}

bool gives_only_arguments(const c10::FunctionSchema& schema) {
  for (const auto& each : schema.returns())
    if (!each.alias_info() || !each.alias_info()->isWrite()) return false;
  return true;
}

// What is written comes back as it was given, even where the kernel for shapes made one of another type on its way.
void give_written(const c10::FunctionSchema& schema, const torch::jit::Stack& given, torch::jit::Stack& results) {
  for (size_t k = 0; k < results.size() && k < schema.returns().size(); ++k) {
    const auto* written = schema.returns()[k].alias_info();
    if (!written || !written->isWrite()) continue;
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].isTensor() && writes(schema.arguments()[i]) && *schema.arguments()[i].alias_info() == *written)
        results[k] = given[i];
  }
}

void everything(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  size_t count = schema.arguments().size();
  torch::jit::Stack given(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  Within within(name, device_among(given));
  torch::jit::Stack real_results;
  Mapping reals, metas;
  bool real = try_for_real(op, given, real_results, reals);
  torch::jit::Stack results;
  try {
    c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset);
    for (const IValue& value : given) {
      if (value.isDevice() && value.toDevice().is_cuda()) results.emplace_back(Device(c10::kMeta));
      else if (value.isGenerator()) results.emplace_back();
      else results.push_back(map_tensors(value, [&](const Tensor& tensor) { return as_meta(metas, tensor); }));
    }
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &results);
  } catch (...) {
    if (real) results = real_results;  // sizes that depend on values, and the values are known
    else if (gives_only_arguments(schema)) {
      results.clear();
      for (const auto& each : schema.returns())
        for (size_t i = 0; i < count; ++i)
          if (writes(schema.arguments()[i]) && *schema.arguments()[i].alias_info() == *each.alias_info())
            results.push_back(given[i]);
      if (results.size() != schema.returns().size()) throw;
      forget_written(schema, given);
      for (IValue& value : results) stack->push_back(std::move(value));
      return;
    } else throw;
  }
  give_written(schema, given, results);
  for (auto& [original, meta] : metas)
    if (original.is_cuda() && meta.sizes() != original.sizes()) resize_like(original, meta.sizes(), meta.strides());
  for (auto& [original, known] : reals)  // an `out=` tensor that was empty before
    if (original.numel() && original.is_contiguous() && original.sizes() == known.sizes() && !shadowed_by(original, known))
      remember(original, known);
  if (!real && !untouched_ops.count(name)) forget_written(schema, given);
  auto copies = copies_before(name, given);
  if (copied_first.count(name) && results[0].isTensor() && results[0].toTensor().defined() && results[0].toTensor().is_meta())
    results[0] = at::empty(results[0].toTensor().sizes(), results[0].toTensor().options());  // plain, as the copy
  bool backwards = name == "aten::native_dropout" || name == "aten::_embedding_bag";  // the mask, the bags first
  size_t made = results.size();
  for (size_t k = 0; k < made; ++k) {
    size_t i = backwards ? made - 1 - k : k;
    results[i] = to_device(results[i], metas, reals, real && i < real_results.size() ? &real_results[i] : nullptr);
  }
  reduce_scratch(name, schema, given, results);
  take_scratch(name, given);
  // The result is there before the library asks for its workspace.
  if (auto place = blas_ops.find(name); place != blas_ops.end())
    note(CALL, place->second, 0, 0, uint16_t(this_stream[this_device]));
  for (IValue& value : results) stack->push_back(std::move(value));
}

#include "shim_kernels.h"

}  // namespace

TORCH_LIBRARY(carma, m) {
  m.def("shadow(Tensor self) -> Tensor?", &shadow);
  m.def("forget(Tensor self) -> ()", &forget);
  m.def("resize_storage(Tensor self, int bytes) -> ()", &resize_storage);
  m.def("remember(Tensor self, Tensor values) -> ()", &remember_values);
}

extern "C" {
// `overridden`: the ops that a CUDA build has kernels for, one on each line.
const char* carma_attach(const char* overridden, int devices, int processors) {
  static std::string trouble;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  device_count = devices;
  multiprocessors = processors;
  c10::impl::device_guard_impl_registry[size_t(DeviceType::CUDA)].store(&guard);
  c10::SetAllocator(DeviceType::CUDA, &allocator, 255);
  try {
    auto& m = aten();
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    m.impl("unfold", TORCH_FN(at::native::unfold));
    m.impl("resize_", TORCH_FN(resize));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
    m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
    m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    m.impl("set_", TORCH_FN(set_nothing));
    m.impl("copy_", TORCH_FN(copy));
    m.impl("record_stream", TORCH_FN(record_stream));
    std::string names(overridden);
    for (size_t from = 0, to; (to = names.find('\n', from)) != std::string::npos; from = to + 1)
      m.impl(names.substr(from, to - from).c_str(), torch::CppFunction::makeFromBoxedFunction<&everything>());
    static torch::Library rest(torch::Library::IMPL, "_", DispatchKey::CUDA, __FILE__, __LINE__);
    rest.fallback(torch::CppFunction::makeFromBoxedFunction<&everything>());
  } catch (const std::exception& error) {
    return (trouble = error.what()).c_str();
  }
  return nullptr;
}

// An op of another library (torchvision's, an extension's) that brought a kernel for CUDA.
void carma_override(const char* space, const char* name) {
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  libraries.push_back(
      std::make_unique<torch::Library>(torch::Library::IMPL, space, DispatchKey::CUDA, __FILE__, __LINE__));
  libraries.back()->impl(name, torch::CppFunction::makeFromBoxedFunction<&everything>());
}

void carma_blas(const char* op, uint32_t call) { blas_ops[op] = call; }
void carma_untouched(const char* op) { untouched_ops.insert(op); }
void carma_note(int kind, uint32_t what, uint64_t id, int64_t bytes) {
  note(Kind(kind), what, id, bytes, uint16_t(this_stream[this_device]));
}
void carma_set_op(const char* name) { this_op = *name ? index_of(name) : 0; }
void carma_set_stream(int device, int64_t stream) { this_stream[device] = stream; }
int64_t carma_stream(int device) { return this_stream[device]; }
void carma_set_device(int device) { this_device = DeviceIndex(device); }
int carma_device() { return this_device; }
int64_t carma_made_up() { return made_up.load(); }
uint64_t carma_events() { std::lock_guard<std::mutex> hold(log_lock); return events.size(); }
void carma_read(Event* into, uint64_t count) {
  std::lock_guard<std::mutex> hold(log_lock);
  std::memcpy(into, events.data(), count * sizeof(Event));
}
uint64_t carma_ops(char* into, uint64_t most) {  // all names, one on each line; returns the bytes needed
  std::lock_guard<std::mutex> hold(log_lock);
  std::string all;
  for (auto& name : op_names) all += name + "\n";
  if (into && all.size() <= most) std::memcpy(into, all.data(), all.size());
  return all.size();
}
}
