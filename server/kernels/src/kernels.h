// The C ABI of the CPU kernels: what Python hands over, and the functions that it calls. No torch, no Python headers.
//
// server/kernels/abi.py mirrors these structures field by field; `kernels_sizeof` lets it check that when it loads.
// Arithmetic is fp32. A row's result is one fixed chain of operations, whatever the other rows of the step are, so its
// bits depend neither on the batch, nor on how a prompt is cut into chunks, nor on the number of threads, nor on the
// vector width of the machine.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)  // everything else stays inside the library
extern "C" {

enum Dtype : int32_t { FP32 = 0, BF16 = 1 };

// How a checkpoint's file stores the numbers of a weight.
enum Encoding : int32_t { STORED_FP32 = 0, STORED_BF16 = 1, STORED_FP8 = 2, STORED_FP4 = 3 };

// A tensor [rows, columns] of a file that is mapped into memory, row by row. FP8 is e4m3; FP4 is e2m1, two in a byte, the
// low half first. `scale` is E8M0: one for 128 x 128 numbers of FP8, for 1 x 32 of FP4; null for the others.
struct StoredTensor {
    const uint8_t *data, *scale;
    int32_t rows, columns, encoding;
    int32_t rounds;      // 1: numbers are rounded to bf16, as the weight would be if it were loaded
    int32_t every_step;  // 1: every step reads it; 0: an expert's
    int32_t pad;
};

// Some rows of a StoredTensor (by its number), from a column on.
struct StoredPart {
    int32_t tensor, first_row, first_column, rows;
};

// A weight that stays in its file: parts of tensors, one below the other. `weights` is what kernels_weights made.
struct StoredMatrix {
    void* weights;
    const StoredPart* parts;
    int32_t n_parts, pad;
};

// A weight matrix [out, in]: in memory, packed by kernels_pack into panels of `panel` output columns, or `stored`.
struct Matrix {
    const void* data;
    const StoredMatrix* stored;  // null: `data` has it
    int32_t in, out, panel, dtype;
    int32_t quantized_input;  // 1: the checkpoint stores it in FP8 or FP4, and its reference quantizes what it multiplies
    int32_t pad;
};

// `groups` matrices [out, in]: packed each by itself, `stride` bytes apart, or `first.stored` and the ones behind it.
struct GroupedMatrix {
    Matrix first;
    int64_t stride;
    int32_t groups, pad;
};

// How a Pool stores a row, if it is neither FP32 nor BF16 (rows.h).
enum RowFormat : int32_t { FP8_KV = 16, MXFP4_INDEX = 17, FP8_INDEX = 18 };

// One layer of one component of the arena. Row r of item i lies at data + i * item_stride + r * row_stride (bytes).
struct Pool {
    uint8_t* data;
    int64_t item_stride, row_stride;
    int32_t rows, items;   // rows of an item: the ring of a slot, the entries of a page
    int32_t width, dtype;  // channels of one row of this layer; a Dtype or a RowFormat
    int32_t tail, pad;     // the last channels, which FP8_KV keeps in bf16
};

// cos and sin [positions, rope_dim / 2, 2] in fp32, in blocks of `block` positions, as many as the step reaches.
struct RopeTable {
    const float* const* blocks;
    int32_t n_blocks, block;
};

// One mHC site. fn [(2 + N) N, N D], base [(2 + N) N], scale [3]; `norm` [D] is the norm of the sublayer behind it.
// The head's collapse uses the same structure with fn [N, N D], base [N], scale [1] and the final norm.
struct HyperConnection {
    Matrix fn;
    const float *base, *scale, *norm;
    int32_t streams, hidden, iterations, pad;
    float hc_eps, norm_eps;
};

// What a row is rounded to when it is made, as the reference does: nothing; fp8 without the rotated channels; its
// Hadamard transform in fp4.
enum Simulation : int32_t { AS_COMPUTED = 0, AS_KV_ROW = 1, AS_INDEX_ROW = 2 };

// One compressor. `columns`: where its wkv starts in the output of Attention::state_proj; wgate follows.
// For ratio 4 (CSA) there are two halves A and B, rows [2 width] each = [kv | score]; else only A is used.
struct Compressor {
    Pool state_a, state_b, entries;
    const float *ape, *norm;  // [ratio, coff width], [width]
    int32_t ratio, width, columns;
    int32_t simulation;  // of its entries
    float norm_eps, pad;
};

struct Attention {
    Matrix in_proj;       // rows: wq_a [q_rank], wkv [head_dim]
    Matrix index_proj;    // rows: weights_proj [index_heads] in CSA layers; out = 0: none
    Matrix state_proj;    // rows: wkv, wgate of the compressor, then of the indexer's compressor (fp32); out = 0: none
    Matrix q_proj;        // rows: wq_b [heads head_dim], then the indexer's wq_b [index_heads index_dim]
    GroupedMatrix wo_a;   // each group [o_rank, heads head_dim / groups]
    GroupedMatrix wo_b;   // each group [D, o_rank]: its columns of wo_b; partial sums are added in a binary tree
    const float *q_norm, *kv_norm, *sink;
    Pool swa;
    Compressor compressor, indexer;  // ratio 0: none
    int32_t ratio, heads, head_dim, rope_dim, q_rank, window, index_heads, index_dim, index_topk, uses_compress_rope;
    int32_t kv_simulation, query_simulation;  // of the window's rows, and of the indexer's queries
    float norm_eps, pad;
};

// up: w1 over w3 [2 inner, D]; down: w2 [D, inner]. Both arrays hold `experts` routed ones and then the shared one.
struct Experts {
    Matrix gate;
    const Matrix *up, *down;
    const float* bias;         // [experts], null in hash layers
    const int64_t* by_token;   // [vocab, top_k], null in the others
    int32_t experts, top_k, inner, hidden;
    float scale, limit;        // a limit of 0 means none
};

struct Layer {
    HyperConnection hc_attn, hc_ffn;
    Attention attention;
    Experts experts;
};

struct Draft {
    const float *e_norm, *h_norm;
    Matrix e_proj, h_proj;
    Layer layer;
    HyperConnection head;
    float norm_eps, pad;
};

struct Network {
    const Layer* layers;
    const void* embedding;  // [vocab, D]
    HyperConnection head;
    Matrix lm_head;
    const Draft* draft;     // null: not loaded
    RopeTable main, compress;
    int32_t n_layers, vocab, hidden, streams;
    int32_t embedding_dtype, streams_dtype;  // streams_dtype: what streams have outside of a step
};

// The rows of one step, by segment (a run of one request's tokens). Row arrays [rows], segment arrays [segments].
struct Step {
    const int64_t *position, *segment, *token;
    const int64_t *slot, *start, *first_row, *valid_from;
    const int64_t* pages;    // [segments, max_pages]
    const int64_t* wanted;   // rows whose logits are wanted [n_wanted]
    int32_t rows, segments, max_pages, n_wanted, threads, pad;
};

// What a call returns: 0, or what is wrong. `detail` is the row at fault, -1 if there is none.
enum Status : int32_t {
    OK = 0, OUT_OF_MEMORY = 1, BAD_TOKEN = 2, BAD_POSITION = 3, BAD_SLOT = 4, BAD_PAGE = 5, BAD_SEGMENT = 6, NO_DRAFT = 7,
    INTERNAL = 8
};

int64_t kernels_sizeof(const char* structure);              // -1: unknown name
int64_t kernels_packed_nbytes(int32_t out, int32_t in, int32_t dtype);
void kernels_pack(const void* weight, int32_t out, int32_t in, int32_t dtype, void* packed, Matrix* made);

// logits [n_wanted, vocab] fp32 (may be null: none wanted), streams [rows, N, D] in streams_dtype, hidden [rows, D] fp32
// (may be null): what the head makes each row's logits of.
int32_t kernels_forward(const Network*, const Step*, float* logits, void* streams, float* hidden, int64_t* detail);
// The same logits [rows, vocab] as a forward's, of rows of its `hidden`.
int32_t kernels_logits(const Network*, const float* hidden, int32_t rows, float* logits, int32_t threads);
// Row t takes `before` [rows, N, D], the streams of position t, and Step::token, the token of t + 1.
int32_t kernels_draft(const Network*, const Step*, const void* before, float* logits, void* streams, int64_t* detail);
// Only the draft's window rows.
int32_t kernels_draft_window(const Network*, const Step*, const void* before, int64_t* detail);

}  // extern "C"
#pragma GCC visibility pop
