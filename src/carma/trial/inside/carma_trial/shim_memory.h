// The emulated memory: the log of allocations and frees, inaccessible addresses, and the values of small tensors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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

void remember_blank(const Tensor& tensor) {  // a read before the first write returns zeros
  if (tensor.numel() == 0 || !small(tensor)) return;
  Tensor holder = at::empty({int64_t(tensor.storage().nbytes())}, at::TensorOptions().dtype(c10::kByte));
  std::memset(holder.data_ptr(), 0, holder.nbytes());
  std::lock_guard<std::mutex> hold(shadow_lock);
  shadows[address_of(tensor)] = holder;
}

}  // namespace
