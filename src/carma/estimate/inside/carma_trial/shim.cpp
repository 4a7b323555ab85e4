// A CUDA device that does not exist: it computes shapes, hands out addresses that nobody may touch, and writes down each
// allocation and each free. Compiled once for each build of torch, against that build's own headers (see build.py).
//
// It is loaded before torch, so that torch finds its hooks, and `carma_attach` is called after the import, so that it
// also stands in front of the kernels, the device guard and the allocator of a CUDA build.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/CallOnce.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using at::Tensor;

// ---- the log

#pragma pack(push, 1)
struct Event {  // the contract with trace/report.py: "<BBHIQq"
  uint8_t kind, thread;
  uint16_t stream;
  uint32_t what;
  uint64_t id;
  int64_t bytes;
};
#pragma pack(pop)
enum Kind : uint8_t { ALLOC = 1, FREE, CALL, MARK, EMPTY_CACHE, OTHER_STREAM };

std::mutex log_lock;
std::vector<Event> events;
std::vector<std::string> op_names{""};
std::unordered_map<std::string, uint32_t> op_index;
std::unordered_map<uint64_t, Tensor> shadows;  // address -> the storage's real contents, on the CPU
std::mutex shadow_lock;
std::unordered_map<std::string, uint32_t> blas_ops;  // name -> the call that stands for it in the report
std::unordered_set<std::string> untouched_ops;  // what they write is as good as unwritten (found_inf stays 0)
std::atomic<uint64_t> next_address{uint64_t(1) << 50};  // not canonical: no process can have anything there
std::atomic<uint8_t> next_thread{0};
std::atomic<int64_t> made_up{0};
int device_count = 1;
int64_t multiprocessors = 132;
thread_local int this_thread = -1;
thread_local uint32_t this_op = 0;
thread_local DeviceIndex this_device = 0;
thread_local c10::StreamId this_stream[64] = {};

uint8_t thread_number() {
  if (this_thread < 0) this_thread = next_thread++;
  return uint8_t(this_thread);
}

void note(Kind kind, uint32_t what, uint64_t id, int64_t bytes, uint16_t stream) {
  uint8_t thread = thread_number();
  std::lock_guard<std::mutex> hold(log_lock);
  events.push_back({kind, thread, stream, what, id, bytes});
}

uint32_t index_of(const std::string& op) {
  std::lock_guard<std::mutex> hold(log_lock);
  auto [place, fresh] = op_index.emplace(op, op_names.size());
  if (fresh) op_names.push_back(op);
  return place->second;
}

// ---- memory

void drop_shadow(uint64_t address) {
  Tensor gone;  // destroyed after the lock is let go
  std::lock_guard<std::mutex> hold(shadow_lock);
  auto place = shadows.find(address);
  if (place == shadows.end()) return;
  gone = std::move(place->second);
  shadows.erase(place);
}

void give_back(void* data) {
  auto address = reinterpret_cast<uint64_t>(data);
  drop_shadow(address);
  note(FREE, 0, address, 0, 0);
}

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(DeviceType::CUDA, this_device);
    if (bytes == 0) return {nullptr, nullptr, &give_back_nothing, device};
    uint64_t address = next_address.fetch_add((bytes + 511) / 512 * 512 + 512);
    note(ALLOC, this_op, address, int64_t(bytes), uint16_t(this_stream[this_device]));
    auto* data = reinterpret_cast<void*>(address);
    return {data, data, &give_back, device};
  }
  static void give_back_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void*, const void*, std::size_t) const override {}
};
FakeAllocator allocator;

Tensor make(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype) {
  return Tensor(at::detail::empty_strided_generic(size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), dtype));
}

uint64_t address_of(const Tensor& tensor) {
  return tensor.has_storage() ? reinterpret_cast<uint64_t>(tensor.storage().data_ptr().get()) : 0;
}

// ---- shadows: what small tensors really hold

constexpr int64_t MOST_WHOLE = 1 << 18, MOST_REAL = 4096;  // elements; flags and indices matter more than values

bool small(const Tensor& tensor) {
  bool whole = c10::isIntegralType(tensor.scalar_type(), true);
  int64_t held = int64_t(tensor.storage().nbytes() / std::max<size_t>(1, tensor.itemsize()));
  return held <= (whole ? MOST_WHOLE : MOST_REAL);
}

Tensor view_of(const Tensor& holder, const Tensor& like) {  // the same window onto the CPU copy of the storage
  auto options = at::TensorOptions().dtype(like.scalar_type()).device(c10::kCPU);
  Tensor view = at::empty({0}, options);
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(holder.storage());
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return view;
}

std::optional<Tensor> shadow_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return view_of(at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type())), tensor);
  std::lock_guard<std::mutex> hold(shadow_lock);
  auto place = shadows.find(address_of(tensor));
  if (place == shadows.end()) return std::nullopt;
  return view_of(place->second, tensor);
}

void remember(const Tensor& tensor, const Tensor& real) {  // `real` has the sizes of `tensor`, which owns its storage
  if (tensor.numel() == 0 || !small(tensor)) return;
  auto bytes = int64_t(tensor.storage().nbytes());
  Tensor holder = at::empty({bytes}, at::TensorOptions().dtype(c10::kByte));
  Tensor window = view_of(holder, tensor);
  window.copy_(real);
  std::lock_guard<std::mutex> hold(shadow_lock);
  shadows[address_of(tensor)] = holder;
}

void remember_blank(const Tensor& tensor) {  // whoever reads it before it is written reads zeros, as likely as anything
  if (tensor.numel() == 0 || !small(tensor)) return;
  Tensor holder = at::empty({int64_t(tensor.storage().nbytes())}, at::TensorOptions().dtype(c10::kByte));
  std::memset(holder.data_ptr(), 0, holder.nbytes());
  std::lock_guard<std::mutex> hold(shadow_lock);
  shadows[address_of(tensor)] = holder;
}

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

// ---- what kernels take besides their results

int64_t last_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power * 2 <= n) power *= 2;
  return power;
}

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// at::native::setReduceConfig (aten/src/ATen/native/cuda/Reduce.cuh): a reduction that is spread over several blocks for
// each result keeps what these found, and a counter for each column of blocks. Returns {0, 0} where it is not.
std::pair<int64_t, int64_t> reduction_scratch(const Tensor& in, const std::vector<bool>& reduced, int64_t outputs,
                                              int64_t element_bytes) {
  if (in.numel() == 0 || outputs == 0) return {0, 0};
  int64_t inputs = in.numel() / outputs;
  int64_t fastest = -1;
  for (int64_t dim = 0; dim < in.dim(); ++dim)
    if (in.size(dim) > 1 && (fastest < 0 || in.stride(dim) < in.stride(fastest))) fastest = dim;
  bool on_fastest = fastest < 0 || reduced[fastest];
  bool packed = fastest < 0 || in.stride(fastest) == 1;
  int64_t dim0 = on_fastest ? inputs : outputs, dim1 = on_fastest ? outputs : inputs;
  int64_t vector = 1;
  if (packed && on_fastest && outputs == 1 && in.is_non_overlapping_and_dense() && dim0 > 128) dim0 /= 4;
  else if (packed && !on_fastest) {
    int64_t run = in.size(fastest);
    for (vector = 4; vector > 1 && (run % vector || in.storage_offset() % vector); vector /= 2) {}
    for (int64_t dim = 0; dim < in.dim(); ++dim)
      while (vector > 1 && dim != fastest && in.size(dim) > 1 && in.stride(dim) % vector) vector /= 2;
    dim0 /= vector;
  }
  int64_t most_threads = 512 / vector;
  int64_t power0 = dim0 < most_threads ? last_power_of_2(dim0) : most_threads;
  int64_t power1 = dim1 < most_threads ? last_power_of_2(dim1) : most_threads;
  int64_t width = std::min<int64_t>(power0, 32), height = std::min<int64_t>(power1, most_threads / width);
  width = std::min<int64_t>(power0, most_threads / height);
  int64_t step_in = 1, step_out = 1;
  (on_fastest ? step_in : step_out) *= width;
  bool across_warps = divided_up(inputs, step_in) >= std::min<int64_t>(height * 16, 256);
  (across_warps ? step_in : step_out) *= height;
  int64_t grid = divided_up(outputs / vector, step_out), target = multiprocessors * (2048 / (width * height));
  int64_t each = divided_up(inputs, step_in);
  if (!across_warps || each < 256 || grid > target) return {0, 0};
  int64_t blocks = std::max(std::min(divided_up(target, grid), divided_up(each, 16)), divided_up(each, 256));
  if (blocks <= 1) return {0, 0};
  return {element_bytes * outputs * blocks * (on_fastest ? 1 : width * vector), 4 * grid};
}

// Reductions by name, and the bytes that each keeps for one element: sums in float, moments for a variance.
const std::unordered_map<std::string, int64_t> reductions = {
    {"aten::sum", 4}, {"aten::mean", 4}, {"aten::norm", 4}, {"aten::linalg_vector_norm", 4}, {"aten::amax", 4},
    {"aten::amin", 4}, {"aten::all", 1}, {"aten::any", 1}, {"aten::prod", 4}, {"aten::nansum", 4}, {"aten::var", 16},
    {"aten::std", 16}, {"aten::var_mean", 16}, {"aten::std_mean", 16}, {"aten::argmax", 16}, {"aten::argmin", 16},
    {"aten::max", 4}, {"aten::min", 4}};

void reduce_scratch(const std::string& name, const c10::FunctionSchema& schema, const torch::jit::Stack& given,
                    const torch::jit::Stack& results) {
  auto place = reductions.find(name);
  if (place == reductions.end() || given.empty() || !given[0].isTensor() || results.empty()) return;
  const Tensor& in = given[0].toTensor();
  if (!results[0].isTensor() || !in.is_cuda()) return;
  std::vector<bool> reduced(size_t(in.dim()), true);
  for (size_t i = 1; i < given.size(); ++i) {
    if (schema.arguments()[i].name() != "dim" || given[i].isNone()) continue;
    std::vector<int64_t> dims = given[i].isInt() ? std::vector<int64_t>{given[i].toInt()} : given[i].toIntVector();
    if (dims.empty()) break;
    std::fill(reduced.begin(), reduced.end(), false);
    for (int64_t dim : dims) reduced[size_t(dim < 0 ? dim + in.dim() : dim)] = true;
  }
  int64_t bytes = place->second == 4 && in.scalar_type() == c10::kDouble ? 8 : place->second;
  if (place->second == 4 && c10::isIntegralType(in.scalar_type(), true)) bytes = 8;
  auto [partial, counters] = reduction_scratch(in, reduced, results[0].toTensor().numel(), bytes);
  if (partial == 0) return;
  auto first = allocator.allocate(size_t(partial));
  auto second = allocator.allocate(size_t(counters));
}

// at::native::flexible_launch_configs (Normalization.cuh): rows and columns of blocks that share out a reduction over all
// but the channels, where these lie next to each other.
std::pair<int64_t, int64_t> channel_blocks(int64_t rows, int64_t channels) {
  int64_t width = std::min<int64_t>(last_power_of_2(channels), 32);
  int64_t height = std::min<int64_t>(last_power_of_2(divided_up(rows, 16)), 512 / width);
  if (width * height != 512) width = std::min<int64_t>(last_power_of_2(channels), 512 / height);
  int64_t down = std::min<int64_t>(divided_up(rows, height * 16), 128);
  return {divided_up(channels, width), down < 8 ? 1 : down};
}

bool channels_lie_together(const Tensor& image) {
  if (image.dim() == 2) return image.is_contiguous();
  return image.dim() > 3 && !image.is_contiguous() && image.stride(1) == 1 && image.is_non_overlapping_and_dense();
}

int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * int64_t(tensor.itemsize()); }

const Tensor& tensor_at(const torch::jit::Stack& values, size_t place) { return values[place].toTensor(); }

using Blocks = std::vector<int64_t>;  // bytes; -n: the last n are given back

Blocks plain_copy(const Tensor& tensor) { return tensor.is_contiguous() ? Blocks{} : Blocks{bytes_of(tensor)}; }

// A gradient with gaps, such as a part of a joined one, is copied; another order of dimensions is taken as it is.
Blocks dense_copy(const torch::jit::Stack& given) {
  const Tensor& grad = tensor_at(given, 0);
  return grad.is_non_overlapping_and_dense() ? Blocks{} : Blocks{bytes_of(grad)};
}

Blocks batch_norm_scratch(const torch::jit::Stack& given) {
  const Tensor& image = tensor_at(given, 0);
  if (!channels_lie_together(image)) return {};
  auto [across, down] = channel_blocks(image.numel() / image.size(1), image.size(1));
  return down == 1 ? Blocks{} : Blocks{16 * image.size(1) * down, 4 * across};
}

Blocks batch_norm_grad_scratch(const torch::jit::Stack& given) {
  const Tensor& image = tensor_at(given, 1);
  return channels_lie_together(image) ? Blocks{4 * image.size(1), 4 * image.size(1)} : Blocks{};
}

Blocks group_norm_scratch(const torch::jit::Stack& given) {  // native_group_norm(input, weight, bias, N, C, HxW, group, eps)
  int64_t all = given[3].toInt() * given[4].toInt();
  return {4 * all, 4 * all};
}

Blocks group_norm_grad_scratch(const torch::jit::Stack& given) {  // (grad, input, mean, rstd, weight, N, C, HxW, group, mask)
  int64_t all = given[5].toInt() * given[6].toInt(), groups = given[5].toInt() * given[8].toInt();
  return {4 * all, 4 * all, 4 * all, 4 * groups, 4 * groups};
}

// Many short rows: partial sums of 32 and more of them, which are then summed up (LaunchGammaBetaBackwardCUDAKernel).
Blocks layer_norm_grad_scratch(const torch::jit::Stack& given) {  // (grad, input, normalized_shape, mean, rstd, ...)
  const Tensor& in = tensor_at(given, 1);
  int64_t width = 1;
  for (int64_t size : given[2].toIntVector()) width *= size;
  int64_t rows = width ? in.numel() / width : 0;
  Blocks copy = plain_copy(tensor_at(given, 0));
  if (rows <= 64 * 1024 || width / 32 >= multiprocessors / 2) return copy;
  int64_t parts = std::min(divided_up(rows, 32), 32768 / divided_up(width, 32)), item = int64_t(in.itemsize());
  Tensor like = at::empty({parts, width}, at::TensorOptions().dtype(in.scalar_type()).device(c10::kMeta));
  auto [partial, counters] = reduction_scratch(like, {true, false}, width, 4);
  copy.insert(copy.end(), {parts * width * item, parts * width * item});
  if (partial) copy.insert(copy.end(), {partial, counters, -2, partial, counters});  // one after the other
  return copy;
}

Blocks softmax_grad_scratch(const torch::jit::Stack& given) {  // the product of gradient and output
  const Tensor &grad = tensor_at(given, 0), &output = tensor_at(given, 1);
  return {grad.numel() * int64_t(std::max(grad.itemsize(), output.itemsize()))};
}

// A number for each chunk of 65536 elements, as many for each tensor as the largest has (ForeachReduceOp.cu).
Blocks norms_scratch(const torch::jit::Stack& given) {
  int64_t count = 0, chunks = 0;
  for (const Tensor& tensor : given[0].toTensorVector()) {
    ++count;
    chunks = std::max(chunks, divided_up(tensor.numel(), 65536));
  }
  return {4 * count * chunks};
}

// What is taken before the results: a kernel that wants its input plain copies it first.
const std::unordered_map<std::string, size_t> copied_first = {{"aten::native_layer_norm", 0},
                                                              {"aten::native_layer_norm_backward", 1}};

const std::unordered_map<std::string, Blocks (*)(const torch::jit::Stack&)> scratch_rules = {
    {"aten::_foreach_norm", norms_scratch},
    {"aten::upsample_nearest2d_backward", dense_copy},
    {"aten::upsample_bilinear2d_backward", dense_copy},
    {"aten::native_batch_norm", batch_norm_scratch},
    {"aten::_native_batch_norm_legit", batch_norm_scratch},
    {"aten::native_batch_norm_backward", batch_norm_grad_scratch},
    {"aten::native_group_norm", group_norm_scratch},
    {"aten::native_group_norm_backward", group_norm_grad_scratch},
    {"aten::native_layer_norm_backward", layer_norm_grad_scratch},
    {"aten::_softmax_backward_data", softmax_grad_scratch},
    {"aten::_softmax", [](const torch::jit::Stack& given) { return plain_copy(tensor_at(given, 0)); }},
    {"aten::_log_softmax", [](const torch::jit::Stack& given) { return plain_copy(tensor_at(given, 0)); }},
    {"aten::_log_softmax_backward_data", [](const torch::jit::Stack& given) { return plain_copy(tensor_at(given, 0)); }},
    {"aten::reflection_pad2d", [](const torch::jit::Stack& given) { return plain_copy(tensor_at(given, 0)); }},
};

std::vector<c10::DataPtr> copies_before(const std::string& name, const torch::jit::Stack& given) {
  std::vector<c10::DataPtr> held;
  if (auto place = copied_first.find(name); place != copied_first.end())
    for (int64_t bytes : plain_copy(tensor_at(given, place->second))) held.push_back(allocator.allocate(size_t(bytes)));
  return held;
}

void take_scratch(const std::string& name, const torch::jit::Stack& given) {
  auto place = scratch_rules.find(name);
  if (place == scratch_rules.end()) return;
  std::vector<c10::DataPtr> held;
  for (int64_t bytes : place->second(given))
    if (bytes < 0) held.resize(size_t(int64_t(held.size()) + bytes));
    else if (bytes) held.push_back(allocator.allocate(size_t(bytes)));
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

void everything(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  size_t count = schema.arguments().size();
  torch::jit::Stack given(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  Within within(name, device_among(given));
  if (auto place = blas_ops.find(name); place != blas_ops.end())
    note(CALL, place->second, 0, 0, uint16_t(this_stream[this_device]));

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
  for (IValue& value : results) stack->push_back(std::move(value));
}

// ---- kernels of their own

Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  Within within("aten::empty", device.value_or(Device(DeviceType::CUDA, this_device)));
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  Tensor made(at::detail::empty_generic(size, &allocator, DispatchKeySet(DispatchKey::CUDA), type, format));
  remember_blank(made);
  return made;
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  Within within("aten::empty_strided", device.value_or(Device(DeviceType::CUDA, this_device)));
  Tensor made = make(size, stride, dtype.value_or(c10::get_default_dtype_as_scalartype()));
  remember_blank(made);
  return made;
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  Within within("aten::resize_", self.device());
  Tensor like = at::empty(size, at::TensorOptions().dtype(self.scalar_type()).device(c10::kMeta), format);
  if (self.sizes() != size) resize_like(self, like.sizes(), like.strides());
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  int64_t count = int64_t(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true));
}

void invent(const Tensor& on_cpu) {
  ++made_up;
  if (c10::isIntegralType(on_cpu.scalar_type(), true)) on_cpu.zero_();
  else on_cpu.fill_(0.5);
}

Tensor plain(const Tensor& like, c10::ScalarType dtype) {
  Tensor meta = at::empty(like.sizes(), at::TensorOptions().dtype(dtype).device(c10::kMeta));
  return make(meta.sizes(), meta.strides(), dtype);
}

// As at::native::copy_kernel_cuda: a copy between host and device that is not plain goes through a plain copy.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  Within within("aten::copy_", self.is_cuda() ? self.device() : source.device());
  if (self.numel() == 0) return self;
  auto known = source.is_cuda() ? shadow_of(source) : std::optional<Tensor>(source);
  bool same = self.scalar_type() == source.scalar_type() && self.strides() == source.strides() &&
              self.sizes() == source.sizes() && self.is_non_overlapping_and_dense();
  if (self.is_cuda() != source.is_cuda() && !same) {
    bool convert_at_source = source.is_cuda() == non_blocking;
    auto type = convert_at_source ? self.scalar_type() : source.scalar_type();
    std::vector<Tensor> temporaries;
    if (self.is_cuda() && !(self.is_contiguous() && self.scalar_type() == type)) temporaries.push_back(plain(self, type));
    if (source.is_cuda() && !(source.is_contiguous() && source.scalar_type() == type))
      temporaries.push_back(plain(self, type));
  }
  if (!self.is_cuda()) {
    if (known) self.copy_(*known);
    else invent(self);
    return self;
  }
  auto mine = known && source.numel() <= MOST_WHOLE ? shadow_of(self) : std::nullopt;
  if (mine) mine->copy_(*known);
  else drop_shadow(address_of(self));
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  note(OTHER_STREAM, 0, address_of(self), 0, uint16_t(stream.id()));
}

std::optional<Tensor> shadow(const Tensor& tensor) {
  auto known = shadow_of(tensor);
  if (!known) ++made_up;
  return known ? std::optional<Tensor>(known->clone()) : std::nullopt;
}

void remember_values(const Tensor& tensor, const Tensor& values) { remember(tensor, values); }

// As at::native::resize_bytes_cuda: the new memory is there before the old one goes.
void resize_storage(const Tensor& self, int64_t bytes) {
  Within within("aten::resize_storage", self.device());
  drop_shadow(address_of(self));
  c10::Storage storage = self.unsafeGetTensorImpl()->unsafe_storage();
  storage.set_data_ptr_noswap(allocator.allocate(size_t(bytes)));
  storage.set_nbytes(size_t(bytes));
}

void forget(const Tensor& tensor) { drop_shadow(address_of(tensor)); }

// ---- the device, as torch's own code sees it

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::CUDA, this_device);
    this_device = device.index() < 0 ? this_device : device.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, this_device); }
  void setDevice(Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream stream(Device device) const {
    DeviceIndex index = device.index() < 0 ? this_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index), this_stream[index]);
  }
  c10::Stream getStream(Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, device.index() < 0 ? this_device : device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return stream(device); }
  c10::Stream getNewStream(Device device, int = 0) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    this_stream[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    note(OTHER_STREAM, 0, reinterpret_cast<uint64_t>(data.get()), 0, uint16_t(stream.id()));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
Guard guard;

}  // namespace

// The name is the key under which torch looks for it. Methods that some versions of torch do not have are not marked
// `override`: there they are simply never called.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const { return true; }
  bool supportsBFloat16RNNWithCuDNN() const { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const { return 91900; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  DeviceIndex current_device() const { return this_device; }
  int getNumGPUs() const { return device_count; }
  DeviceIndex deviceCount() const { return DeviceIndex(device_count); }
  DeviceIndex getCurrentDevice() const { return this_device; }
  void setCurrentDevice(DeviceIndex device) const { guard.setDevice(Device(DeviceType::CUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const {
    return guard.exchangeDevice(Device(DeviceType::CUDA, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return exchangeDevice(device); }
  bool isPinnedPtr(const void*) const { return false; }
  at::Allocator* getPinnedMemoryAllocator() const { return c10::GetAllocator(DeviceType::CPU); }
  at::Allocator* getCUDADeviceAllocator() const { return &allocator; }
  Device getDeviceFromPtr(void*) const { return Device(DeviceType::CUDA, this_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const {}
};

namespace {
c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(),
    [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<CUDAHooks>(args); });

torch::Library& aten() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  return library;
}
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
