// The runner behind edgelin.h: reads the manifest, makes the states it lists, feeds, swaps the
// outputs in, samples, saves and loads. runtimes/README.md is the contract; no arithmetic of a
// model is here. Needs onnxruntime's C++ API and nlohmann/json, C++17 and a little-endian machine.

#include "edgelin.h"

#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;
using Shape = std::vector<int64_t>;

constexpr size_t kWindow = 64;  // tokens that the repetition penalty looks back
constexpr uintmax_t kHashLimit = uintmax_t{256} << 20;  // larger files are compared by size
constexpr uintmax_t kLargestHeader = uintmax_t{100} << 20;
constexpr int64_t kTestSteps = 5;
constexpr int kDeepest = 100;  // of JSON
constexpr uint32_t kApi = 17;  // of onnxruntime; all functions used here are at least as old

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void refuse(const std::string& message) { throw Error(message); }

std::string text_of(const fs::path& path) { return path.u8string(); }

// ------------------------------------------------------------------------------------- files

/// SHA-256 (FIPS 180-4), fed in pieces.
class Sha256 {
 public:
  void update(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    total_ += size;
    while (size > 0) {
      const size_t count = std::min(size, block_.size() - used_);
      std::memcpy(block_.data() + used_, bytes, count);
      used_ += count, bytes += count, size -= count;
      if (used_ == block_.size()) compress();
    }
  }

  void update(const std::string& text) { update(text.data(), text.size()); }

  std::string hex() {
    const uint64_t bits = total_ * 8;
    const unsigned char one = 0x80, zero = 0;
    update(&one, 1);
    while (used_ != 56) update(&zero, 1);
    for (int shift = 56; shift >= 0; shift -= 8) {
      const auto byte = static_cast<unsigned char>(bits >> shift);
      update(&byte, 1);
    }
    std::string text;
    for (const uint32_t word : state_)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
    return text;
  }

 private:
  static uint32_t rotated(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

  void compress() {
    static constexpr std::array<uint32_t, 64> k = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
        0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
        0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
        0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
        0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
        0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
        0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 16; ++i)
      w[i] = uint32_t{block_[4 * i]} << 24 | uint32_t{block_[4 * i + 1]} << 16 |
             uint32_t{block_[4 * i + 2]} << 8 | uint32_t{block_[4 * i + 3]};
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (rotated(a, 7) ^ rotated(a, 18) ^ (a >> 3)) +
             (rotated(b, 17) ^ rotated(b, 19) ^ (b >> 10));
    }
    std::array<uint32_t, 8> s = state_;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t e = rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25);
      const uint32_t a = rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22);
      const uint32_t one = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
      const uint32_t two = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      s = {one + two, s[0], s[1], s[2], s[3] + one, s[4], s[5], s[6]};
    }
    for (size_t i = 0; i < 8; ++i) state_[i] += s[i];
    used_ = 0;
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> block_{};
  size_t used_ = 0;
  uint64_t total_ = 0;
};

std::string sha256_of(const std::string& text) {
  Sha256 hash;
  hash.update(text);
  return hash.hex();
}

/// A whole file.
std::string read_file(const fs::path& path) {
  std::error_code none;
  if (fs::is_directory(path, none)) refuse(text_of(path) + " is a folder; give a file");
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse("there is no file " + text_of(path) + " that can be read");
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) refuse(text_of(path) + " cannot be read");
  return content;
}

/// Writes beside a file and renames, so that an older one stays whole until the new one is
/// complete.
void write_file(const fs::path& path, const std::string& content) {
  fs::path part = path;
  part += ".part";
  {
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    file.flush();
    if (!file) {
      std::error_code none;
      fs::remove(part, none);
      refuse(text_of(path) + " cannot be written; give a file in a folder that exists and has room");
    }
  }
  std::error_code error;
  fs::rename(part, path, error);
  if (!error) return;
  std::error_code none;
  fs::remove(part, none);
  refuse(text_of(path) + " cannot be written (" + error.message() + "); give a file");
}

/// Parsed JSON; nothing recursive is done with one that is nested deeply.
json parse_json(const std::string& text) {
  return json::parse(text, [](int depth, json::parse_event_t, const json&) {
    if (depth > kDeepest) refuse("it is nested too deeply");
    return true;
  });
}

/// Size, and the hash of a file that is not too large, as the manifest records them.
void check_file(const fs::path& path, const json& record) {
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  const std::string todo = "; take the original, or export again";
  if (error) refuse(text_of(path) + " is missing" + todo);
  if (size != record.at("bytes").get<uintmax_t>())
    refuse(text_of(path) + " has another size than in the manifest" + todo);
  if (size > kHashLimit) return;
  if (sha256_of(read_file(path)) != record.at("sha256").get<std::string>())
    refuse(text_of(path) + " differs from its sha256 in the manifest" + todo);
}

// ---------------------------------------------------------------------------------- manifest

/// A number as ECMAScript prints it, as RFC 8785 asks for.
std::string canonical_number(double value) {
  if (value == 0) return "0";
  char buffer[64];
  const bool plain = std::abs(value) >= 1e-6 && std::abs(value) < 1e21;
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr;
  std::string text(buffer, end);  // "1e-07": ECMAScript leaves the zero out
  const size_t at = text.find('e');
  if (at != std::string::npos && text[at + 2] == '0') text.erase(at + 2, 1);
  return text;
}

/// Order of UTF-16 code units of two UTF-8 strings: beyond the basic plane comes before U+E000.
bool utf16_less(const std::string& one, const std::string& two) {
  const auto [a, b] = std::mismatch(one.begin(), one.end(), two.begin(), two.end());
  if (a == one.end() || b == two.end()) return a == one.end() && b != two.end();
  const auto x = static_cast<unsigned char>(*a), y = static_cast<unsigned char>(*b);
  if ((x >= 0xF0) != (y >= 0xF0) && std::min(x, y) >= 0xEE) return x >= 0xF0;
  return x < y;
}

/// JSON in one spelling (RFC 8785).
std::string canonical_json(const json& value) {
  if (value.is_number_float()) return canonical_number(value.get<double>());
  if (!value.is_structured()) return value.dump();
  std::string text;
  if (value.is_array()) {
    for (const json& item : value) text += (text.empty() ? "" : ",") + canonical_json(item);
    return "[" + text + "]";
  }
  std::vector<std::string> keys;
  for (const auto& item : value.items()) keys.push_back(item.key());
  std::sort(keys.begin(), keys.end(), utf16_less);
  for (const std::string& key : keys)
    text += (text.empty() ? "" : ",") + json(key).dump() + ":" + canonical_json(value.at(key));
  return "{" + text + "}";
}

/// A state tensor of the manifest.
struct State {
  std::string name, input, output, kind;
  Shape shape;  // without batch; -1 on the axis that grows
  bool is_float = true;
  double initial = 0;

  bool grows() const { return std::find(shape.begin(), shape.end(), -1) != shape.end(); }

  /// Shape of so many rows after so many steps.
  Shape sized(int64_t rows, int64_t past) const {
    Shape found = {rows};
    for (const int64_t size : shape) found.push_back(size < 0 ? past : size);
    return found;
  }
};

/// What edgelin.json says, as far as a runner needs it.
struct Manifest {
  json content;
  std::string text, model_hash, input, output, keep, lengths;
  int64_t feature_size = 0, vocab_size = 0, output_size = 0, chunk = 1;
  std::vector<State> states;
  std::set<int64_t> ends;

  explicit Manifest(const fs::path& folder) {
    const fs::path path = folder / "edgelin.json";
    if (!fs::is_regular_file(path))
      refuse(text_of(folder) +
             " is no bundle: it has no edgelin.json; give a folder written by "
             "`edgelin export`");
    text = read_file(path);
    try {
      content = parse_json(text);
      read(text_of(path));
    } catch (const json::exception& error) {
      refuse(text_of(path) + " is not a valid manifest: " + error.what() + "; export again");
    }
  }

  /// The part that the graph carries too.
  json io_part() const {
    json part = {{"format", 1}};
    for (const char* key :
         {"input", "output", "num_logits_to_keep", "max_time", "states", "profile"})
      part[key] = content.at(key);
    if (!lengths.empty()) part["lengths"] = lengths;
    return part;
  }

 private:
  void read(const std::string& where) {
    if (content.value("format", json()) != 1)
      refuse(where + " has another format than 1; export again, or take a newer runner");
    json rest = content;
    rest.erase("digest");
    if (content.value("digest", "") != sha256_of(canonical_json(rest)))
      refuse(where + " was changed after export: its digest differs; take the original");
    content.at("model_hash").get_to(model_hash);
    const json& source = content.at("input");
    const json& answer = content.at("output");
    source.at("name").get_to(input);
    answer.at("name").get_to(output);
    content.at("num_logits_to_keep").get_to(keep);
    if (content.contains("lengths")) content.at("lengths").get_to(lengths);
    content.at("chunk").get_to(chunk);
    if (source.at("kind") == "features") {
      source.at("feature_size").get_to(feature_size);
      answer.at("size").get_to(output_size);
    } else {
      source.at("vocab_size").get_to(vocab_size);
      output_size = vocab_size;
      const json& tokenizer = content.at("tokenizer");
      ends.insert(tokenizer.at("eos_token_id").get<int64_t>());
      for (const json& id : tokenizer.value("eos_token_ids", json::array()))
        ends.insert(id.get<int64_t>());
    }
    const json limit = content.at("max_time");
    const bool fits = limit.is_null() || chunk <= limit.get<int64_t>();
    if (chunk < 1 || !fits || output_size < 1 || feature_size < 0)
      refuse(where + " has a size or chunk that no runner could follow; export again");
    for (const json& entry : content.at("states")) states.push_back(read_state(entry, where));
  }

  static State read_state(const json& entry, const std::string& where) {
    State state;
    entry.at("name").get_to(state.name);
    entry.at("input").get_to(state.input);
    entry.at("output").get_to(state.output);
    entry.at("kind").get_to(state.kind);
    entry.at("initial").get_to(state.initial);
    const std::string dtype = entry.at("dtype");
    state.is_float = dtype == "float32";
    const json& shape = entry.at("shape");
    for (size_t i = 1; i < shape.size(); ++i)
      state.shape.push_back(shape[i] == "past" ? -1 : shape[i].get<int64_t>());
    const bool known = state.is_float || (dtype == "int64" && !state.grows());
    const auto bad = [](int64_t size) {
      return size < -1 || size == 0 || size > (int64_t{1} << 31);
    };
    if (!known || shape.at(0) != "batch" ||
        std::any_of(state.shape.begin(), state.shape.end(), bad))
      refuse(where + ": state " + state.name + " has a type or shape that no runner could follow");
    return state;
  }
};

/// A path that the manifest names, which must lie in the bundle.
fs::path inside(const fs::path& folder, const std::string& name) {
  const fs::path path = fs::u8path(name);
  const bool leaves = std::find(path.begin(), path.end(), "..") != path.end();
  if (path.is_absolute() || path.has_root_path() || leaves || name.find('\\') != std::string::npos)
    refuse("the manifest names " + name + ", which lies outside the bundle; export again");
  return folder / path;
}

// ----------------------------------------------------------------------------------- tensors

/// Float32 or int64 numbers in a shape.
struct Array {
  Shape shape;
  bool is_float = true;
  std::vector<int64_t> words;  // storage of both types, aligned for either

  size_t count() const {
    size_t product = 1;
    for (const int64_t size : shape) product *= static_cast<size_t>(size);
    return product;
  }
  size_t bytes() const { return count() * (is_float ? sizeof(float) : sizeof(int64_t)); }
  float* floats() { return reinterpret_cast<float*>(words.data()); }
  const float* floats() const { return reinterpret_cast<const float*>(words.data()); }

  void resize(Shape wanted) {
    shape = std::move(wanted);
    words.resize((bytes() + 7) / 8 + 1);  // never empty: onnxruntime takes no null
  }

  bool finite() const {
    return !is_float ||
           std::all_of(floats(), floats() + count(), [](float x) { return std::isfinite(x); });
  }

  /// As an argument of a call, which must not outlive this.
  Ort::Value value() {
    static const auto cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const auto type =
        is_float ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    return Ort::Value::CreateTensor(cpu, words.data(), bytes(), shape.data(), shape.size(), type);
  }
};

Array array_of(Shape shape, bool is_float, double initial = 0) {
  Array array;
  array.is_float = is_float;
  array.resize(std::move(shape));
  if (is_float)
    std::fill_n(array.floats(), array.count(), static_cast<float>(initial));
  else
    std::fill_n(array.words.data(), array.count(), static_cast<int64_t>(initial));
  return array;
}

// ------------------------------------------------------------------------------------ bundle

Ort::Env& environment() {
  // Official builds report usage unless this stands before their environment is made.
  static Ort::Env env = [] {
#if defined(_WIN32)
    if (std::getenv("ORT_DISABLE_TELEMETRY") == nullptr) _putenv_s("ORT_DISABLE_TELEMETRY", "1");
#else
    setenv("ORT_DISABLE_TELEMETRY", "1", 0);
#endif
    const OrtApi* api = OrtGetApiBase()->GetApi(kApi);
    if (api == nullptr) refuse("this onnxruntime is too old: take 1.25.1 or newer");
    Ort::InitApi(api);
    Ort::Env made(ORT_LOGGING_LEVEL_FATAL, "edgelin");
    made.DisableTelemetryEvents();
    return made;
  }();
  return env;
}

/// Whether a version such as "1.25.1" is older than another.
bool older(const std::string& one, const std::string& two) {
  std::array<int, 3> a{}, b{};
  std::sscanf(one.c_str(), "%d.%d.%d", &a[0], &a[1], &a[2]);
  std::sscanf(two.c_str(), "%d.%d.%d", &b[0], &b[1], &b[2]);
  return a < b;
}

struct Bundle {
  fs::path folder;
  Manifest manifest;
  std::string variant;
  Ort::Session session{nullptr};
  bool in_place = false;

  explicit Bundle(const fs::path& path) : folder(path), manifest(path) {}
};

/// State tensors of some rows in two sets that take turns as input and output of a call.
///
/// In place, both sets share the float32 arrays of fixed shape; int64 states always take turns:
/// many nodes read them, some after the new value is written.
class Buffers {
 public:
  Buffers(Bundle& bundle, int64_t rows, bool in_place) : bundle_(bundle), rows_(rows) {
    const Manifest& manifest = bundle.manifest;
    for (const State& state : manifest.states) {
      sets_[0].push_back(array_of(state.sized(rows, 0), state.is_float, state.initial));
      shared_.push_back(in_place && state.is_float && !state.grows());
      sets_[1].push_back(shared_.back() ? Array{} : sets_[0].back());
    }
    inputs_ = {manifest.input.c_str()};
    outputs_ = {manifest.output.c_str()};
    for (const State& state : manifest.states) {
      inputs_.push_back(state.input.c_str());
      outputs_.push_back(state.output.c_str());
    }
    inputs_.push_back(manifest.keep.c_str());
    if (!manifest.lengths.empty()) inputs_.push_back(manifest.lengths.c_str());
    keep_ = array_of({}, false);
    lengths_ = array_of({rows}, false);
  }

  size_t size() const { return sets_[0].size(); }
  Array& state(size_t i) { return of(turn_, i); }
  const Array& state(size_t i) const { return const_cast<Buffers*>(this)->of(turn_, i); }

  /// Feeds steps [rows, time, ...], time <= chunk; answers of the last step, or of all.
  const Array& run(Array& steps, const std::vector<int64_t>& lengths, bool all) {
    const Manifest& manifest = bundle_.manifest;
    const int64_t time = steps.shape[1];
    keep_.words[0] = all ? 0 : 1;
    std::copy(lengths.begin(), lengths.end(), lengths_.words.begin());
    answers_.resize({rows_, all ? time : 1, manifest.output_size});
    std::vector<Ort::Value> in, out;
    in.push_back(steps.value());
    out.push_back(answers_.value());
    for (size_t i = 0; i < size(); ++i) {
      Array &source = of(turn_, i), &target = of(1 - turn_, i);
      if (manifest.states[i].grows()) grow(manifest.states[i], source, target, time);
      in.push_back(source.value());
      out.push_back(target.value());
    }
    in.push_back(keep_.value());
    if (!manifest.lengths.empty()) in.push_back(lengths_.value());
    bundle_.session.Run(Ort::RunOptions{nullptr}, inputs_.data(), in.data(), in.size(),
                        outputs_.data(), out.data(), out.size());
    turn_ = 1 - turn_;
    return answers_;
  }

 private:
  Array& of(size_t turn, size_t i) { return sets_[shared_[i] ? 0 : turn][i]; }

  static void grow(const State& state, const Array& source, Array& target, int64_t time) {
    Shape shape = source.shape;
    for (size_t axis = 0; axis < state.shape.size(); ++axis)
      if (state.shape[axis] < 0) shape[axis + 1] += time;
    target.resize(std::move(shape));
  }

  Bundle& bundle_;
  int64_t rows_;
  std::array<std::vector<Array>, 2> sets_;
  std::vector<bool> shared_;
  std::vector<const char*> inputs_, outputs_;
  Array keep_, lengths_, answers_;
  size_t turn_ = 0;
};

/// What two calls from random states answer: all bits of the answers and states.
std::vector<std::vector<int64_t>> test_calls(Bundle& bundle, bool in_place) {
  const Manifest& manifest = bundle.manifest;
  std::mt19937 random(0);
  std::uniform_real_distribution<float> number(0, 1);
  Buffers buffers(bundle, 1, in_place);
  for (size_t i = 0; i < buffers.size(); ++i)
    if (Array& state = buffers.state(i); state.is_float)
      std::generate_n(state.floats(), state.count(), [&] { return number(random); });
  std::vector<std::vector<int64_t>> found;
  for (const int64_t time : {std::min(kTestSteps, manifest.chunk), int64_t{1}}) {
    const bool reals = manifest.feature_size > 0;
    Array steps = array_of(reals ? Shape{1, time, manifest.feature_size} : Shape{1, time}, reals);
    for (size_t i = 0; i < steps.count(); ++i)
      if (reals)
        steps.floats()[i] = number(random);
      else
        steps.words[i] =
            static_cast<int64_t>(random() % static_cast<uint32_t>(manifest.vocab_size));
    const Array& answers = buffers.run(steps, {time}, false);
    found.push_back(answers.words);
    found.back().resize(answers.bytes() / 8);  // behind them stands what nobody wrote
    for (size_t i = 0; i < buffers.size(); ++i) {
      found.push_back(buffers.state(i).words);
      found.back().resize(buffers.state(i).bytes() / 8);
    }
  }
  return found;
}

// -------------------------------------------------------------------------------- state files

/// Content of a state file.
struct Saved {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Array> tensors;
};

/// Bytes of one tensor of a safetensors file.
struct Stored {
  std::string dtype;
  Shape shape;
  const char* data = nullptr;
  size_t bytes = 0, count = 1;
};

float from_half(uint16_t half) {
  const int exponent = (half >> 10) & 31, fraction = half & 1023;
  const double sign = half & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : static_cast<float>(sign) * INFINITY;
  if (exponent == 0) return static_cast<float>(sign * std::ldexp(fraction, -24));
  return static_cast<float>(sign * std::ldexp(1024 + fraction, exponent - 25));
}

/// The tensors of a safetensors file, each checked to lie in it.
std::map<std::string, Stored> stored_tensors(const json& header, const char* data, size_t size) {
  static const std::map<std::string, size_t> widths = {
      {"F32", 4}, {"I64", 8}, {"F16", 2}, {"I8", 1}};
  std::map<std::string, Stored> found;
  size_t total = 0;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    Stored tensor;
    entry.at("dtype").get_to(tensor.dtype);
    entry.at("shape").get_to(tensor.shape);
    const auto offsets = entry.at("data_offsets").get<std::array<uint64_t, 2>>();
    if (!widths.count(tensor.dtype)) refuse("a tensor is " + tensor.dtype);
    for (const int64_t length : tensor.shape) {
      if (length < 0 || (length > 0 && tensor.count > size / static_cast<size_t>(length)))
        refuse("a shape is too large");
      tensor.count *= static_cast<size_t>(length);
    }
    tensor.bytes = tensor.count * widths.at(tensor.dtype);
    if (offsets[0] > offsets[1] || offsets[1] > size || offsets[1] - offsets[0] != tensor.bytes)
      refuse("a tensor lies outside the file");
    tensor.data = data + offsets[0];
    total += tensor.bytes;
    found[name] = tensor;
  }
  if (total != size) refuse("its length differs from its tensors'");
  return found;
}

/// A tensor as it steps: float32 or int64.
Array decoded(const std::string& name, const Stored& stored,
              const std::map<std::string, Stored>& all) {
  Array array = array_of(stored.shape, stored.dtype != "I64");
  const size_t count = stored.count;
  if (stored.dtype == "F32" || stored.dtype == "I64") {
    std::memcpy(array.words.data(), stored.data, stored.bytes);
  } else if (stored.dtype == "F16") {
    for (size_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, stored.data + 2 * i, 2);
      array.floats()[i] = from_half(half);
    }
  } else {
    const auto found = all.find(name + ".scale");
    Shape rows = stored.shape;
    if (!rows.empty()) rows.back() = 1;
    if (rows.empty() || found == all.end() || found->second.dtype != "F32" ||
        found->second.shape != rows)
      refuse("tensor " + name + " has no scales");
    const auto width = static_cast<size_t>(stored.shape.back());
    for (size_t i = 0; i < count; ++i) {
      float scale;
      std::memcpy(&scale, found->second.data + 4 * (i / width), 4);
      array.floats()[i] = static_cast<float>(static_cast<signed char>(stored.data[i])) * scale;
    }
  }
  return array;
}

/// sha256 of all metadata but itself, then of the tensors, both by name.
std::string content_hash(const std::map<std::string, std::string>& metadata,
                         const std::function<void(Sha256&)>& tensors) {
  Sha256 hash;
  for (const auto& [key, value] : metadata) {
    if (key == "sha256") continue;
    hash.update(key.c_str(), key.size() + 1);
    hash.update(value.c_str(), value.size() + 1);
  }
  tensors(hash);
  return hash.hex();
}

Saved parse_state(const std::string& content) {
  uint64_t length = 0;
  if (content.size() < 8) refuse("it is too short");
  std::memcpy(&length, content.data(), 8);
  if (length > kLargestHeader || length > content.size() - 8) refuse("its header is too long");
  const json header = parse_json(content.substr(8, length));
  Saved saved;
  saved.metadata = header.at("__metadata__").get<std::map<std::string, std::string>>();
  if (saved.metadata["edgelin_state"] != "1") refuse("its format is not 1");
  const auto all = stored_tensors(header, content.data() + 8 + length, content.size() - 8 - length);
  const std::string hash = content_hash(saved.metadata, [&](Sha256& total) {
    for (const auto& [name, tensor] : all) total.update(tensor.data, tensor.bytes);
  });
  if (saved.metadata["sha256"] != hash) refuse("its content differs from its hash");
  for (const auto& [name, tensor] : all) {
    const size_t at =
        name.size() > 6 && name.compare(name.size() - 6, 6, ".scale") == 0 ? name.size() - 6 : 0;
    const auto owner = at ? all.find(name.substr(0, at)) : all.end();
    if (owner != all.end() && owner->second.dtype == "I8") continue;  // read with its owner
    saved.tensors[name] = decoded(name, tensor, all);
  }
  return saved;
}

std::string state_text(Saved saved) {
  saved.metadata["sha256"] = content_hash(saved.metadata, [&](Sha256& total) {
    for (const auto& [name, tensor] : saved.tensors)
      total.update(tensor.words.data(), tensor.bytes());
  });
  json header = {{"__metadata__", saved.metadata}};
  std::string data;
  for (const bool floats : {false, true})  // int64 first, so that every tensor is aligned
    for (const auto& [name, tensor] : saved.tensors) {
      if (tensor.is_float != floats) continue;
      header[name] = {{"dtype", floats ? "F32" : "I64"},
                      {"shape", tensor.shape},
                      {"data_offsets", {data.size(), data.size() + tensor.bytes()}}};
      data.append(reinterpret_cast<const char*>(tensor.words.data()), tensor.bytes());
    }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
}

// ---------------------------------------------------------------------------------- sampling

/// The position-th output of splitmix64 started at seed, as a number in [0, 1).
double uniform(uint64_t seed, uint64_t position) {
  uint64_t z = seed + (position + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return std::ldexp(static_cast<double>((z ^ (z >> 31)) >> 11), -53);
}

void check(const edgelin_sampling& options) {
  const auto want = [](bool good, const char* what) {
    if (!good) refuse(std::string(what) + " is allowed");
  };
  const double largest = std::numeric_limits<double>::max();
  want(options.temperature >= 0 && options.temperature <= largest, "temperature: 0 or more");
  want(options.top_k >= 0, "top_k: 0 (all) or more");
  want(options.top_p >= 0 && options.top_p <= 1, "top_p: 0 (all) .. 1");
  want(options.min_p >= 0 && options.min_p <= 1, "min_p: 0 .. 1");
  want(options.repetition_penalty >= 0 && options.repetition_penalty <= largest,
       "repetition_penalty: 0 (off) or more");
}

/// Logits after the repetition penalty, divided by the temperature if there is one.
std::vector<double> scores_of(const float* logits, size_t size, const std::deque<int64_t>& recent,
                              const edgelin_sampling& options) {
  const double largest = std::numeric_limits<double>::max(), r = options.repetition_penalty;
  std::vector<double> scores(logits, logits + size);
  if (r != 0 && r != 1)
    for (const int64_t id : std::set<int64_t>(recent.begin(), recent.end())) {
      double& score = scores[static_cast<size_t>(id)];
      score = std::clamp(score > 0 ? score / r : score * r, -largest, largest);
    }
  if (options.temperature == 0) return scores;
  const double highest = *std::max_element(scores.begin(), scores.end());
  const auto scaled = [&](double shift) {
    std::vector<double> found;
    for (const double score : scores) found.push_back((score - shift) / options.temperature);
    return found;
  };
  std::vector<double> found = scaled(0);
  if (std::all_of(found.begin(), found.end(), [](double x) { return std::isfinite(x); }))
    return found;
  found = scaled(highest);
  for (double& score : found) score = std::clamp(score, -largest, largest);
  return found;
}

int64_t choose(const float* logits, size_t size, const std::deque<int64_t>& recent,
               uint64_t position, const edgelin_sampling& options) {
  check(options);
  const std::vector<double> scores = scores_of(logits, size, recent, options);
  if (options.temperature == 0)
    return std::max_element(scores.begin(), scores.end()) - scores.begin();
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  const size_t kept = options.top_k > 0 ? std::min(size, static_cast<size_t>(options.top_k)) : size;
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
      [&](size_t a, size_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
  std::vector<double> weights;
  for (size_t i = 0; i < kept; ++i)
    weights.push_back(std::exp(scores[order[i]] - scores[order[0]]));
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double top_p = options.top_p == 0 ? 1 : options.top_p;
  std::vector<double> cumulative;
  double total = 0;
  for (const double weight : weights) {
    const double probability = weight / sum;
    const bool enough = top_p < 1 && total >= top_p;
    if (!cumulative.empty() && (enough || probability < options.min_p * (weights[0] / sum))) break;
    cumulative.push_back(total += probability);
  }
  const double drawn = uniform(options.seed, position) * total;
  const auto at =
      std::upper_bound(cumulative.begin(), cumulative.end(), drawn) - cumulative.begin();
  return static_cast<int64_t>(order[std::min(static_cast<size_t>(at), cumulative.size() - 1)]);
}

// ------------------------------------------------------------------------------------ streams

/// How a stream stands; every row has its own position where calls had rows of different lengths.
struct Snapshot {
  std::vector<Array> states;
  std::vector<int64_t> positions;
  std::vector<std::deque<int64_t>> recent;
  std::vector<float> outputs;  // [rows, size]; empty before the first step
  std::string tail = R"({"pending": "", "held": ""})";
};

class Stream {
 public:
  Stream(std::shared_ptr<Bundle> bundle, size_t rows)
      : bundle_(std::move(bundle)),
        rows_(rows),
        buffers_(*bundle_, static_cast<int64_t>(rows), bundle_->in_place) {
    now_.positions.assign(rows, 0);
    now_.recent.resize(rows);
    begin_here();
  }

  /// Makes the place where the stream stands the one to which a reset leads.
  void begin_here() { start_ = snapshot(); }

  /// A second stream in the same state.
  std::unique_ptr<Stream> fork() const {
    auto other = std::make_unique<Stream>(bundle_, rows_);
    other->put(snapshot());
    other->start_ = start_;
    other->broken_ = broken_;
    return other;
  }

  void reset() {
    put(start_);
    broken_ = false;
  }

  /// Reads steps [rows, time, ...], given as int64 ids or float32 features.
  void feed(const void* steps, bool reals, size_t time, const int64_t* lengths, float* all) {
    check_steps(steps, reals, time, lengths);
    if (broken_) refuse("the last step failed and its state is lost; reset the stream or load one");
    const bool undone = time > 1 || !bundle_->in_place;  // one step in place is not copied first
    const Snapshot before = undone ? snapshot() : Snapshot{};
    try {
      advance(steps, reals, time, lengths, all);
    } catch (const std::exception& error) {
      if (undone) put(before);
      broken_ = !undone;
      refuse(std::string(error.what()) +
             (undone ? "" : "; the state is lost: reset the stream or load one"));
    }
  }

  const float* outputs() const { return now_.outputs.empty() ? nullptr : now_.outputs.data(); }
  int64_t position(size_t row) const { return now_.positions.at(row); }
  const Bundle& bundle() const { return *bundle_; }

  int64_t choose(size_t row, const edgelin_sampling& sampling) const {
    const Manifest& manifest = bundle_->manifest;
    if (manifest.feature_size > 0) refuse("this model reads features and writes no text");
    if (row >= rows_) refuse("the stream has " + std::to_string(rows_) + " rows, counted from 0");
    if (now_.positions[row] == 0) refuse("the row has read nothing; feed at least one token");
    const auto size = static_cast<size_t>(manifest.output_size);
    return ::choose(now_.outputs.data() + row * size, size, now_.recent[row],
                    static_cast<uint64_t>(now_.positions[row]), sampling);
  }

  size_t state_bytes() const {
    size_t total = 0;
    for (size_t i = 0; i < buffers_.size(); ++i) total += buffers_.state(i).bytes();
    return total;
  }

  Saved saved() const {
    const Manifest& manifest = bundle_->manifest;
    if (broken_) refuse("the last step failed and its state is lost; reset the stream or load one");
    for (const int64_t position : now_.positions)
      if (position != now_.positions[0] || position == 0)
        refuse("a state file takes rows that have read equally many steps, at least one");
    Saved found;
    found.metadata = {{"edgelin_state", "1"},
                      {"model_hash", manifest.model_hash},
                      {"variant", bundle_->variant},
                      {"position", std::to_string(now_.positions[0])}};
    if (manifest.feature_size == 0) {
      found.metadata["recent"] = json(now_.recent[0]).dump();
      found.metadata["text"] = now_.tail;
    }
    for (size_t i = 0; i < buffers_.size(); ++i)
      found.tensors[manifest.states[i].name] = buffers_.state(i);
    Array answers = array_of({static_cast<int64_t>(rows_), manifest.output_size}, true);
    std::copy(now_.outputs.begin(), now_.outputs.end(), answers.floats());
    found.tensors[manifest.output] = answers;
    for (const auto& [name, tensor] : found.tensors)
      if (!tensor.finite())
        refuse(name + " is not finite, so the stream cannot be saved; reset it");
    return found;
  }

  /// Goes to a saved stream of as many rows, or of one, which every row then continues.
  void restore(const Saved& saved) {
    const Manifest& manifest = bundle_->manifest;
    const auto word = [&](const char* key) {
      const auto found = saved.metadata.find(key);
      if (found == saved.metadata.end()) refuse(std::string("it has no ") + key);
      return found->second;
    };
    if (word("model_hash") != manifest.model_hash) refuse("it was saved by another model");
    const int64_t position = position_of(word("position"));
    if ((manifest.feature_size == 0) != (saved.metadata.count("text") > 0))
      refuse("it is not of this kind of input");
    Snapshot next;
    next.positions.assign(rows_, position);
    next.recent.resize(rows_);
    if (manifest.feature_size == 0) {
      std::fill(next.recent.begin(), next.recent.end(), recent_of(word("recent"), position));
      next.tail = word("text");
      const json tail = parse_json(next.tail);
      if (!tail.at("pending").is_string() || !tail.at("held").is_string())
        refuse("its text is odd");
    }
    for (const State& state : manifest.states) {
      next.states.push_back(tensor_of(saved, state.name, state.sized(1, position), state.is_float));
      const Array& found = next.states.back();
      if (state.kind == "position" &&
          std::any_of(found.words.begin(),
                      found.words.begin() + static_cast<int64_t>(found.count()),
                      [&](int64_t n) { return n != position; }))
        refuse("its positions disagree");
    }
    const Array answers = tensor_of(saved, manifest.output, {1, manifest.output_size}, true);
    next.outputs.assign(answers.floats(), answers.floats() + answers.count());
    if (saved.tensors.size() != manifest.states.size() + 1)
      refuse("it holds tensors that this model does not have");
    put(next);
    broken_ = false;
  }

 private:
  Snapshot snapshot() const {
    Snapshot found = now_;
    for (size_t i = 0; i < buffers_.size(); ++i) found.states.push_back(buffers_.state(i));
    return found;
  }

  void put(const Snapshot& snapshot) {
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_.state(i) = snapshot.states[i];
    now_ = snapshot;
    now_.states.clear();
  }

  /// A tensor of a state file for all rows; one row stands for each.
  Array tensor_of(const Saved& saved, const std::string& name, Shape shape, bool is_float) const {
    const auto found = saved.tensors.find(name);
    const std::string problem = "tensor " + name + " is missing, of another batch size or damaged";
    if (found == saved.tensors.end()) refuse(problem);
    const Array& one = found->second;
    const auto rows = static_cast<int64_t>(rows_);
    const bool single = one.shape == shape;
    shape[0] = rows;
    if ((!single && one.shape != shape) || one.is_float != is_float || !one.finite())
      refuse(problem);
    if (one.shape == shape) return one;
    Array all = array_of(shape, is_float);
    for (size_t row = 0; row < rows_; ++row)
      std::memcpy(reinterpret_cast<char*>(all.words.data()) + row * one.bytes(), one.words.data(),
                  one.bytes());
    return all;
  }

  static int64_t position_of(const std::string& text) {
    int64_t found = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
    if (error != std::errc() || end != text.data() + text.size() || found < 1 || text[0] == '0')
      refuse("its position is no number from 1 on");
    return found;
  }

  std::deque<int64_t> recent_of(const std::string& text, int64_t position) const {
    const json ids = parse_json(text);
    const auto good = [&](const json& id) {
      return id.is_number_integer() && id >= 0 && id < bundle_->manifest.vocab_size;
    };
    const int64_t wanted = std::min(position, static_cast<int64_t>(kWindow));
    if (!ids.is_array() || static_cast<int64_t>(ids.size()) != wanted ||
        !std::all_of(ids.begin(), ids.end(), good))
      refuse("its recent tokens are not the last " + std::to_string(wanted));
    return ids.get<std::deque<int64_t>>();
  }

  void check_steps(const void* steps, bool reals, size_t time, const int64_t* lengths) const {
    const Manifest& manifest = bundle_->manifest;
    if (reals != (manifest.feature_size > 0))
      refuse(reals ? "this model reads token ids, not features"
                   : "this model reads features, not token ids");
    if (steps == nullptr || time == 0) refuse("there is nothing to read; give at least one step");
    const size_t count = rows_ * time;
    if (reals) {
      const auto* numbers = static_cast<const float*>(steps);
      for (size_t i = 0; i < count * static_cast<size_t>(manifest.feature_size); ++i)
        if (!std::isfinite(numbers[i]))
          refuse("feature " + std::to_string(i) + " is not finite; leave its step out");
    } else {
      const auto* ids = static_cast<const int64_t*>(steps);
      for (size_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= manifest.vocab_size)
          refuse("token id " + std::to_string(ids[i]) + " is out of range; the model knows 0 .. " +
                 std::to_string(manifest.vocab_size - 1));
    }
    if (lengths == nullptr) return;
    if (manifest.lengths.empty()) refuse("this bundle takes no lengths; export it with --streams");
    for (size_t row = 0; row < rows_; ++row)
      if (lengths[row] < 0 || lengths[row] > static_cast<int64_t>(time))
        refuse("a length is " + std::to_string(lengths[row]) + "; 0 .. " + std::to_string(time) +
               " is allowed");
  }

  /// Runs the graph over checked steps, a chunk a call.
  void advance(const void* steps, bool reals, size_t time, const int64_t* lengths, float* all) {
    const Manifest& manifest = bundle_->manifest;
    const auto chunk = static_cast<size_t>(manifest.chunk),
               size = static_cast<size_t>(manifest.output_size);
    const size_t width = reals ? static_cast<size_t>(manifest.feature_size) : 1,
                 item = reals ? sizeof(float) : sizeof(int64_t);
    const auto rows = static_cast<int64_t>(rows_);
    for (size_t start = 0; start < time; start += chunk) {
      const size_t count = std::min(chunk, time - start);
      Shape shape = {rows, static_cast<int64_t>(count)};
      if (reals) shape.push_back(manifest.feature_size);
      Array piece = array_of(std::move(shape), reals);
      std::vector<int64_t> read(rows_, static_cast<int64_t>(count));
      for (size_t row = 0; row < rows_; ++row) {
        std::memcpy(reinterpret_cast<char*>(piece.words.data()) + row * count * width * item,
                    static_cast<const char*>(steps) + (row * time + start) * width * item,
                    count * width * item);
        if (lengths != nullptr)
          read[row] = std::clamp(lengths[row] - static_cast<int64_t>(start), int64_t{0}, read[row]);
      }
      const Array& answers = buffers_.run(piece, read, all != nullptr);
      const size_t kept = all != nullptr ? count : 1;
      now_.outputs.resize(rows_ * size);
      for (size_t row = 0; row < rows_; ++row) {
        const float* answer = answers.floats() + row * kept * size;
        if (all != nullptr) std::copy_n(answer, kept * size, all + (row * time + start) * size);
        if (read[row] > 0)
          note(row, answer + (all != nullptr ? static_cast<size_t>(read[row] - 1) * size : 0),
               piece, read[row]);
      }
    }
  }

  /// What the stream knows of a row after a call that read so many of its steps.
  void note(size_t row, const float* answer, const Array& piece, int64_t read) {
    const auto size = static_cast<size_t>(bundle_->manifest.output_size);
    if (!std::all_of(answer, answer + size, [](float x) { return std::isfinite(x); }))
      refuse("the model's outputs are not finite after position " +
             std::to_string(now_.positions[row]) +
             ": the inputs are too large, or its states or weights are damaged");
    std::copy_n(answer, size, now_.outputs.data() + row * size);
    now_.positions[row] += read;
    if (piece.is_float) return;
    const int64_t* ids = piece.words.data() + static_cast<int64_t>(row) * piece.shape[1];
    auto& recent = now_.recent[row];
    recent.insert(recent.end(), ids, ids + read);
    if (recent.size() > kWindow) recent.erase(recent.begin(), recent.end() - kWindow);
  }

  std::shared_ptr<Bundle> bundle_;
  size_t rows_;
  Buffers buffers_;
  Snapshot now_, start_;  // now_ without states: those are in the buffers
  bool broken_ = false;
};

Saved read_state(const fs::path& path) {
  const std::string content = read_file(path);
  try {
    return parse_state(content);
  } catch (const std::exception& error) {
    refuse(text_of(path) + " is damaged or no state file: " + error.what() + "; save it again");
  }
}

void restore(Stream& stream, const Saved& saved, const fs::path& path) {
  try {
    stream.restore(saved);
  } catch (const std::exception& error) {
    refuse(text_of(path) + " does not fit: " + error.what());
  }
}

// ------------------------------------------------------------------------------------ loading

/// Replays golden.json: the answers and states of the exporter's float64 model, within tolerance.
void replay_golden(const std::shared_ptr<Bundle>& bundle) {
  const Manifest& manifest = bundle->manifest;
  const json golden = parse_json(read_file(bundle->folder / "golden.json"));
  const json& tolerance = golden.at("tolerance").at(bundle->variant);
  const auto fail = [&](const std::string& what) {
    refuse(text_of(bundle->folder) +
           " computes something else on this machine than where it was exported (" + what +
           "): take another variant, or another onnxruntime");
  };
  Stream stream(bundle, 1);
  for (const json& piece : golden.at("pieces")) {
    if (manifest.feature_size > 0) {
      std::vector<float> steps;
      for (const json& step : piece.at("features"))
        for (const json& number : step) steps.push_back(number.get<float>());
      stream.feed(steps.data(), true, piece.at("features").size(), nullptr, nullptr);
    } else {
      const auto ids = piece.at("ids").get<std::vector<int64_t>>();
      stream.feed(ids.data(), false, ids.size(), nullptr, nullptr);
    }
    const auto top = piece.at("top").at("ids").get<std::vector<size_t>>();
    const auto wanted = piece.at("top").at("logits").get<std::vector<double>>();
    for (size_t i = 0; i < top.size(); ++i) {
      if (top[i] >= static_cast<size_t>(manifest.output_size)) refuse("an id is out of range");
      if (!(std::abs(stream.outputs()[top[i]] - wanted.at(i)) <=
            tolerance.at("logits").get<double>()))
        fail(manifest.output);
    }
  }
  const Saved saved = stream.saved();
  for (const auto& [name, wanted] : golden.at("states").items()) {
    const Array& state = saved.tensors.at(name);
    const double room =
        state.is_float ? tolerance.at("states").get<double>() * wanted.at("max_abs").get<double>()
                       : 0;
    for (const json& sample : wanted.at("samples")) {
      const auto at = sample.at(0).get<size_t>();
      if (at >= state.count()) refuse("a sample of state " + name + " is out of range");
      const double found =
          state.is_float ? state.floats()[at] : static_cast<double>(state.words[at]);
      if (!(std::abs(found - sample.at(1).get<double>()) <= room)) fail("state " + name);
    }
  }
}

/// Replays golden.json on the first load of a bundle and variant with this onnxruntime.
void test_device(const std::shared_ptr<Bundle>& bundle, const char* folder) {
  if (folder != nullptr && *folder == 0) return;
  const auto replay = [&] {
    try {
      replay_golden(bundle);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {  // a key is missing, or of another type
      refuse("golden.json of " + text_of(bundle->folder) + " cannot be replayed: " + error.what() +
             "; export again");
    }
  };
  if (folder == nullptr) return replay();
  const std::string what = bundle->manifest.content.at("digest").get<std::string>() +
                           bundle->variant + OrtGetApiBase()->GetVersionString();
  const fs::path note = fs::u8path(folder) / ("edgelin-" + sha256_of(what) + ".tested");
  if (fs::exists(note)) return;
  replay();
  write_file(note, "");
}

std::shared_ptr<Bundle> load(const char* folder, const edgelin_options& options) {
  if (folder == nullptr) refuse("no bundle folder was given");
  const int most = 8 * static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (options.threads < 0 || options.threads > most)
    refuse("threads is " + std::to_string(options.threads) + "; allowed: 0 (as many as there are " +
           "physical cores) .. " + std::to_string(most));
  auto bundle = std::make_shared<Bundle>(fs::u8path(folder));
  const json& content = bundle->manifest.content;
  bundle->variant = options.variant != nullptr ? options.variant
                                               : content.at("default_variant").get<std::string>();
  const json& variants = content.at("variants");
  if (!variants.contains(bundle->variant)) {
    std::string have;
    for (const auto& item : variants.items()) have += (have.empty() ? "" : ", ") + item.key();
    refuse("the bundle has no variant " + bundle->variant + "; it has: " + have);
  }
  const json& variant = variants.at(bundle->variant);
  const std::string wanted = content.at("min_onnxruntime"),
                    have = OrtGetApiBase()->GetVersionString();
  if (older(have, wanted))
    refuse(text_of(bundle->folder) + " needs onnxruntime >= " + wanted + ", this is " + have);
  for (const json* files : {&content.at("files"), &variant.at("files")})
    for (const auto& [name, record] : files->items())
      check_file(inside(bundle->folder, name), record);
  Ort::Env& env = environment();
  Ort::SessionOptions session;
  session.SetIntraOpNumThreads(options.threads);
  session.SetInterOpNumThreads(1);
  session.SetLogSeverityLevel(4);
  session.AddConfigEntry("session.force_spinning_stop", "1");  // no core burns between calls
  // Rounded weights in standard operators become float ones at once, not again at every step.
  session.AddConfigEntry("session.disable_quant_qdq", "1");
  const std::string file = variant.at("file");
  if (!variant.at("files").contains(file))
    refuse("the graph of variant " + bundle->variant + " is not among its files; export again");
  const fs::path graph = inside(bundle->folder, file);
  try {
    bundle->session = Ort::Session(env, graph.c_str(), session);
  } catch (const Ort::Exception& error) {
    refuse("onnxruntime " + have + " cannot load " + text_of(graph) + ": " + error.what());
  }
  Ort::AllocatorWithDefaultOptions allocator;
  const auto stored =
      bundle->session.GetModelMetadata().LookupCustomMetadataMapAllocated("edgelin", allocator);
  if (stored == nullptr || parse_json(stored.get()) != bundle->manifest.io_part())
    refuse(text_of(graph) +
           " does not carry the contract of edgelin.json; the files are of different exports");
  bundle->in_place = test_calls(*bundle, false) == test_calls(*bundle, true);
  test_device(bundle, options.tested);
  return bundle;
}

std::unique_ptr<Stream> open(const std::shared_ptr<Bundle>& bundle, size_t rows,
                             const char* capsule) {
  if (rows < 1 || rows > (1u << 20)) refuse("a stream has 1 .. 1048576 rows");
  const json& content = bundle->manifest.content;
  const json common = content.value("default_capsule", json());
  const std::string name = capsule != nullptr   ? capsule
                           : common.is_string() ? common.get<std::string>()
                                                : "none";
  auto stream = std::make_unique<Stream>(bundle, rows);
  if (name == "none") return stream;
  const json capsules = content.value("capsules", json::object());
  if (!capsules.contains(name)) refuse("the bundle has no capsule " + name);
  const fs::path path = inside(bundle->folder, capsules.at(name).at("file"));
  check_file(path, capsules.at(name));
  restore(*stream, read_state(path), path);
  stream->begin_here();
  return stream;
}

// -------------------------------------------------------------------------------------- C ABI

thread_local std::string last_error;

/// What a function gives, or `failed` with the error noted: no exception leaves the library.
template <typename T, typename Function>
T guarded(T failed, Function&& function) noexcept {
  try {
    return function();
  } catch (const std::exception& error) {
    try {
      last_error = error.what();
      std::replace(last_error.begin(), last_error.end(), '\n', ' ');
    } catch (...) {
      last_error.clear();
    }
  } catch (...) {
    last_error = "unknown error";
  }
  return failed;
}

}  // namespace

struct edgelin_bundle {
  std::shared_ptr<Bundle> it;
};

struct edgelin_stream {
  std::unique_ptr<Stream> it;
};

namespace {

/// What a handle stands for; a foreign caller may have overlooked that the call before failed.
template <typename Handle>
auto& its(Handle* handle) {
  if (handle == nullptr) refuse("no bundle or stream was given; see why it could not be opened");
  return handle->it;
}

fs::path path_of(const char* path) {
  if (path == nullptr || *path == 0) refuse("no path was given");
  return fs::u8path(path);
}

}  // namespace

const char* edgelin_last_error(void) { return last_error.c_str(); }

edgelin_bundle* edgelin_load(const char* folder, const edgelin_options* options) {
  return guarded<edgelin_bundle*>(nullptr, [&] {
    environment();  // first of all, before any other part of onnxruntime is used
    return new edgelin_bundle{load(folder, options != nullptr ? *options : edgelin_options{})};
  });
}

void edgelin_unload(edgelin_bundle* bundle) { delete bundle; }

const char* edgelin_manifest(const edgelin_bundle* bundle) {
  return guarded<const char*>(nullptr, [&] { return its(bundle)->manifest.text.c_str(); });
}

const char* edgelin_variant(const edgelin_bundle* bundle) {
  return guarded<const char*>(nullptr, [&] { return its(bundle)->variant.c_str(); });
}

size_t edgelin_output_size(const edgelin_bundle* bundle) {
  return guarded<size_t>(0, [&] { return its(bundle)->manifest.output_size; });
}

size_t edgelin_feature_size(const edgelin_bundle* bundle) {
  return guarded<size_t>(0, [&] { return its(bundle)->manifest.feature_size; });
}

int edgelin_is_end(const edgelin_bundle* bundle, int64_t token) {
  return guarded(0, [&] { return its(bundle)->manifest.ends.count(token) > 0 ? 1 : 0; });
}

edgelin_stream* edgelin_open(edgelin_bundle* bundle, size_t rows, const char* capsule) {
  return guarded<edgelin_stream*>(
      nullptr, [&] { return new edgelin_stream{open(its(bundle), rows, capsule)}; });
}

edgelin_stream* edgelin_fork(const edgelin_stream* stream) {
  return guarded<edgelin_stream*>(nullptr, [&] { return new edgelin_stream{its(stream)->fork()}; });
}

void edgelin_close(edgelin_stream* stream) { delete stream; }

int edgelin_reset(edgelin_stream* stream) {
  return guarded(-1, [&] { return its(stream)->reset(), 0; });
}

int edgelin_feed(edgelin_stream* stream, const int64_t* ids, size_t time, const int64_t* lengths,
                 float* all) {
  return guarded(-1, [&] { return its(stream)->feed(ids, false, time, lengths, all), 0; });
}

int edgelin_feed_features(edgelin_stream* stream, const float* features, size_t time,
                          const int64_t* lengths, float* all) {
  return guarded(-1, [&] { return its(stream)->feed(features, true, time, lengths, all), 0; });
}

const float* edgelin_outputs(const edgelin_stream* stream) {
  return guarded<const float*>(nullptr, [&] { return its(stream)->outputs(); });
}

int64_t edgelin_position(const edgelin_stream* stream, size_t row) {
  return guarded<int64_t>(-1, [&] { return its(stream)->position(row); });
}

int64_t edgelin_choose(const edgelin_stream* stream, size_t row, const edgelin_sampling* sampling) {
  return guarded<int64_t>(-1, [&] {
    return its(stream)->choose(row, sampling != nullptr ? *sampling : edgelin_sampling{});
  });
}

size_t edgelin_state_bytes(const edgelin_stream* stream) {
  return guarded<size_t>(0, [&] { return its(stream)->state_bytes(); });
}

int edgelin_state_save(const edgelin_stream* stream, const char* path) {
  return guarded(-1,
                 [&] { return write_file(path_of(path), state_text(its(stream)->saved())), 0; });
}

int edgelin_state_load(edgelin_stream* stream, const char* path) {
  return guarded(-1, [&] {
    const Saved saved = read_state(path_of(path));
    restore(*its(stream), saved, path_of(path));
    const auto variant = saved.metadata.find("variant");
    return variant != saved.metadata.end() && variant->second == its(stream)->bundle().variant ? 0
                                                                                              : 1;
  });
}
