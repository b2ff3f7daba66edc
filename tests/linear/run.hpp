// Runs the kernel on `ctas` CTAs, one after another.
extern "C" void run(const Args* a, int ctas) {
    gridDim.x = ctas;
    exchange.resize(WARPS);
    for (int cta = 0; cta < ctas; cta++) {
        memset(memory, 0xff, sizeof memory);  // NaN, if read too early
        cta_barrier = std::make_unique<std::barrier<>>(WARPS * 32);
        warp_barriers.clear();
        for (int w = 0; w < WARPS; w++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
        std::vector<std::thread> threads;
        for (int t = 0; t < WARPS * 32; t++)
            threads.emplace_back([=] {
                threadIdx.x = t;
                blockIdx.x = cta;
                KERNEL(*a);
            });
        for (std::thread& thread : threads) thread.join();
    }
}
