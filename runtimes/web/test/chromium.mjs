/** Debian's Chromium, headless; with `gpu` WebGPU runs on a software adapter. */

import { chromium } from "playwright-core";

const QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"];
const GPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan", "--use-vulkan=swiftshader"];

export function launch({ gpu = false } = {}) {
  return chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", ...QUIET, ...(gpu ? GPU : ["--disable-gpu"])],
  });
}
