/* PROMPT input becomes text with the chat template around it, ChatML as Qwen2.5 uses it, or what
 * rkllm_set_chat_template put in its place. TOKEN input never comes here. */
#include "rksim.h"

#include <string.h>

static const char DEFAULT_SYSTEM[] = "You are a helpful assistant.";

static void render_tools(const struct handle *h, struct text *out) {
    text_say(out, "\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
                  "\n\nYou are provided with function signatures within <tools></tools> XML tags:"
                  "\n<tools>\n%s\n</tools>\n\nFor each function call, return a json object with"
                  " function name and arguments within <tool_call></tool_call> XML tags:\n"
                  "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"
                  "</tool_call>", h->tools);
}

static void render_system(const struct handle *h, struct text *out) {
    const char *words = h->tools_system && *h->tools_system ? h->tools_system : DEFAULT_SYSTEM;
    text_say(out, "<|im_start|>system\n%s", words);
    if (h->tools && *h->tools) render_tools(h, out);
    text_say(out, "<|im_end|>\n");
}

static void render_default(const struct handle *h, const struct kv *past, const RKLLMInput *input,
                           struct text *out) {
    const char *prompt = input->prompt_input;
    if (past->n == 0) {
        render_system(h, out);
    } else if (past->ids[past->n - 1] != h->model.newline) {
        /* The last reply is in the context without its EOS: close that turn first. */
        text_say(out, is_eos(&h->model, past->ids[past->n - 1]) ? "\n" : "<|im_end|>\n");
    }
    if (input->role && strcmp(input->role, "tool") == 0) {
        const char *tag = h->tools_tag && *h->tools_tag ? h->tools_tag : "tool_response";
        text_say(out, "<|im_start|>user\n<%s>\n%s\n</%s><|im_end|>\n", tag, prompt, tag);
    } else {
        text_say(out, "<|im_start|>user\n%s%s<|im_end|>\n", prompt,
                 input->enable_thinking ? " /think" : "");
    }
    text_say(out, "<|im_start|>assistant\n");
}

void prompt_render(const struct handle *h, const struct kv *past, const RKLLMInput *input,
                   bool resumed, struct text *out) {
    if (resumed && !h->settings.resume_with_template) {
        text_say(out, "%s", input->prompt_input);
    } else if (h->prompt_prefix) {
        text_say(out, "%s%s%s%s", past->n == 0 ? h->system_prompt : "", h->prompt_prefix,
                 input->prompt_input, h->prompt_postfix);
    } else {
        render_default(h, past, input, out);
    }
}

/* How much of the context is the system turn, which clear_kv_cache can be told to keep. */
uint32_t system_part(const struct model *model, const struct kv *kv) {
    struct text role = {0};
    if (kv->n < 2 || kv->ids[0] != model->header->im_start) return 0;
    detokenize(model, kv->ids + 1, 1, &role);
    bool system = role.n > 0 && strncmp(role.at, "system", role.n) == 0;
    text_free(&role);
    for (uint32_t at = 1; system && at < kv->n; at++)
        if (is_eos(model, kv->ids[at]))
            return at + 1 < kv->n && kv->ids[at + 1] == model->newline ? at + 2 : at + 1;
    return 0;
}
