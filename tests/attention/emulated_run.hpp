// Runs decode() on a grid of CTAs, one after another, with `shared` bytes of shared memory each, which begin as NaN.
static Args arguments;
static void thread() {
  decode(arguments);
  self->done = true;
  others();
}
extern "C" void run(const void* args, int x, int y, int z, int shared) {
  memcpy(&arguments, args, sizeof arguments);
  gridDim = {x, y, z}, size = shared;
  for (int cta_number = 0; cta_number < x * y * z; cta_number++) {
    blockIdx = {cta_number % x, cta_number / x % y, cta_number / x / y};
    memset(bytes, 0xff, sizeof bytes);
    threads.clear();
    for (int i = 0; i < WARPS * 32; i++) {
      threads.push_back(std::make_unique<Thread>());
      Thread& t = *threads.back();
      t.index = {i, 0, 0}, t.stack = std::make_unique<char[]>(1 << 17);
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.get(), t.context.uc_stack.ss_size = 1 << 17, t.context.uc_link = nullptr;
      makecontext(&t.context, thread, 0);
    }
    for (int left = WARPS * 32; left;)
      for (auto& t : threads)
        if (!t->done) self = t.get(), swapcontext(&runner, &t->context), left -= t->done;
  }
}
