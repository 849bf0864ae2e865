// The passes before and after an 8-bit product, which PyTorch makes one operation at a time: each here reads a row once
// or twice, while it is in the processor's cache. `quantize_rows` and `scale_rows` of kernels_vaswani.py say what they
// compute, and give the same numbers. compiled.py builds and loads this file.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>

// One version for each generation of processors, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace {

constexpr int64_t NUMBERS = 32768;  // that a thread is worth starting for

FOR_EACH_PROCESSOR
void quantize_row(const float* row, int64_t features, int8_t* integers, float* scale) {
  int32_t greatest = 0;  // floats without their sign are ordered as integers, and NaN is above all of them
  for (int64_t i = 0; i < features; ++i) {
    int32_t bits;
    std::memcpy(&bits, row + i, sizeof bits);
    bits &= 0x7fffffff;
    greatest = bits > greatest ? bits : greatest;
  }
  float step;
  std::memcpy(&step, &greatest, sizeof step);
  step /= 127;
  step = step < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : step;
  *scale = step;
  for (int64_t i = 0; i < features; ++i) {
    integers[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(row[i] / step)));
  }
}

FOR_EACH_PROCESSOR
void scale_floats(float* products, int64_t features, float scale, const float* bias) {
  for (int64_t i = 0; i < features; ++i) {
    products[i] = bias ? std::fma(products[i], scale, bias[i]) : products[i] * scale;
  }
}

FOR_EACH_PROCESSOR
void scale_integers(
    const int32_t* products, float* outputs, int64_t features, float scale, const float* column_scale, const float* bias) {
  for (int64_t i = 0; i < features; ++i) {
    const float product = static_cast<float>(products[i]) * column_scale[i];
    outputs[i] = bias ? std::fma(product, scale, bias[i]) : product * scale;
  }
}

template <typename Function>
void for_each_row(const at::Tensor& rows, const Function& function) {
  const int64_t grain = std::max<int64_t>(1, NUMBERS / std::max<int64_t>(1, rows.size(1)));
  at::parallel_for(0, rows.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& inputs) {
  TORCH_CHECK(inputs.dim() == 2 && inputs.scalar_type() == at::kFloat, "rows: expected a float32 matrix");
  const at::Tensor rows = inputs.contiguous();
  const int64_t features = rows.size(1);
  at::Tensor integers = at::empty(rows.sizes(), rows.options().dtype(at::kChar));
  at::Tensor scales = at::empty({rows.size(0), 1}, rows.options());
  const float* from = rows.const_data_ptr<float>();
  int8_t* to = integers.mutable_data_ptr<int8_t>();
  float* scale = scales.mutable_data_ptr<float>();
  for_each_row(rows, [&](int64_t row) { quantize_row(from + row * features, features, to + row * features, scale + row); });
  return {integers, scales};
}

const float* data(const std::optional<at::Tensor>& numbers) {
  return numbers.has_value() ? numbers->const_data_ptr<float>() : nullptr;
}

at::Tensor scale_rows(
    const at::Tensor& products, const at::Tensor& scales, const at::Tensor& column_scale, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(products.dim() == 2 && products.is_contiguous(), "products: expected a contiguous matrix");
  const int64_t features = products.size(1);
  const at::Tensor outputs = at::empty(products.sizes(), scales.options());
  const int32_t* from = products.const_data_ptr<int32_t>();
  const float *scale = scales.const_data_ptr<float>(), *columns = column_scale.const_data_ptr<float>(), *offsets = data(bias);
  float* to = outputs.mutable_data_ptr<float>();
  for_each_row(products, [&](int64_t row) {
    scale_integers(from + row * features, to + row * features, features, scale[row], columns, offsets);
  });
  return outputs;
}

void scale_rows_(at::Tensor& products, const at::Tensor& scales, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(products.dim() == 2 && products.is_contiguous(), "products: expected a contiguous matrix");
  const int64_t features = products.size(1);
  const float *scale = scales.const_data_ptr<float>(), *offsets = data(bias);
  float* numbers = products.mutable_data_ptr<float>();
  for_each_row(products, [&](int64_t row) { scale_floats(numbers + row * features, features, scale[row], offsets); });
}

}  // namespace

TORCH_LIBRARY(hf_vaswani, library) {
  library.def("quantize_rows(Tensor rows) -> (Tensor, Tensor)", &quantize_rows);
  library.def("scale_rows(Tensor products, Tensor scale, Tensor column_scale, Tensor? bias) -> Tensor", &scale_rows);
  library.def("scale_rows_(Tensor(a!) products, Tensor scale, Tensor? bias) -> ()", &scale_rows_);
}
