// What CUDA kernels take besides their results, and give back before they return: sizes and order as in PyTorch's own code.
#pragma once

#include "shim_memory.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace {

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

// Reductions by name, and the bytes that each keeps for one element: sums in float, moments for a variance, values as
// they are (0).
const std::unordered_map<std::string, int64_t> reductions = {
    {"aten::sum", 4}, {"aten::mean", 4}, {"aten::norm", 4}, {"aten::linalg_vector_norm", 4}, {"aten::amax", 0},
    {"aten::amin", 0}, {"aten::all", 1}, {"aten::any", 1}, {"aten::prod", 4}, {"aten::nansum", 4}, {"aten::var", 16},
    {"aten::std", 16}, {"aten::var_mean", 16}, {"aten::std_mean", 16}, {"aten::argmax", 16}, {"aten::argmin", 16},
    {"aten::max", 0}, {"aten::min", 0}};

std::vector<bool> reduced_dims(const c10::FunctionSchema& schema, const torch::jit::Stack& given, int64_t dims) {
  std::vector<bool> reduced(size_t(dims), true);
  for (size_t i = 1; i < given.size(); ++i) {
    if (schema.arguments()[i].name() != "dim" || given[i].isNone()) continue;
    std::vector<int64_t> named = given[i].isInt() ? std::vector<int64_t>{given[i].toInt()} : given[i].toIntVector();
    if (named.empty()) break;
    std::fill(reduced.begin(), reduced.end(), false);
    for (int64_t dim : named) reduced[size_t(dim < 0 ? dim + dims : dim)] = true;
  }
  return reduced;
}

// make_reduction: sums of whole numbers and flags are taken over a copy in the result's type; halves are read as floats.
bool cast_first(const std::string& name, const Tensor& in, const Tensor& out) {
  bool half = in.scalar_type() == c10::kHalf || in.scalar_type() == c10::kBFloat16;
  return (name == "aten::sum" || name == "aten::prod" || name == "aten::nansum") &&
         in.scalar_type() != out.scalar_type() && !(half && out.scalar_type() == c10::kFloat);
}

// A tensor that 32 bits cannot index is halved along its largest dimension, again and again, and reduced part by part
// (TensorIteratorBase::split): scratch is that of one part.
Tensor first_part(const Tensor& in, const std::vector<bool>& reduced, int64_t* outputs) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  std::vector<int64_t> sizes = in.sizes().vec();
  auto span = [&](size_t dim) { return (sizes[dim] - 1) * in.stride(int64_t(dim)) * int64_t(in.itemsize()); };
  auto reach = [&] {
    int64_t elements = 1, bytes = int64_t(in.itemsize());
    for (size_t dim = 0; dim < sizes.size(); ++dim) elements *= sizes[dim], bytes += span(dim);
    return std::max(elements, bytes);
  };
  while (reach() > most) {
    size_t largest = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim)
      if (span(dim) > span(largest)) largest = dim;
    if (sizes[largest] < 2) break;
    int64_t half = divided_up(sizes[largest], 2);
    if (!reduced[largest]) *outputs = *outputs / sizes[largest] * half;
    sizes[largest] = half;
  }
  return at::empty_strided(sizes, in.strides(), at::TensorOptions().dtype(in.scalar_type()).device(c10::kMeta));
}

void reduce_scratch(const std::string& name, const c10::FunctionSchema& schema, const torch::jit::Stack& given,
                    const torch::jit::Stack& results) {
  auto place = reductions.find(name);
  if (place == reductions.end() || given.empty() || !given[0].isTensor() || results.empty()) return;
  Tensor in = given[0].toTensor();
  if (!results[0].isTensor() || !in.is_cuda() || in.numel() == 0) return;
  const Tensor& out = results[0].toTensor();
  c10::DataPtr copy;
  if (cast_first(name, in, out)) {
    in = at::empty_like(in, at::TensorOptions().dtype(out.scalar_type()).device(c10::kMeta));
    copy = allocator.allocate(in.storage().nbytes());
  }
  int64_t bytes = place->second == 0 ? int64_t(in.itemsize()) : place->second;
  if (bytes == 4 && (in.scalar_type() == c10::kDouble || c10::isIntegralType(in.scalar_type(), true))) bytes = 8;
  auto reduced = reduced_dims(schema, given, in.dim());
  int64_t outputs = out.numel();
  in = first_part(in, reduced, &outputs);
  auto [partial, counters] = reduction_scratch(in, reduced, outputs, bytes);
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
  bool training = !(given.size() > 5 && given[5].isBool()) || given[5].toBool();
  if (!training || !channels_lie_together(image)) return {};
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

// Pooled plane by plane: what lies otherwise is copied, the results as well.
Blocks max_pool_scratch(const torch::jit::Stack& given) {  // adaptive_max_pool2d(self, output_size)
  const Tensor& in = tensor_at(given, 0);
  auto size = given[1].toIntVector();
  if (in.is_contiguous() || in.dim() != 4) return {};
  int64_t count = in.size(0) * in.size(1) * size[0] * size[1];
  return {bytes_of(in), count * int64_t(in.itemsize()), count * 8};
}

Blocks max_pool_grad_scratch(const torch::jit::Stack& given) {  // (grad, self, indices)
  if (tensor_at(given, 1).is_contiguous()) return {};
  return {bytes_of(tensor_at(given, 1)), bytes_of(tensor_at(given, 0)), bytes_of(tensor_at(given, 2))};
}

// Up to 4096 values in a row are sorted where they are; more by their rows' numbers, with a copy (Sort.cu).
Blocks sort_scratch(const torch::jit::Stack& given) {  // sort(self, [stable], dim, descending)
  const Tensor& in = tensor_at(given, 0);
  size_t place = given.size() > 3 ? 2 : 1;
  if (in.dim() == 0 || !given[place].isInt()) return {};
  int64_t dim = given[place].toInt() < 0 ? given[place].toInt() + in.dim() : given[place].toInt();
  if (in.size(dim) <= 4096) return {8 * in.size(dim)};
  bool last = in.stride(dim) == 1;
  return {in.numel() * (last ? 16 + int64_t(in.itemsize()) : 24 + 3 * int64_t(in.itemsize()))};
}

// Many or long rows are shared out among blocks, which count digits (mbtopk in TensorTopK.cu).
Blocks topk_scratch(const torch::jit::Stack& given) {  // topk(self, k, dim, largest, sorted)
  const Tensor& in = tensor_at(given, 0);
  if (in.dim() == 0 || in.numel() == 0) return {};
  int64_t dim = given[2].toInt() < 0 ? given[2].toInt() + in.dim() : given[2].toInt();
  int64_t length = in.size(dim), rows = in.numel() / length;
  int64_t shared_from = rows <= 20 ? 20000 : rows <= 40 ? 10000 : rows <= 80 ? 8000 : rows < 200 ? 5000
                        : rows < 800 ? 3000 : rows <= 4000 ? 800 : 400;
  if (length < shared_from) return {};
  int64_t each = std::clamp<int64_t>(divided_up(in.numel(), multiprocessors * 2048), 4, 64);
  return {rows * (1024 + 512 * divided_up(length, each * 256) + 28)};
}

// What is taken before the results: a kernel that wants its input plain copies it first.
const std::unordered_map<std::string, size_t> copied_first = {{"aten::native_layer_norm", 0},
                                                              {"aten::native_layer_norm_backward", 1}};

const std::unordered_map<std::string, Blocks (*)(const torch::jit::Stack&)> scratch_rules = {
    {"aten::_foreach_norm", norms_scratch},
    {"aten::adaptive_max_pool2d", max_pool_scratch},
    {"aten::adaptive_max_pool2d_backward", max_pool_grad_scratch},
    {"aten::sort", sort_scratch},
    {"aten::topk", topk_scratch},
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

}  // namespace
