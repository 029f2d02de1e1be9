// Moves many small pieces of memory at once: between device memory and page-locked memory, or inside a device.
//
// The table has columns, each `capacity` long: destinations, sources (64 bits each) and sizes (32 bits), of which `rows`
// are used. Where all entries are of one size, or rectangles of one shape, there are no sizes, and each entry is cut into
// rows here: so whoever fills the table copies two columns and computes nothing. A warp takes `group` rows at a time,
// whose columns it reads with one load each: the table lies across the link.
//
// `make ptx` compiles this file into scatter.ptx, which is what the library loads.

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLanes = 32;
// Of 16 bytes a lane. Four loads in flight cover the round trip over the link.
constexpr int kUnroll = 4;
constexpr unsigned kVector = 16;
constexpr unsigned kLine = 128;

using Address = unsigned long long;

// The 16 bytes that begin at an offset into two neighbouring vectors.
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, unsigned offset) {
  unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (offset & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (offset & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  const unsigned bits = (offset & 3) * 8;
  return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                    __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

__device__ __forceinline__ uint4 from_lane(uint4 v, int lane) {
  return make_uint4(__shfl_sync(kAllLanes, v.x, lane), __shfl_sync(kAllLanes, v.y, lane),
                    __shfl_sync(kAllLanes, v.z, lane), __shfl_sync(kAllLanes, v.w, lane));
}

// The first `lead` lanes stay idle at first, so that the warp's accesses begin at a line.
template <int Unroll>
__device__ __forceinline__ void copy_aligned(uint4* dst, const uint4* src, int count, int lead, int lane) {
  for (int base = -lead; base < count; base += kLanes * Unroll) {
    uint4 v[Unroll];
#pragma unroll
    for (int j = 0; j < Unroll; ++j) {
      const int k = base + lane + kLanes * j;
      if (k >= 0 && k < count) v[j] = __ldcs(src + k);
    }
#pragma unroll
    for (int j = 0; j < Unroll; ++j) {
      const int k = base + lane + kLanes * j;
      if (k >= 0 && k < count) __stcs(dst + k, v[j]);
    }
  }
}

// Each destination vector is cut out of two source vectors, of which the neighbour lane has one: every byte crosses the
// link once. Reads the vectors 0 to count inclusive.
template <int Unroll>
__device__ __forceinline__ void copy_shifted(uint4* dst, const uint4* src, unsigned offset, int count, int lead,
                                             int lane) {
  for (int base = -lead; base < count; base += kLanes * Unroll) {
    uint4 v[Unroll + 1];
#pragma unroll
    for (int j = 0; j < Unroll; ++j) {
      const int k = base + lane + kLanes * j;
      v[j] = k >= 0 && k <= count ? __ldcs(src + k) : make_uint4(0, 0, 0, 0);
    }
    const int beyond = base + kLanes * Unroll;
    v[Unroll] = beyond <= count ? __ldcs(src + beyond) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < Unroll; ++j) {
      const uint4 high = from_lane(lane == 0 ? v[j + 1] : v[j], (lane + 1) % kLanes);
      const uint4 out = shifted(v[j], high, offset);
      const int k = base + lane + kLanes * j;
      if (k >= 0 && k < count) __stcs(dst + k, out);
    }
  }
}

__device__ __forceinline__ void copy_bytes(unsigned char* dst, const unsigned char* src, unsigned nbytes, int lane) {
  for (unsigned i = lane; i < nbytes; i += kLanes) __stcs(dst + i, __ldcs(src + i));
}

// One warp copies one row. Never reads or writes outside of it.
template <int Unroll>
__device__ __forceinline__ void copy_row(Address dst, Address src, unsigned nbytes, bool align_source, int lane) {
  auto* const to = reinterpret_cast<unsigned char*>(dst);
  auto* const from = reinterpret_cast<const unsigned char*>(src);
  if (nbytes < 4 * kVector) {
    copy_bytes(to, from, nbytes, lane);
    return;
  }
  // At most 31 bytes before and after the vectors: one for each lane.
  unsigned head = -static_cast<unsigned>(dst) % kVector;
  const unsigned offset = (static_cast<unsigned>(src) + head) % kVector;
  // The first source vector must not begin before the row, nor the last one end behind it.
  if (head < offset) head += kVector;
  const int count = static_cast<int>((nbytes - head - (kVector - offset) % kVector) / kVector);
  const unsigned tail = nbytes - head - count * kVector;
  const Address vectors_to = dst + head;
  const Address vectors_from = src + head - offset;
  const int lead = static_cast<int>((align_source ? vectors_from : vectors_to) % kLine / kVector);
  if (offset == 0) {
    copy_aligned<Unroll>(reinterpret_cast<uint4*>(vectors_to), reinterpret_cast<const uint4*>(vectors_from), count,
                         lead, lane);
  } else {
    copy_shifted<Unroll>(reinterpret_cast<uint4*>(vectors_to), reinterpret_cast<const uint4*>(vectors_from), offset,
                         count, lead, lane);
  }
  copy_bytes(to, from, head, lane);
  const unsigned done = nbytes - tail;
  copy_bytes(to + done, from + done, tail, lane);
}

// How entries of one size are cut: into `parts` rows of `row_nbytes`, all but the first of which begin at a line. The last
// one has what is left. Rectangles of one shape are cut into their `parts` rows, which lie a pitch apart.
struct Cut {
  unsigned nbytes;  // of each entry, or each row of a rectangle; 0: the table has sizes, and a row for each
  unsigned parts;
  unsigned row_nbytes;
  Address dst_pitch, src_pitch;  // 0: no rectangles
};

struct Row {
  Address dst = 0;
  Address src = 0;
  unsigned nbytes = 0;
};

__device__ __forceinline__ Row load_row(const unsigned char* table, unsigned capacity, unsigned rows, unsigned index,
                                        bool mine, bool align_source, Cut cut) {
  Row row;
  if (!mine || index >= rows) return row;
  auto* const dsts = reinterpret_cast<const Address*>(table);
  auto* const sizes = reinterpret_cast<const unsigned*>(dsts + 2 * static_cast<size_t>(capacity));
  const unsigned entry = cut.nbytes == 0 ? index : index / cut.parts;
  row.dst = __ldcs(dsts + entry);
  row.src = __ldcs(dsts + capacity + entry);
  if (cut.nbytes == 0) {
    row.nbytes = __ldcs(sizes + entry);
    return row;
  }
  const unsigned part = index - entry * cut.parts;
  if (cut.src_pitch != 0) {
    row.dst += part * cut.dst_pitch;
    row.src += part * cut.src_pitch;
    row.nbytes = cut.nbytes;
    return row;
  }
  const unsigned skew = static_cast<unsigned>(align_source ? row.src : row.dst) % kLine;
  const unsigned begin = part == 0 ? 0 : part * cut.row_nbytes - skew;
  const unsigned end = part + 1 == cut.parts ? cut.nbytes : (part + 1) * cut.row_nbytes - skew;
  row.dst += begin;
  row.src += begin;
  row.nbytes = end - begin;
  return row;
}

template <int Unroll>
__device__ __forceinline__ void scatter(const unsigned char* table, unsigned capacity, unsigned rows, unsigned group,
                                        bool align_source, Cut cut) {
  const int lane = threadIdx.x % kLanes;
  const unsigned warps_in_block = blockDim.x / kLanes;
  const unsigned warp = blockIdx.x * warps_in_block + threadIdx.x / kLanes;
  const unsigned stride = gridDim.x * warps_in_block * group;
  const bool mine = static_cast<unsigned>(lane) < group;
  unsigned first = warp * group;
  Row next = load_row(table, capacity, rows, first + lane, mine, align_source, cut);
  for (; first < rows; first += stride) {
    const Row row = next;
    // Crosses the link while this group's bytes do.
    next = load_row(table, capacity, rows, first + stride + lane, mine, align_source, cut);
    const unsigned count = min(group, rows - first);
    for (unsigned i = 0; i < count; ++i) {
      copy_row<Unroll>(__shfl_sync(kAllLanes, row.dst, i), __shfl_sync(kAllLanes, row.src, i),
                       __shfl_sync(kAllLanes, row.nbytes, i), align_source, lane);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 3)
    aiocuda_copy_scatter(const unsigned char* table, unsigned capacity, unsigned rows, unsigned group,
                         unsigned align_source, unsigned nbytes, unsigned parts, unsigned row_nbytes, Address dst_pitch,
                         Address src_pitch) {
  scatter<kUnroll>(table, capacity, rows, group, align_source != 0, {nbytes, parts, row_nbytes, dst_pitch, src_pitch});
}
