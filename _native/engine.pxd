from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

cimport driver_abi as abi


cdef extern from "memory.h" namespace "aiocuda" nogil:
    cdef cppclass MemoryInfo:
        abi.Context context
        int memory_type
        bint managed
        int ordinal
        uint64_t range_start
        uint64_t range_nbytes
        abi.Result result
    MemoryInfo describe(uint64_t address) noexcept


cdef extern from "<atomic>" namespace "std" nogil:
    cdef cppclass atomic[T]:
        T load()
        T fetch_add(T)
        T fetch_sub(T)
        void store(T)


cdef extern from "completion_queue.h" namespace "aiocuda" nogil:
    cdef cppclass QueueNode:
        QueueNode* next
        cbool early

    cdef enum class Form "aiocuda::CompletionQueue::Form":
        kEventfd
        kPipe

    cdef cppclass CompletionQueue:
        CompletionQueue(Form)
        cbool ok()
        int fd()
        cbool empty()
        QueueNode* take_announced(uint64_t patience_ns)


cdef extern from "operation.h" namespace "aiocuda" nogil:
    cdef enum class Route(unsigned char):
        kToHostDirect
        kToHostStaged
        kToDeviceDirect
        kToDeviceStaged
        kDeviceToDevice

    cdef enum class Phase(unsigned char):
        kWaiting
        kAdmitted
        kDelivered
        kCancelled

    cdef enum class Cancelled(int):
        kMustWait
        kDropped
        kUntouched

    cdef enum class Synchronizes(unsigned char):
        kNothing
        kStream
        kQuota

    cdef cppclass Shape:
        size_t width, height, depth
        size_t src_pitch, src_slice, dst_pitch, dst_slice
        size_t nbytes()

    cdef cppclass Entry:
        uintptr_t dst, src
        Shape shape
        unsigned attributes

    cdef cppclass Quota:
        size_t slots, slot_nbytes, workers
        cbool host_function_hints
        unsigned kernel_blocks
        atomic[size_t] slots_in_use
        atomic[uint64_t] submitted, completed, failed, cancelled
        atomic[uint64_t] inline_completions, parked_completions
        atomic[uint64_t] nbytes_by_route[5]
        atomic[uint64_t] nbytes_small, worker_busy_ns, references

    cdef cppclass Mark:
        abi.Event event
        abi.Context context
        cbool owned

    cdef cppclass Part:
        CxxOperation* operation
        Route route
        vector[Entry] entries
        size_t count()
        size_t nbytes()

    cdef cppclass Piece:
        pass

    cdef cppclass CxxOperation "aiocuda::Operation":
        Part& part_of(Route)
        void* owner
        CompletionQueue* queue
        Quota* quota
        atomic[Phase] phase
        atomic[uint64_t] nbytes_done
        vector[Mark] marks
        uint64_t stream_key, also_key
        cbool stream_marked, in_stream, unowned, only_read
        Synchronizes synchronizes
        vector[Part] parts
        vector[abi.CopyAttributes] attributes
        int result
        cbool leaked
        Piece* landed

    const size_t kSmallBytes
    CxxOperation* operation_of(QueueNode*)
    void copy_out(const Piece&)


cdef extern from "roads.h" namespace "aiocuda" nogil:
    cdef cppclass RoadTimes:
        atomic[uint64_t] avoided_ns, linger_ns, number_ns
    RoadTimes road_times


cdef extern from "batch.h" namespace "aiocuda" nogil:
    cdef cppclass AddressesResult:
        int problem
        size_t index
        int device
        abi.Context context
        MemoryInfo dst
        MemoryInfo src

    cdef cppclass BatchSide:
        const uint64_t* values
        uint64_t base
        cbool bounded
        uint64_t nbytes

    cdef cppclass PerEntry[T]:
        const T* values
        cbool one

    AddressesResult add_addresses(
        CxxOperation*, const BatchSide& dsts, const BatchSide& srcs, PerEntry[uint64_t] sizes,
        PerEntry[uint32_t] attributes, size_t first, size_t n, int device, uint64_t until_ns)

    cdef enum class Claim(unsigned char):
        kHost
        kDevice
        kEither

    cdef cppclass Strided:
        size_t width, height, depth, pitch, slice

    cdef cppclass PlainBatch:
        cppclass Pair:
            uint64_t dst, src
            size_t nbytes
            Claim dst_claim, src_claim
            Strided dst_strided, src_strided
        PlainBatch()
        PlainBatch(CxxOperation*, size_t capacity, int device, abi.Context)
        size_t add(const Pair*, size_t n)
        int device()
        abi.Context context()

    cbool as_claimed(const BatchSide&, Claim, const MemoryInfo&, int device, abi.Context)

    cdef enum class Overlap:
        kNone
        kSome
        kUnknown
    Overlap find_overlap(const CxxOperation&, cbool may_take_long)


cdef extern from "admission.h" namespace "aiocuda" nogil:
    int kResultCapturing
    abi.Result primary_context(int device, abi.Context*)
    abi.Result context_of(uint64_t stream, abi.Context fallback, abi.Context*)
    abi.Result device_of(abi.Context, int* device)
    uint64_t make_stream_key "aiocuda::stream_key"(uint64_t stream, abi.Context)
    void know_stream(CxxOperation*, uint64_t stream, abi.Context, cbool marked)
    int check_not_capturing(uint64_t stream, abi.Context)
    int mark_stream(uint64_t stream, abi.Context, cbool always, vector[Mark]*)
    abi.Result wait_for_marks(uint64_t stream, const vector[Mark]&)
    int enqueue_in_stream(uint64_t stream, abi.Context, CxxOperation*)
    void give_mark(const Mark&)


cdef extern from "inline_copy.h" namespace "aiocuda" nogil:
    cdef enum class Outcome "aiocuda::InlineLane::Outcome":
        kDeclined
        kDone
        kParked
        kFailed

    cdef cppclass Late "aiocuda::InlineLane::Late":
        Piece* piece
        Mark mark

    cdef cppclass Run "aiocuda::InlineLane::Run":
        Outcome outcome
        size_t late_count
        Late late[2]


cdef extern from "plain_copy.h" namespace "aiocuda" nogil:
    cdef cppclass PlainCopy:
        uint64_t on_device, on_host
        size_t nbytes
        cbool to_host
        uint64_t stream
        int device
        cbool inlined, marked
        uint64_t parks_until_ns
        MemoryInfo memory
        Run run
        uint64_t begin_ns, end_ns
        cbool beside_loading
    int begin_plain(PlainCopy*, CxxOperation*) except +


cdef extern from "clock.h" namespace "aiocuda" nogil:
    uint64_t now_ns()


cdef extern from "scatter.h" namespace "aiocuda" nogil:
    cdef enum class ScatterState "aiocuda::Scatter::State":
        kIdle
        kLoading
        kReady
        kAbsent

    cdef cppclass Scatter:
        ScatterState state()
        uint64_t launches()
        unsigned blocks()


cdef extern from "engine.h" namespace "aiocuda" nogil:
    cdef cppclass Planned "aiocuda::Engine::Planned":
        cbool by_kernel
        cbool bundled
        size_t piece_nbytes

    const int kMostDevices "aiocuda::Engine::kMostDevices"

    cdef cppclass Engine:
        @staticmethod
        Engine* of_device(int) except +

        @staticmethod
        vector[Engine*] all() except +
        void submit(CxxOperation*)
        void rouse()
        Planned plan(const Part&)
        Cancelled cancel(CxxOperation*)
        void give_back(Piece*, cbool lost)
        void wake()
        int device()
        size_t nbytes_held()
        Scatter& scatter()
        cbool avoids_copy_engine()
        void trim(size_t)
        cbool stop(uint64_t)
