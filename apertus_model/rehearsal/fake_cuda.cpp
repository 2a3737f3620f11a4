// A CUDA without a device: what autograd asks of a device before it runs a backward pass on tensors that
// say they are on it. Nothing is ever computed there.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using Base = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
constexpr c10::DeviceIndex kOnly = 0;

c10::Device only() { return {c10::DeviceType::CUDA, kOnly}; }
c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, only()); }

// torch's guard that does nothing, with one device and with events.
struct Guard final : Base {
  c10::Device getDevice() const override { return only(); }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// at::getAccelerator() asks these whether there is CUDA.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return kOnly; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return kOnly; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return kOnly; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

} // namespace

namespace at {
// A CUDA build registers its own hooks with less priority.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
} // namespace at

// Called when torch is imported: the guard of a CUDA build, registered then, is replaced.
extern "C" void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());
}
