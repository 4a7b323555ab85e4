// Kernels of their own: what only changes how a storage is looked at, and copies between host and card. Part of shim.cpp,
// in its namespace, after `everything` and its helpers.
#pragma once

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

// Kernels of a CUDA build are overridden on purpose, of which torch warns in the script's name.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
Silent silent;

torch::Library& aten() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  return library;
}
