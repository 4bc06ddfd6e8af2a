// edgelin-run: continue a stream of token ids. The whole use of edgelin.h in one page.
//
//   edgelin-run BUNDLE [--ids "17 204 33"] [--max-tokens 40] [--temperature 0.8] [--seed 1]
//               [--variant NAME] [--threads 1] [--load-state FILE] [--save-state FILE]
//
// Prints the ids of the tokens that follow, and on the error channel the speed. Ids come from the
// tokenizer.json of the bundle and any library that reads it.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "edgelin.h"

static void need(bool good, const std::string& problem = {}) {
  if (good) return;
  std::fprintf(stderr, "Error: %s\n", problem.empty() ? edgelin_last_error() : problem.c_str());
  std::exit(1);
}

template <typename Number>
static Number number(const std::string& name, const std::string& text) {
  Number value = {};
  std::istringstream in(text);
  const bool good = (in >> value) && in.eof() && (std::is_signed_v<Number> || text[0] != '-');
  need(good, name + " is " + text + "; a number is needed");
  return value;
}

int main(int count, char** words) {
  std::map<std::string, std::string> given = {
      {"--max-tokens", "40"}, {"--temperature", "0"}, {"--seed", "0"}, {"--threads", "0"}};
  const std::set<std::string> known = {"--ids",     "--max-tokens", "--temperature", "--seed",
                                       "--threads", "--variant",    "--load-state",  "--save-state"};
  if (count < 2 || count % 2 != 0 || words[1][0] == '-')
    return std::fputs("edgelin-run BUNDLE [--ids \"17 204\"] [--max-tokens 40] ...\n", stderr), 2;
  for (int i = 2; i < count; i += 2) {
    need(known.count(words[i]) > 0, std::string("there is no option ") + words[i]);
    given[words[i]] = words[i + 1];
  }

  edgelin_options options = {};
  options.threads = number<int>("--threads", given["--threads"]);
  if (given.count("--variant")) options.variant = given["--variant"].c_str();
  edgelin_bundle* bundle = edgelin_load(words[1], &options);
  need(bundle != nullptr);
  edgelin_stream* stream = edgelin_open(bundle, 1, nullptr);
  need(stream != nullptr);
  if (given.count("--load-state"))
    need(edgelin_state_load(stream, given["--load-state"].c_str()) >= 0);

  std::istringstream text(given["--ids"]);
  std::vector<int64_t> prompt;
  for (std::string id; text >> id;) prompt.push_back(number<int64_t>("an id", id));
  if (!prompt.empty())
    need(edgelin_feed(stream, prompt.data(), prompt.size(), nullptr, nullptr) == 0);

  edgelin_sampling sampling = {};
  sampling.temperature = number<double>("--temperature", given["--temperature"]);
  sampling.seed = number<uint64_t>("--seed", given["--seed"]);
  const auto wanted = number<unsigned>("--max-tokens", given["--max-tokens"]);
  const auto begin = std::chrono::steady_clock::now();
  unsigned written = 0;
  for (; written < wanted; ++written) {
    const int64_t token = edgelin_choose(stream, 0, &sampling);
    need(token >= 0);
    if (edgelin_is_end(bundle, token)) break;
    need(edgelin_feed(stream, &token, 1, nullptr, nullptr) == 0);
    std::printf("%lld ", static_cast<long long>(token));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("\n");
  if (given.count("--save-state"))
    need(edgelin_state_save(stream, given["--save-state"].c_str()) == 0);
  std::fprintf(stderr, "%u tokens, %.1f tokens/s, state %zu bytes at position %lld\n", written,
               written / seconds.count(), edgelin_state_bytes(stream),
               static_cast<long long>(edgelin_position(stream, 0)));
  edgelin_close(stream);
  edgelin_unload(bundle);
}
