// A whole step in one call: embedding, layers between hyper-connected streams, head; and the NextN draft, which is one
// more layer behind a mixing of its two inputs.
//
//   streams [rows, N, D] = the embedding of each token, N times
//   for each layer: streams = expand(attention(collapse(streams))), then the same with the experts
//   logits [n_wanted, vocab] = lm_head(head_collapse(streams of the wanted rows))
//
// The rule that keeps bits fixed: every row is computed by itself, and what leaves a step is rounded to streams_dtype.
#include <algorithm>

#include "activations.h"
#include "attention.h"
#include "check.h"
#include "experts.h"
#include "hyper_connections.h"
#include "kernels.h"
#include "linear.h"
#include "norm.h"
#include "parallel.h"
#include "scratch.h"
#include "status.h"

namespace kernels {
namespace {

// One row of the embedding as fp32.
void embed(const Network& network, int64_t token, float* out) {
    const auto* const table = static_cast<const uint8_t*>(network.embedding);
    const int64_t nbytes = network.hidden * dtype_nbytes(network.embedding_dtype);
    from_dtype(table + token * nbytes, network.hidden, network.embedding_dtype, out);
}

// The streams of a step and what a sublayer makes of them.
struct Activations {
    const Step& step;
    Scratch& scratch;
    float *streams, *next;      // [rows, N, D]
    float *x, *out;             // [rows, D]
    float *post, *comb;         // [rows, N], [rows, N, N]

    Activations(const Network& network, const Step& of, Scratch& from)
        : step(of), scratch(from), streams(from.floats(int64_t{of.rows} * network.streams * network.hidden)),
          next(from.floats(int64_t{of.rows} * network.streams * network.hidden)),
          x(from.floats(int64_t{of.rows} * network.hidden)), out(from.floats(int64_t{of.rows} * network.hidden)),
          post(from.floats(int64_t{of.rows} * network.streams)),
          comb(from.floats(int64_t{of.rows} * network.streams * network.streams)) {}

    // Runs a sublayer (x -> out) between the collapse and the expansion of its site.
    template <class F>
    void through(const HyperConnection& site, F sublayer) {
        collapse(site, streams, step.rows, x, post, comb, step.threads, scratch);
        sublayer();
        expand(site, out, streams, post, comb, step.rows, next, step.threads);
        std::swap(streams, next);
    }
};

void run_layer(const Network& network, const Layer& layer, Activations& rows) {
    const Step& step = rows.step;
    rows.through(layer.hc_attn, [&] {
        attention(layer.attention, network.main, network.compress, step, rows.x, rows.out, rows.scratch);
    });
    rows.through(layer.hc_ffn, [&] {
        experts(layer.experts, step.token, rows.x, step.rows, rows.out, step.threads, rows.scratch);
    });
}

// Logits of the wanted rows (may be null), every row's streams in their dtype, and its input of the head (may be null).
void write_output(const Network& network, const HyperConnection& head, const Activations& rows, float* logits,
                  void* streams, float* hidden) {
    const Step& step = rows.step;
    const int64_t width = int64_t{network.streams} * network.hidden;
    if (streams) to_dtype(rows.streams, step.rows * width, network.streams_dtype, streams);
    if (hidden) head_collapse(head, rows.streams, step.rows, hidden, step.threads, rows.scratch);
    if (!logits || !step.n_wanted) return;
    const Scratch::Frame frame(rows.scratch);
    float* const wanted = rows.scratch.floats(step.n_wanted * width);
    float* const x = rows.scratch.floats(int64_t{step.n_wanted} * network.hidden);
    for (int64_t i = 0; i < step.n_wanted; i++)
        std::copy_n(rows.streams + step.wanted[i] * width, width, wanted + i * width);
    head_collapse(head, wanted, step.n_wanted, x, step.threads, rows.scratch);
    linear(network.lm_head, x, network.hidden, step.n_wanted, logits, network.vocab, step.threads);
}

// streams = e_proj(norm(embedding of the next token)) on every stream + h_proj(norm(streams before)), normed by stream.
void mix_inputs(const Network& network, const Draft& draft, const void* before, Activations& rows) {
    const Scratch::Frame frame(rows.scratch);
    const Step& step = rows.step;
    const int64_t hidden = network.hidden, n = network.streams, n_streams = step.rows * n;
    float* const normed = rows.scratch.floats(n_streams * hidden);
    from_dtype(before, n_streams * hidden, network.streams_dtype, normed);
    for (int64_t i = 0; i < n_streams; i++)
        rms_norm(normed + i * hidden, draft.h_norm, hidden, draft.norm_eps, normed + i * hidden);
    for (int64_t r = 0; r < step.rows; r++) {
        embed(network, step.token[r], rows.x + r * hidden);
        rms_norm(rows.x + r * hidden, draft.e_norm, hidden, draft.norm_eps, rows.x + r * hidden);
    }
    if (draft.h_proj.quantized_input) quantize_rows(normed, n_streams, hidden, normed, step.threads);
    if (draft.e_proj.quantized_input) quantize_rows(rows.x, step.rows, hidden, rows.x, step.threads);
    linear(draft.h_proj, normed, hidden, n_streams, rows.streams, hidden, step.threads);
    linear(draft.e_proj, rows.x, hidden, step.rows, rows.out, hidden, step.threads);
    for (int64_t i = 0; i < n_streams; i++)
        for (int64_t d = 0; d < hidden; d++)
            rows.streams[i * hidden + d] = rows.out[i / n * hidden + d] + rows.streams[i * hidden + d];
}

// Checks the step, then computes with its rows.
template <class F>
int32_t run(const Network& network, const Layer* layers, int64_t n_layers, const Step& step, int64_t* detail,
            F compute) {
    *detail = -1;
    return guarded([&] {
        const Status status = check_step(network, layers, n_layers, step, detail);
        if (status != OK || !step.rows) return status;
        const Borrowed scratch;
        const Scratch::Frame frame(*scratch);
        Activations rows(network, step, *scratch);
        compute(rows);
        return OK;
    });
}

}  // namespace
}  // namespace kernels

using namespace kernels;

int32_t kernels_forward(const Network* network, const Step* step, float* logits, void* streams, float* hidden,
                        int64_t* detail) {
    return run(*network, network->layers, network->n_layers, *step, detail, [&](Activations& rows) {
        const int64_t width = network->hidden, n = network->streams;
        for (int64_t i = 0; i < step->rows * n; i++) embed(*network, step->token[i / n], rows.streams + i * width);
        for (int64_t i = 0; i < network->n_layers; i++) run_layer(*network, network->layers[i], rows);
        write_output(*network, network->head, rows, logits, streams, hidden);
    });
}

int32_t kernels_logits(const Network* network, const float* hidden, int32_t rows, float* logits, int32_t threads) {
    return guarded([&] {
        linear(network->lm_head, hidden, network->hidden, rows, logits, network->vocab, threads);
        return OK;
    });
}

int32_t kernels_draft(const Network* network, const Step* step, const void* before, float* logits, void* streams,
                      int64_t* detail) {
    *detail = -1;
    if (!network->draft) return NO_DRAFT;
    const Draft& draft = *network->draft;
    return run(*network, &draft.layer, 1, *step, detail, [&](Activations& rows) {
        mix_inputs(*network, draft, before, rows);
        run_layer(*network, draft.layer, rows);
        write_output(*network, draft.head, rows, logits, streams, nullptr);
    });
}

int32_t kernels_draft_window(const Network* network, const Step* step, const void* before, int64_t* detail) {
    *detail = -1;
    if (!network->draft) return NO_DRAFT;
    const Draft& draft = *network->draft;
    return run(*network, &draft.layer, 1, *step, detail, [&](Activations& rows) {
        mix_inputs(*network, draft, before, rows);
        collapse(draft.layer.hc_attn, rows.streams, step->rows, rows.x, rows.post, rows.comb, step->threads,
                 rows.scratch);
        write_window(draft.layer.attention, network->main, network->compress, *step, rows.x, rows.scratch);
    });
}
