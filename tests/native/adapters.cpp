// The low-rank paths of adapters, and weights as they are stored.
#include "guarded.h"

namespace {

void low_rank(Random& random) {
  const int64_t rows = random.size(90), cols = random.size(600), rank = 1 + random.below(80);
  const float p = random.pick({0.f, 0.05f, 0.5f, 1.f});
  const uint64_t key = random.bits();
  describe("low_rank", rows, cols, rank, p);
  Floats x(random, rows * cols), a(random, rank * cols), grad(random, rows * rank);
  Floats start(random, rows * cols);
  on_every_isa(1e-4, [&](Same& same) {
    Floats dropped(rows * cols), out(rows * rank), grad_a(rank * cols), grad_x(rows * cols);
    Floats ones(rows * cols), kept(rows * cols);
    for (int64_t i = 0; i < ones.size(); i++) ones[i] = 1;
    CALL(dropout, x, dropped, rows, cols, p, key);
    CALL(dropout, ones, kept, rows, cols, p, key);
    grad_x.copy(start);
    with_scratch([&](Scratch* scratch) {
      CALL(low_rank, x, cols, a, out, rows, cols, rank, p, key, scratch);
    });
    with_scratch([&](Scratch* scratch) {
      CALL(low_rank_a_grad, grad, x, cols, grad_a, rows, cols, rank, p, key, scratch);
    });
    Floats before(rows * cols);
    before.copy(grad_x);
    Scratch none = {nullptr, 0, 0};
    CALL(low_rank_x_grad, grad, a, grad_x, rows, cols, rank, p, key, &none);
    expect(memcmp(before, grad_x, rows * cols * sizeof(float)) == 0, "worked without memory");
    Guarded<char> memory(none.needed);
    Scratch given = {memory.data(), none.needed, 0};
    CALL(low_rank_x_grad, grad, a, grad_x, rows, cols, rank, p, key, &given);
    for (int64_t t = 0; t < rows; t++)
      for (int64_t r = 0; r < rank; r++) {
        double total = 0, size = 1;
        for (int64_t c = 0; c < cols; c++) {
          const double part = (double)dropped[t * cols + c] * a[r * cols + c];
          total += part, size += std::fabs(part);
        }
        expect(near(out[t * rank + r], total, 1e-5, size), "low_rank");
      }
    for (int64_t r = 0; r < rank; r++)
      for (int64_t c = 0; c < cols; c++) {
        double total = 0, size = 1;
        for (int64_t t = 0; t < rows; t++) {
          const double part = (double)grad[t * rank + r] * dropped[t * cols + c];
          total += part, size += std::fabs(part);
        }
        expect(near(grad_a[r * cols + c], total, 1e-5, size), "low_rank_a_grad");
      }
    for (int64_t t = 0; t < rows; t++)
      for (int64_t c = 0; c < cols; c++) {
        double total = start[t * cols + c], size = 1;
        for (int64_t r = 0; r < rank; r++) {
          const double part = (double)grad[t * rank + r] * a[r * cols + c] * kept[t * cols + c];
          total += part, size += std::fabs(part);
        }
        expect(near(grad_x[t * cols + c], total, 1e-5, size), "low_rank_x_grad");
      }
    same.check(out), same.check(grad_a), same.check(grad_x);
  });
}

// A stored weight of random bits, and what it stands for.
struct Weight {
  int64_t rows, cols, kind, block, nested_block, first_row;
  bool nested;
  Guarded<uint8_t> values, bytes;
  Floats code, scales, nested_code, nested_scales;
  Weight(Random& random, int64_t rows, int64_t cols)
      : rows(rows),
        cols(cols),
        kind(random.below(3)),
        block(2 * (8 + random.below(60))),
        nested_block(1 + random.below(9)),
        first_row(random.below(3)),
        nested(kind == kFourBitStored && random.coin()),
        values(kind == kFloat16Stored   ? 2 * elements()
               : kind == kFourBitStored ? (elements() + 1) / 2
                                        : elements()),
        bytes(nested ? blocks() : 0),
        code(random, 16),
        scales(random, nested                   ? 0
                       : kind == kFourBitStored ? blocks()
                                                : first_row + rows),
        nested_code(random, 256),
        nested_scales(random, (blocks() + nested_block - 1) / nested_block) {
    for (int64_t i = 0; i < values.size(); i++) values[i] = (uint8_t)random.bits();
    if (kind == kFloat16Stored)  // no infinities
      for (int64_t i = 1; i < values.size(); i += 2) values[i] &= 0xbf;
    for (int64_t i = 0; i < bytes.size(); i++) bytes[i] = (uint8_t)random.bits();
  }
  int64_t elements() const { return (first_row + rows) * cols; }
  int64_t blocks() const { return (elements() + block - 1) / block; }
  StoredWeight stored() {
    return {kind,
            values.data(),
            code.data(),
            nested ? (const void*)bytes.data() : (const void*)scales.data(),
            nested ? nested_code.data() : nullptr,
            nested_scales.data(),
            block,
            nested_block,
            nested ? 0.25f : 0.f,
            first_row * cols,
            first_row};
  }
  double at(int64_t row, int64_t col) {
    const int64_t i = (first_row + row) * cols + col;
    if (kind == kEightBitStored) return (double)(int8_t)values[i] * scales[first_row + row];
    if (kind == kFourBitStored) {
      const int64_t b = i / block;
      const double scale =
          nested ? (double)nested_code[bytes[b]] * nested_scales[b / nested_block] + 0.25
                 : scales[b];
      return code[i % 2 ? values[i / 2] & 15 : values[i / 2] >> 4] * scale;
    }
    const int exponent = values[2 * i + 1] >> 2 & 31;
    const int fraction = (values[2 * i + 1] & 3) << 8 | values[2 * i];
    const double size =
        exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return values[2 * i + 1] & 0x80 ? -size : size;
  }
};

// A product with a stored weight is the product with its floats, to the last bit.
void stored(Random& random) {
  const int64_t out_features = random.size(90), in_features = random.size(600);
  const int64_t rows = random.size(40), rank = random.below(20);
  const bool columns = random.coin(), accumulates = random.coin();
  Weight weight(random, out_features, in_features);
  describe("stored", out_features, in_features, weight.kind, weight.block, weight.nested,
           weight.first_row, rows, columns, rank);
  const int64_t depth = columns ? out_features : in_features;
  const int64_t cols = columns ? in_features : out_features;
  Floats x(random, rows * depth), t(random, rows * rank), b(random, cols * rank);
  Floats start(random, rows * cols);
  on_every_isa(1e-2, [&](Same&) {
    const StoredWeight source = weight.stored();
    Floats dense(out_features * in_features), found(rows * cols), expected(rows * cols);
    CALL(unpack_weight, &source, dense, out_features, in_features);
    for (int64_t r = 0; r < out_features; r++)
      for (int64_t c = 0; c < in_features; c++)
        expect(near(dense[r * in_features + c], weight.at(r, c), 1e-6, 10), "unpack_weight");
    const auto bytes = [&](int64_t vectors, int64_t along, int64_t role) {
      int64_t size = -1;
      CALL(int16_packed_bytes, vectors, along, role, &size);
      return size;
    };
    const auto multiply = [&](Floats& out, const void* matrix, int64_t kind, bool at_once) {
      Guarded<char> left(bytes(rows, depth, 0)), right(bytes(cols, depth, 1));
      Guarded<char> plus_left(bytes(rows, rank, 0)), plus_right(bytes(cols, rank, 1));
      const Int16Operand side = {x.data(), kFloatSource, depth, 0, nullptr, left.data()};
      const Int16Operand other = {matrix, kind, in_features, columns, nullptr, right.data()};
      const Int16Term plus = {{t.data(), kFloatSource, rank, 0, nullptr, plus_left.data()},
                              {b.data(), kFloatSource, rank, 0, nullptr, plus_right.data()},
                              rank};
      out.copy(start);
      with_scratch([&](Scratch* scratch) {
        CALL(int16_product, &side, &other, out, cols, rows, cols, depth, at_once ? &plus : nullptr,
             nullptr, accumulates, scratch);
      });
      if (at_once) return;
      Guarded<char> left2(bytes(rows, rank, 0)), right2(bytes(cols, rank, 1));
      const Int16Operand low = {t.data(), kFloatSource, rank, 0, nullptr, left2.data()};
      const Int16Operand high = {b.data(), kFloatSource, rank, 0, nullptr, right2.data()};
      with_scratch([&](Scratch* scratch) {
        CALL(int16_product, &low, &high, out, cols, rows, cols, rank, nullptr, nullptr, 1, scratch);
      });
    };
    multiply(found, &source, kStoredSource, true);
    multiply(expected, dense, kFloatSource, false);
    expect(!memcmp(found, expected, rows * cols * sizeof(float)), "a stored weight's product");
  });
}

}  // namespace

void check_adapters(Random& random) { low_rank(random), stored(random); }
