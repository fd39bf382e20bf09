// LayerNorm, its gradients and dropout as formulas in double.
#pragma once

#include "guarded.h"

typedef std::vector<double> Doubles;

struct LayerNormFormulas {
  int64_t rows, cols;
  Doubles mean, rstd, normal;

  LayerNormFormulas(const Doubles& z, int64_t rows, int64_t cols)
      : rows(rows), cols(cols), mean(rows), rstd(rows), normal(z) {
    for (int64_t r = 0; cols && r < rows; r++) {
      double* const row = normal.data() + r * cols;
      double squares = 0;
      for (int64_t c = 0; c < cols; c++) mean[r] += row[c] / cols;
      for (int64_t c = 0; c < cols; c++) squares += std::pow(row[c] - mean[r], 2);
      rstd[r] = 1 / std::sqrt(squares / cols + 1e-5);
      for (int64_t c = 0; c < cols; c++) row[c] = (row[c] - mean[r]) * rstd[r];
    }
  }
  double out(int64_t i, const float* weight, const float* beta) const {
    return normal[i] * (weight ? weight[i % cols] : 1) + (beta ? beta[i % cols] : 0);
  }
  // Of z, where `grad` is that of the result.
  Doubles gradient(const Doubles& grad, const float* weight) const {
    Doubles found(rows * cols);
    for (int64_t r = 0; r < rows; r++) {
      const auto slope = [&](int64_t c) { return grad[r * cols + c] * (weight ? weight[c] : 1); };
      double total = 0, along = 0;
      for (int64_t c = 0; c < cols; c++) {
        total += slope(c) / cols;
        along += slope(c) * normal[r * cols + c] / cols;
      }
      for (int64_t c = 0; c < cols; c++)
        found[r * cols + c] = rstd[r] * (slope(c) - total - normal[r * cols + c] * along);
    }
    return found;
  }
  Doubles weight_gradient(const Doubles& grad) const {
    Doubles found(cols);
    for (int64_t i = 0; i < rows * cols; i++) found[i % cols] += grad[i] * normal[i];
    return found;
  }
  // The rounding errors of z grow by this in its gradient: large where a row's values are alike.
  double largest_rstd() const {
    double largest = 1;
    for (double one : rstd) largest = std::fmax(largest, one);
    return largest;
  }
};

inline Doubles column_sums(const Doubles& x, int64_t cols) {
  Doubles found(cols);
  for (size_t i = 0; i < x.size(); i++) found[i % cols] += x[i];
  return found;
}
inline Doubles product(const Doubles& a, const Doubles& b) {
  Doubles found(a);
  for (size_t i = 0; i < a.size(); i++) found[i] *= b[i];
  return found;
}
inline Doubles doubles(const Floats& x) { return Doubles(x.data(), x.data() + x.size()); }

// What dropout multiplies by: what the kernel makes of ones (check_rows compares these with p).
inline Doubles dropout_factors(int64_t rows, int64_t cols, float p, uint64_t key) {
  Floats ones(rows * cols);
  for (int64_t i = 0; i < ones.size(); i++) ones[i] = 1;
  CALL(dropout, ones, ones, rows, cols, p, key);
  return doubles(ones);
}

inline void expect_near(const Floats& found, const Doubles& expected, double tolerance,
                        double scale, const char* what) {
  for (int64_t i = 0; i < found.size(); i++)
    expect(near(found.data()[i], expected[i], tolerance, scale), what);
}
