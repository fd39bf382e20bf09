// Products in block-scaled 16-bit integers, in every way in which an operand can come.
#include "guarded.h"

namespace {

// A matrix of float or bf16 with gaps between its rows, and no byte behind the last element.
struct Matrix {
  int64_t rows, cols, stride;
  bool bf16;
  Floats floats;
  Guarded<uint16_t> halves;
  Matrix(Random& random, int64_t rows, int64_t cols)
      : rows(rows),
        cols(cols),
        stride(cols + random.below(20)),
        bf16(random.seldom()),
        floats(bf16 ? 0 : elements()),
        halves(bf16 ? elements() : 0) {
    const float size = random.seldom() ? random.pick({1e-30f, 1e25f}) : 1.f;
    for (int64_t i = 0; i < elements(); i++)
      bf16 ? (void)(halves[i] = bf16_bits(size * random.normal()))
           : (void)(floats[i] = size * random.normal());
  }
  int64_t elements() const { return rows ? (rows - 1) * stride + cols : 0; }
  const void* data() { return bf16 ? (const void*)halves.data() : floats.data(); }
  double at(int64_t r, int64_t c) {
    return bf16 ? bf16_value(halves[r * stride + c]) : floats[r * stride + c];
  }
};

int64_t packed_bytes(int64_t vectors, int64_t depth, int64_t role) {
  int64_t bytes = -1;
  CALL(int16_packed_bytes, vectors, depth, role, &bytes);
  return bytes;
}

void expect_sums(Matrix& x, Floats& sums) {
  for (int64_t c = 0; c < x.cols; c++) {
    double total = 0, size = 0;
    for (int64_t r = 0; r < x.rows; r++) total += x.at(r, c), size += std::fabs(x.at(r, c));
    expect(near(sums[c], total, 1e-5, size), "column sums");
  }
}

// One side of a product: its vectors are rows or columns of a matrix, packed before or on the way.
struct Side {
  int64_t vectors, depth, role;
  bool columns, lazy, wants_sums;
  Matrix source;
  Side(Random& random, int64_t vectors, int64_t depth, int64_t role)
      : vectors(vectors),
        depth(depth),
        role(role),
        columns(random.coin()),
        lazy(random.coin()),
        wants_sums(columns && random.coin()),
        source(random, columns ? depth : vectors, columns ? vectors : depth) {}
  double at(int64_t vector, int64_t k) {
    return columns ? source.at(k, vector) : source.at(vector, k);
  }
  double norm(int64_t vector) {
    double total = 0;
    for (int64_t k = 0; k < depth; k++) total += std::pow(at(vector, k), 2);
    return std::sqrt(total);
  }
  Int16Operand operand(Guarded<char>& memory, Floats& sums) {
    if (lazy)
      return {source.data(), source.bf16, source.stride, columns, sums.if_wanted(wants_sums),
              memory.data()};
    with_scratch([&](Scratch* scratch) {
      CALL(int16_pack, source.data(), source.bf16, source.stride, source.rows, source.cols,
           columns ? nullptr : memory.data(), role, columns ? memory.data() : nullptr, role,
           sums.if_wanted(wants_sums), scratch);
    });
    return {nullptr, 0, 0, 0, nullptr, memory.data()};
  }
};

void product(Random& random) {
  const bool deep = random.seldom();
  const int64_t rows = random.size(deep ? 40 : 90), cols = random.size(deep ? 40 : 90);
  const int64_t depth = deep ? 500 + random.below(700) : random.size(200);
  const bool has_bias = random.coin(), accumulates = random.coin();
  const int64_t stride = cols + random.below(10), vnni = random.coin();
  Side left(random, rows, depth, 0), right(random, cols, depth, 1);
  describe("int16_product", rows, cols, depth, left.columns, left.lazy, left.source.bf16,
           right.columns, right.lazy, right.source.bf16, has_bias, accumulates, vnni);
  Floats bias(random, cols), start(random, rows ? (rows - 1) * stride + cols : 0);
  on_every_isa(1e-2, [&](Same&) {
    CALL(int16_use_vnni, vnni);
    Guarded<char> left_memory(packed_bytes(rows, depth, 0)),
        right_memory(packed_bytes(cols, depth, 1));
    Floats left_sums(rows), right_sums(cols), out(start.size());
    out.copy(start);
    const Int16Operand a = left.operand(left_memory, left_sums);
    const Int16Operand b = right.operand(right_memory, right_sums);
    with_scratch([&](Scratch* scratch) {
      CALL(int16_product, &a, &b, out, stride, rows, cols, depth, nullptr, bias.if_wanted(has_bias),
           accumulates, scratch);
    });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < cols; c++) {
        double expected = (has_bias ? bias[c] : 0) + (accumulates ? start[r * stride + c] : 0);
        for (int64_t k = 0; k < depth; k++) expected += left.at(r, k) * right.at(c, k);
        const double size = left.norm(r) * right.norm(c) + 1;
        if (size < 1e37) expect(near(out[r * stride + c], expected, 1e-3, size), "int16_product");
      }
    for (int64_t r = 0; r + 1 < rows; r++)
      for (int64_t c = cols; c < stride; c++)
        expect(out[r * stride + c] == start[r * stride + c], "a gap between rows was written");
    if (left.wants_sums) expect_sums(left.source, left_sums);
    if (right.wants_sums) expect_sums(right.source, right_sums);
  });
}

// Both orientations in one read; and activations that are packed as they are computed, which must
// be what packing the activations gives.
void packing(Random& random) {
  const int64_t rows = random.size(140), cols = random.size(rows > 60 ? 60 : 600);
  const int64_t row_role = random.below(2), column_role = random.below(2), kind = random.below(5);
  const bool has_bias = random.coin();
  Matrix x(random, rows, cols);
  describe("int16_pack", rows, cols, row_role, column_role, x.bf16, kind, has_bias);
  Floats h(random, x.elements()), bias(random, cols);
  on_every_isa(0, [&](Same&) {
    const int64_t bytes = packed_bytes(rows, cols, row_role);
    const int64_t left_bytes = packed_bytes(rows, cols, 0);
    Guarded<char> by_rows(bytes), by_columns(packed_bytes(cols, rows, column_role));
    Guarded<char> alone(bytes), activated(left_bytes), computed(left_bytes);
    Floats sums(cols), out(rows * cols), dense(rows * cols);
    const auto pack = [&](void* to_rows, void* to_columns, float* to_sums) {
      with_scratch([&](Scratch* scratch) {
        CALL(int16_pack, x.data(), x.bf16, x.stride, rows, cols, to_rows, row_role, to_columns,
             column_role, to_sums, scratch);
      });
    };
    pack(by_rows, by_columns, sums), pack(alone, nullptr, nullptr);
    expect(memcmp(by_rows, alone, bytes) == 0, "packed in one read and alone differ");
    expect_sums(x, sums);
    CALL(int16_pack_activated, h, bias.if_wanted(has_bias), kind, x.stride, rows, cols, activated);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < cols; c++) dense[r * cols + c] = h[r * x.stride + c];
    CALL(activation, dense, bias.if_wanted(has_bias), out, nullptr, rows, cols, kind);
    with_scratch([&](Scratch* scratch) {
      CALL(int16_pack, out.data(), 0, cols, rows, cols, computed.data(), 0, nullptr, 0, nullptr,
           scratch);
    });
    // Beside the values there are gaps between panels, which nobody writes.
    expect(memcmp(activated, computed, left_bytes) == 0, "activations, packed");
  });
}

}  // namespace

void check_products(Random& random) { product(random), packing(random); }
