/* edgelin.h: run a bundle of edgelin from C, C++ or any language that can call C.
 *
 *   edgelin_bundle *bundle = edgelin_load("bundles/demo", NULL);
 *   edgelin_stream *stream = edgelin_open(bundle, 1, NULL);
 *   edgelin_feed(stream, prompt, length, NULL, NULL);
 *   int64_t token = edgelin_choose(stream, 0, NULL);      (the likeliest next token)
 *
 * A function that can fail returns NULL, -1 or a value below 0, and edgelin_last_error() then tells
 * in one line what was given, what is allowed and what to do. So does one that is given a NULL bundle
 * or stream (or it returns 0). Strings are UTF-8, arrays are dense and
 * in row-major order. A bundle may be shared by threads; a stream is used by one thread at a time.
 * Streams keep their bundle alive, so that the two may be given back in any order.
 */
#ifndef EDGELIN_H
#define EDGELIN_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EDGELIN_API __declspec(dllexport)
#else
#define EDGELIN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct edgelin_bundle edgelin_bundle;
typedef struct edgelin_stream edgelin_stream;

/* How a bundle is opened; zeros are the defaults. */
typedef struct edgelin_options {
  const char *variant; /* NULL: the bundle's default one */
  int threads;         /* of onnxruntime; 0: as many as there are physical cores */
  /* The first load on a device replays golden.json and refuses a bundle that computes something
   * else there. It is the first load when this folder, which must be writable, holds no note of an
   * earlier one. NULL: every load is the first; "": none is. */
  const char *tested;
} edgelin_options;

/* How a token is chosen; zeros take the likeliest one. "A text" in runtimes/README.md has the order. */
typedef struct edgelin_sampling {
  double temperature;        /* divides the logits; 0: the likeliest token */
  int64_t top_k;             /* keeps the k likeliest; 0: all */
  double top_p;              /* keeps the fewest whose probabilities reach it; 0 or 1: all */
  double min_p;              /* keeps those at least so many times as likely as the likeliest */
  double repetition_penalty; /* makes the last 64 tokens less likely; 0 or 1: does nothing */
  uint64_t seed;             /* of the random numbers, which depend on it and the position alone */
} edgelin_sampling;

/* What went wrong last in this thread; "" if nothing did. Valid until the thread's next error. */
EDGELIN_API const char *edgelin_last_error(void);

/* Opens a bundle folder: checks its files, loads the graph, tests it; NULL on error. */
EDGELIN_API edgelin_bundle *edgelin_load(const char *folder, const edgelin_options *options);
EDGELIN_API void edgelin_unload(edgelin_bundle *bundle);

/* Text of edgelin.json; lives as long as the bundle. */
EDGELIN_API const char *edgelin_manifest(const edgelin_bundle *bundle);
/* Name of the variant that runs. */
EDGELIN_API const char *edgelin_variant(const edgelin_bundle *bundle);
/* Numbers of an answer: vocabulary, or outputs of a model of features. */
EDGELIN_API size_t edgelin_output_size(const edgelin_bundle *bundle);
/* Numbers of a step of a model of features; 0: the model reads token ids. */
EDGELIN_API size_t edgelin_feature_size(const edgelin_bundle *bundle);
/* 1 if this token ends a generation, which then stops before feeding it; else 0. */
EDGELIN_API int edgelin_is_end(const edgelin_bundle *bundle, int64_t token);

/* A stream of `rows` independent rows. It begins in the capsule of that name; NULL: in the bundle's
 * default one, if there is one; "none": before the first step. NULL on error. */
EDGELIN_API edgelin_stream *edgelin_open(edgelin_bundle *bundle, size_t rows, const char *capsule);
/* A second stream in the same state. */
EDGELIN_API edgelin_stream *edgelin_fork(const edgelin_stream *stream);
EDGELIN_API void edgelin_close(edgelin_stream *stream);
/* Goes back to where the stream began. 0, or -1 on error. */
EDGELIN_API int edgelin_reset(edgelin_stream *stream);

/* Reads token ids [rows, time], in calls of the bundle's chunk. If one fails, nothing changes; only
 * after a failed single step the stream may ask to be reset or loaded. 0, or -1 on error.
 *   lengths  [rows]: how many of the steps each row really has; NULL: all of them. Only where the
 *            manifest has `lengths`.
 *   all      [rows, time, output size], takes the answers after every step; NULL: not wanted. */
EDGELIN_API int edgelin_feed(edgelin_stream *stream, const int64_t *ids, size_t time,
                             const int64_t *lengths, float *all);
/* The same of features [rows, time, feature size]. */
EDGELIN_API int edgelin_feed_features(edgelin_stream *stream, const float *features, size_t time,
                                      const int64_t *lengths, float *all);

/* [rows, output size]: the answers after each row's last step, until the next call with this stream;
 * NULL before the first step. */
EDGELIN_API const float *edgelin_outputs(const edgelin_stream *stream);
/* Steps that a row has read. */
EDGELIN_API int64_t edgelin_position(const edgelin_stream *stream, size_t row);
/* The next token of a row, not yet fed; NULL takes the likeliest one. Below 0 on error. */
EDGELIN_API int64_t edgelin_choose(const edgelin_stream *stream, size_t row,
                                   const edgelin_sampling *sampling);
/* Bytes of the states now. */
EDGELIN_API size_t edgelin_state_bytes(const edgelin_stream *stream);

/* Writes a state file, which any runner goes on from; an older one stays whole until the new one is
 * complete. The rows must have read equally many steps. 0, or -1 on error. */
EDGELIN_API int edgelin_state_save(const edgelin_stream *stream, const char *path);
/* Goes to the state in a file: 0; 1 if another variant saved it, whose numbers may differ a little;
 * -1 on error, and then nothing has changed. */
EDGELIN_API int edgelin_state_load(edgelin_stream *stream, const char *path);

#ifdef __cplusplus
}
#endif

#endif /* EDGELIN_H */
