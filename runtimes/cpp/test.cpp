// Replays the golden streams through the C ABI, and gives the runner what it must refuse.
//
//   edgelin-test GOLDEN WORK     GOLDEN: runtimes/golden; WORK: a folder for state files
//
// "Golden streams" in runtimes/README.md describes the files.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "edgelin.h"

namespace fs = std::filesystem;
using json = nlohmann::json;

static int checks = 0;
static double worst_difference, worst_divergence;  // of the golden stream that is replayed

static void expect(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  std::fprintf(stderr, "FAILED: %s (last error: %s)\n", what.c_str(), edgelin_last_error());
  std::exit(1);
}

static void refused(bool failed, const char* word, const std::string& what) {
  expect(failed && std::strstr(edgelin_last_error(), word) != nullptr,
         what + " is refused with '" + word + "'");
}

static std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

static void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// All numbers of nested lists, in order.
template <typename T>
static std::vector<T> flat(const json& value) {
  if (!value.is_array()) return {value.get<T>()};
  std::vector<T> found;
  for (const json& item : value)
    for (const T& number : flat<T>(item)) found.push_back(number);
  return found;
}

static double divergence(const std::vector<double>& wanted, const float* found) {
  const auto log_sum = [&](auto number) {
    double sum = 0;
    for (size_t i = 0; i < wanted.size(); ++i) sum += std::exp(number(i));
    return std::log(sum);
  };
  const double one = log_sum([&](size_t i) { return wanted[i]; });
  const double two = log_sum([&](size_t i) { return static_cast<double>(found[i]); });
  double total = 0;
  for (size_t i = 0; i < wanted.size(); ++i)
    total +=
        std::exp(wanted[i] - one) * ((wanted[i] - one) - (static_cast<double>(found[i]) - two));
  return total;
}

// Answers [rows][size] of the golden file beside those of the stream; null where there is none.
static void compare(const json& answers, const float* found, const json& golden,
                    const std::string& where) {
  const json& tolerance = golden.at("tolerance");
  for (size_t row = 0; row < answers.size(); ++row) {
    if (answers[row].is_null()) continue;
    const auto wanted = flat<double>(answers[row]);
    const float* here = found + row * wanted.size();
    double largest = 0;
    for (size_t i = 0; i < wanted.size(); ++i)
      largest = std::fmax(largest, std::fabs(here[i] - wanted[i]));
    worst_difference = std::fmax(worst_difference, largest);
    const bool near = largest <= tolerance.at("outputs").get<double>();
    bool alike = false;
    if (tolerance.contains("kl")) {
      const double kl = divergence(wanted, here);
      worst_divergence = std::fmax(worst_divergence, kl);
      alike = kl <= tolerance.at("kl").get<double>();
    }
    expect(near || alike, where + ": off by " + std::to_string(largest));
  }
}

static int feed(edgelin_stream* stream, const json& call) {
  const size_t time =
      call.contains("ids") ? call.at("ids")[0].size() : call.at("features")[0].size();
  std::vector<int64_t> lengths;
  if (call.contains("lengths")) lengths = flat<int64_t>(call.at("lengths"));
  const int64_t* given = lengths.empty() ? nullptr : lengths.data();
  if (call.contains("ids"))
    return edgelin_feed(stream, flat<int64_t>(call.at("ids")).data(), time, given, nullptr);
  return edgelin_feed_features(stream, flat<float>(call.at("features")).data(), time, given,
                               nullptr);
}

static void generate(edgelin_stream* stream, const json& wanted, const edgelin_sampling* sampling,
                     const json& golden, const std::string& where) {
  const bool exact = !golden.at("tolerance").contains("kl");
  for (const json& id : wanted.at("ids")) {
    const int64_t token = id;
    if (exact) expect(edgelin_choose(stream, 0, sampling) == token, where + ": token");
    expect(edgelin_feed(stream, &token, 1, nullptr, nullptr) == 0, where + ": feed");
  }
  compare(wanted.at("outputs"), edgelin_outputs(stream), golden, where);
}

// What the golden file says after its calls, from a stream that stands there.
static void finish(edgelin_stream* stream, const json& golden, const std::string& where) {
  if (!golden.contains("greedy")) return;
  edgelin_stream* twin = edgelin_fork(stream);
  generate(twin, golden.at("greedy"), nullptr, golden, where + " greedy");
  edgelin_close(twin);
  if (!golden.contains("sampled")) return;
  const json& settings = golden.at("sampled").at("settings");
  edgelin_sampling sampling = {};
  sampling.temperature = settings.at("temperature");
  sampling.top_k = settings.at("top_k");
  sampling.top_p = settings.at("top_p");
  sampling.min_p = settings.at("min_p");
  sampling.repetition_penalty = settings.at("repetition_penalty");
  sampling.seed = settings.at("seed");
  twin = edgelin_fork(stream);
  generate(twin, golden.at("sampled"), &sampling, golden, where + " sampled");
  edgelin_close(twin);
}

// All answers of one long call are those of the calls that it is made of.
static void whole(edgelin_bundle* bundle, const json& golden, const std::string& where) {
  std::vector<int64_t> ids;
  for (const json& call : golden.at("calls"))
    for (const int64_t id : flat<int64_t>(call.at("ids"))) ids.push_back(id);
  const size_t size = edgelin_output_size(bundle);
  std::vector<float> all(ids.size() * size);
  edgelin_stream* stream = edgelin_open(bundle, 1, "none");
  expect(edgelin_feed(stream, ids.data(), ids.size(), nullptr, all.data()) == 0, where + ": all");
  size_t at = 0;
  for (const json& call : golden.at("calls")) {
    at += call.at("ids")[0].size();
    compare(call.at("outputs"), all.data() + (at - 1) * size, golden, where + " all");
  }
  edgelin_close(stream);
}

static void replay(const fs::path& folder, const std::string& variant, const fs::path& work) {
  const json golden = json::parse(read(folder / (variant + ".json")));
  const std::string where = folder.filename().string() + "/" + variant;
  worst_difference = worst_divergence = 0;
  edgelin_options options = {};
  options.variant = variant.c_str();
  options.threads = 1;
  edgelin_bundle* bundle = edgelin_load((folder / "bundle").u8string().c_str(), &options);
  expect(bundle != nullptr, where + ": load");
  edgelin_stream* stream = edgelin_open(bundle, golden.at("batch"), "none");
  expect(stream != nullptr, where + ": open");
  for (int round = 0; round < 2; ++round) {  // once more after a reset
    for (const json& call : golden.at("calls")) {
      expect(feed(stream, call) == 0, where + ": call");
      compare(call.at("outputs"), edgelin_outputs(stream), golden, where);
    }
    if (round == 0)
      expect(edgelin_reset(stream) == 0 && edgelin_outputs(stream) == nullptr, where + ": reset");
  }
  finish(stream, golden, where);
  if (golden.at("batch") == 1 && golden.at("calls")[0].contains("ids"))
    whole(bundle, golden, where);
  if (golden.contains("state_file")) {  // Python's file, and our own of the same place
    edgelin_stream* other = edgelin_open(bundle, 1, "none");
    const std::string mine = (work / "mine.state").u8string(), file = golden.at("state_file");
    expect(edgelin_state_load(other, (folder / file).u8string().c_str()) == 0, where + ": load");
    finish(other, golden, where + " from Python's state");
    for (const json& shorter : golden.value("shorter", json::array())) {
      const std::string path = (folder / shorter.at("state_file").get<std::string>()).u8string();
      expect(edgelin_state_load(other, path.c_str()) == 0, where + ": load " + path);
      expect(feed(other, {{"ids", {shorter.at("ids")}}}) == 0, where + ": feed after " + path);
      compare(shorter.at("outputs"), edgelin_outputs(other), golden, where + " from " + path);
    }
    expect(edgelin_state_save(stream, mine.c_str()) == 0, where + ": save");
    expect(edgelin_state_load(other, mine.c_str()) == 0, where + ": load our own");
    finish(other, golden, where + " from our state");
    expect(edgelin_position(other, 0) == edgelin_position(stream, 0), where + ": position");
    edgelin_close(other);
  }
  edgelin_unload(bundle);
  edgelin_close(stream);  // outlives the handle of its bundle
  std::printf("%-26s largest difference %.1e", where.c_str(), worst_difference);
  if (golden.at("tolerance").contains("kl")) std::printf(", divergence %.1e nat", worst_divergence);
  std::printf("\n");
}

// What a user can do wrong, each refused in one line, with the stream as it was.
static void refusals(const fs::path& golden, const fs::path& work) {
  const fs::path bundles = golden / "fused" / "bundle";
  refused(edgelin_load((work / "none").u8string().c_str(), nullptr) == nullptr, "no bundle",
          "a missing folder");
  edgelin_options options = {};
  options.variant = "model_q9";
  refused(edgelin_load(bundles.u8string().c_str(), &options) == nullptr, "no variant",
          "an unknown variant");
  options.variant = "model";
  edgelin_bundle* bundle = edgelin_load(bundles.u8string().c_str(), &options);
  edgelin_stream* stream = edgelin_open(bundle, 1, nullptr);
  refused(edgelin_choose(stream, 0, nullptr) < 0, "read nothing", "a token before the first step");
  const int64_t good[] = {1, 2, 3}, bad[] = {1, static_cast<int64_t>(edgelin_output_size(bundle))};
  expect(edgelin_feed(stream, good, 3, nullptr, nullptr) == 0, "feed");
  refused(edgelin_feed(stream, bad, 2, nullptr, nullptr) < 0, "out of range", "an id out of range");
  refused(edgelin_feed(stream, good, 0, nullptr, nullptr) < 0, "nothing to read", "no step");
  refused(edgelin_feed(stream, good, 3, good, nullptr) < 0, "lengths",
          "lengths without such an input");
  const float feature = 0;
  refused(edgelin_feed_features(stream, &feature, 1, nullptr, nullptr) < 0, "token ids",
          "features");
  edgelin_sampling odd = {};
  odd.temperature = -1;
  refused(edgelin_choose(stream, 0, &odd) < 0, "temperature", "a negative temperature");
  refused(edgelin_open(bundle, 1, "nobody") == nullptr, "no capsule", "an unknown capsule");
  const fs::path path = work / "a.state", broken = work / "b.state";
  expect(edgelin_state_save(stream, path.u8string().c_str()) == 0, "save");
  const std::string saved = read(path);
  for (size_t at = 0; at < saved.size(); at += 97) {  // any byte, and any end
    std::string damaged = saved;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x41);
    write(broken, damaged);
    refused(edgelin_state_load(stream, broken.u8string().c_str()) < 0, "", "a damaged state file");
    write(broken, saved.substr(0, at));
    refused(edgelin_state_load(stream, broken.u8string().c_str()) < 0, "", "a cut state file");
  }
  const std::string other = (golden / "plain" / "model.state").u8string();
  refused(edgelin_state_load(stream, other.c_str()) < 0, "another model", "another model's state");
  refused(edgelin_state_save(stream, (work / "no" / "c.state").u8string().c_str()) < 0,
          "cannot be written", "a missing folder");
  expect(edgelin_position(stream, 0) == 3, "after all of that the stream stands where it stood");
  expect(edgelin_state_load(stream, path.u8string().c_str()) == 0, "its own state still fits");
  edgelin_close(stream);
  edgelin_unload(bundle);
  const fs::path copy = work / "copy";
  fs::remove_all(copy);
  fs::copy(bundles, copy, fs::copy_options::recursive);
  std::string manifest = read(copy / "edgelin.json");
  manifest.replace(manifest.find("\"chunk\": 64"), 11, "\"chunk\": 63");
  write(copy / "edgelin.json", manifest);
  refused(edgelin_load(copy.u8string().c_str(), &options) == nullptr, "changed after export",
          "a changed manifest");
  write(copy / "edgelin.json",
        "{\"format\": 1, \"a\": " + std::string(200000, '[') + std::string(200000, ']') + "}");
  refused(edgelin_load(copy.u8string().c_str(), &options) == nullptr, "deeply", "a deep manifest");
  write(copy / "edgelin.json", read(bundles / "edgelin.json"));
  std::string weights = read(copy / "onnx" / "model.onnx_data");
  weights[100] = static_cast<char>(weights[100] ^ 1);
  write(copy / "onnx" / "model.onnx_data", weights);
  refused(edgelin_load(copy.u8string().c_str(), &options) == nullptr, "sha256", "changed weights");
}

int main(int count, char** words) {
  if (count != 3) return std::fputs("edgelin-test GOLDEN WORK\n", stderr), 2;
  const fs::path golden = words[1], work = words[2];
  fs::create_directories(work);
  int streams = 0;
  for (const auto& folder : fs::directory_iterator(golden)) {
    if (!fs::is_directory(folder.path() / "bundle")) continue;
    for (const auto& file : fs::directory_iterator(folder.path()))
      if (file.path().extension() == ".json")
        replay(folder.path(), file.path().stem().string(), work), ++streams;
  }
  expect(streams > 0, "golden streams in " + golden.string());
  refusals(golden, work);
  std::printf("%d golden streams, %d checks passed\n", streams, checks);
}
