// Writes the logits of every token of a text with llama.cpp, for bench/fidelity/llama.py.
//
//     llama-logits MODEL.gguf TYPE FLASH THREADS < tokens > logits
//
// TYPE: f32, f16, q8_0 or q4_0, of keys and values. FLASH: 1 for flash attention, which quantized
// values need, else 0. tokens: 32-bit integers. logits: [tokens, vocabulary] in float32.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "llama.h"

static const int PASS = 256;  // tokens of a forward pass

static void fail(const char *what) {
    std::fprintf(stderr, "llama-logits: %s\n", what);
    std::exit(1);
}

static void log_errors(ggml_log_level level, const char *text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

static std::vector<llama_token> read_tokens() {
    std::vector<llama_token> tokens;
    int32_t token;
    while (std::fread(&token, sizeof token, 1, stdin) == 1) tokens.push_back(token);
    if (tokens.empty()) fail("no tokens");
    return tokens;
}

static llama_context *make_context(llama_model *model, char **argv, int tokens) {
    const std::map<std::string, ggml_type> types = {
        {"f32", GGML_TYPE_F32}, {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}};
    const auto type = types.find(argv[2]);
    if (type == types.end()) fail("the type is f32, f16, q8_0 or q4_0");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = (tokens + PASS - 1) / PASS * PASS;
    params.n_batch = params.n_ubatch = PASS;
    params.n_threads = params.n_threads_batch = std::atoi(argv[4]);
    params.type_k = params.type_v = type->second;
    params.flash_attn_type =
        std::strcmp(argv[3], "1") ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_context *context = llama_init_from_model(model, params);
    if (!context) fail("no context");
    return context;
}

int main(int argc, char **argv) {
    if (argc != 5) fail("MODEL TYPE FLASH THREADS");
    llama_log_set(log_errors, nullptr);
    llama_backend_init();
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) fail("no model");
    const std::vector<llama_token> tokens = read_tokens();
    const int count = static_cast<int>(tokens.size());
    llama_context *context = make_context(model, argv, count);
    const size_t vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(PASS, 0, 1);
    for (int start = 0; start < count; start += PASS) {
        batch.n_tokens = count - start < PASS ? count - start : PASS;
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = tokens[start + i];
            batch.pos[i] = start + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch)) fail("a pass failed");
        for (int i = 0; i < batch.n_tokens; i++) {
            const float *row = llama_get_logits_ith(context, i);
            if (!row || std::fwrite(row, sizeof *row, vocabulary, stdout) != vocabulary) fail("no logits written");
        }
    }
    return std::fflush(stdout) ? 1 : 0;
}
