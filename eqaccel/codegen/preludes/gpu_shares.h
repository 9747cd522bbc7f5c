// GPU prelude, second part: which slots and rows belong to a block.
namespace {

// The slots of rows one after another: row n has slots first[n] to first[n + 1], or slot n alone where `first` is null.
struct Rows {
  const int32_t* first;
  int count, slots;

  EQ_FN int begin(int row) const { return first ? first[row] : row; }
  EQ_FN int end(int row) const { return first ? first[row + 1] : row + 1; }

  // The row that a slot belongs to, searched by a whole warp.
  EQ_FN int of(int slot) const {
    if (!first) return slot;
    int low = 0, high = count;  // so many rows at least, and at most, begin at the slot or before
    while (low < high) {
      const int step = (high - low + 31) / 32, probe = low + (threadIdx.x % 32 + 1) * step - 1;
      low += step * count_lanes(probe < high && first[probe] <= slot);
      high = min(high, low + step - 1);
    }
    return low - 1;
  }
};

EQ_FN Rows receivers_of(const eq_operands& o) { return {o.row_ptr, int(o.num_receivers), int(o.num_edges)}; }
EQ_FN Rows senders_of(const eq_operands& o) { return {o.t_row_ptr, int(o.num_senders), int(o.num_edges)}; }

// The slots of a block, first to last, and its rows. Rows without slots belong to the block that begins with them.
struct Share {
  Rows rows;
  int first, last, row;
  bool exists;

  EQ_FN Share(const Rows& rows_, const eq_shares& shares, int block) : rows(rows_), exists(true) {
    if (shares.size > 0) {
      first = int(int64_t(block) * shares.size);
      last = int(min(int64_t(first) + shares.size, int64_t(rows.slots)));
      row = rows.of(first);
      while (row > 0 && rows.begin(row) == first && rows.begin(row - 1) == first) --row;
      return;
    }
    const bool is_row = block < rows.count;
    first = is_row ? rows.begin(block) : (block - rows.count + 1) * shares.cut;
    row = is_row ? block : rows.of(first);
    const int begin = rows.begin(row), end = rows.end(row);
    const bool is_cut = end - begin > shares.cut;
    exists = is_row || (is_cut && first > begin);
    last = is_cut ? min(end, (first / shares.cut + 1) * shares.cut) : end;
  }

  // Where the rows without slots end that follow the last slot.
  EQ_FN int rows_end(const eq_shares& shares) const { return shares.size > 0 && last == rows.slots ? rows.count : 0; }

  // Where the sum over this share's slots of a row belongs: to the row itself or, if it was cut, to one of its pieces.
  EQ_FN bool has_all(int of_row) const { return rows.begin(of_row) >= first && rows.end(of_row) <= last; }
  EQ_FN T* target(const eq_shares& shares, T* out, int of_row, int64_t dim) const {
    if (has_all(of_row)) return out + of_row * dim;
    const int piece = rows.begin(of_row) >= first ? 2 * (last / shares.cut) + 1 : 2 * (first / shares.cut);
    return static_cast<T*>(shares.pieces) + piece * dim;
  }
};

// Adds up the pieces of the row whose first cut is number `cut`, in order; `position(n)` is where element n is put.
template <class Position>
EQ_FN void join(const Rows& rows, const eq_shares& shares, int64_t cut, T* out, int dim, Position position) {
  const int slot = int(cut * shares.cut), row = rows.of(slot), begin = rows.begin(row), end = rows.end(row);
  const bool is_cut = shares.size > 0 || end - begin > shares.cut;
  if (!is_cut || slot <= begin || slot - shares.cut > begin) return;
  for (int n = blockIdx.y * blockDim.x + threadIdx.x; n < dim; n += gridDim.y * blockDim.x) {
    const T* piece = static_cast<const T*>(shares.pieces) + 2 * cut * dim + n;
    T total = piece[dim];
    for (int at = slot; at < end; at += shares.cut, piece += 2 * dim) total += *piece;
    out[int64_t(row) * dim + position(n)] = total;
  }
}

}  // namespace
