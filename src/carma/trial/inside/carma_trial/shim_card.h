// The card as torch's own code sees it: a guard that switches between devices and streams that do not exist, and hooks.
#pragma once

#include "shim_memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

// Written for torch 2.4 and newer. What some of its versions do not have is not marked `override`: there it is never
// called. What some declare `noexcept` is so everywhere: the others allow it.

namespace {

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
  c10::Stream stream(Device device) const noexcept {
    DeviceIndex index = device.index() < 0 ? this_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index), this_stream[index]);
  }
  c10::Stream getStream(Device device) const noexcept override { return stream(device); }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, device.index() < 0 ? this_device : device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return stream(device); }
  c10::Stream getNewStream(Device device, int = 0) const { return stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
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
  void synchronizeEvent(void*) const {}
  void synchronizeDevice(const DeviceIndex) const {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    note(OTHER_STREAM, 0, reinterpret_cast<uint64_t>(data.get()), 0, uint16_t(stream.id()));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const { return 1.0; }
};
Guard guard;

}  // namespace

// The name is the key under which torch looks for it.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const {}
  void initCUDA() const {}  // its name before torch 2.6
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
  const at::Generator& getDefaultCUDAGenerator(DeviceIndex) const { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const {}
};

namespace {
c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(),
    [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<CUDAHooks>(args); });
}  // namespace
